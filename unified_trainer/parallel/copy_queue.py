"""Copies between a device and CPU memory, in a queue of their own beside the device's work."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from unified_trainer.parallel.device import can_pin
from unified_trainer.parallel.fsdp import to_local

BLOCK = 2**26  # bytes of pinned memory at a time: torch rounds them up to a power of 2


class CopyQueue:
    """Copies to and from pinned CPU memory that neither the program nor the work of the device waits for.

    The copies run in the order in which they are asked for, on a stream of their own. A copy to the device begins as
    soon as the program asks for it, while the device may still be busy with earlier work; only the work that is queued
    after it waits for it. On a CPU nothing is copied to CPU memory, because it is there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream: Any = self._module.Stream(device) if self._module else None

    def to_cpu(self, x: Tensor) -> Tensor:
        """Return a copy in CPU memory, which holds the values once the queue has come to it."""
        if self._module is None or x.device.type == "cpu":
            return x.pin_memory() if can_pin(self._device) else x
        x = x.detach().contiguous()
        kept = torch.empty(x.shape, dtype=x.dtype, pin_memory=can_pin(self._device))
        with self._after_the_device():
            kept.copy_(x, non_blocking=True)
        x.record_stream(self._stream)  # its memory is not used again before the copy is made
        return kept

    def to_device(self, rows: Sequence[Tensor]) -> Tensor:
        """Return tensors of one shape from CPU memory, stacked on the device; a tensor may occur more than once."""
        if self._module is None:
            return torch.stack(list(rows))
        here = self._module.current_stream(self._device)
        with self._module.stream(self._stream):  # allocated here too: what it overwrites was of this queue
            copies = torch.empty(len(rows), *rows[0].shape, dtype=rows[0].dtype, device=self._device)
            for place, row in zip(copies.unbind(0), rows, strict=True):
                place.copy_(row, non_blocking=True)
        here.wait_stream(self._stream)
        copies.record_stream(here)
        return copies

    @contextmanager
    def offloaded(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Keep this rank's parts of tensors of the device in CPU memory inside the context; nothing may use them there.

        Their memory on the device is free meanwhile. After it, also after an error, they have their values again, and
        the work that is queued then waits for the copies. Tensors of other devices stay where they are.
        """
        whole = self._whole(tensors)
        sizes = [part.untyped_storage().nbytes() for part in whole]
        places = _places(whole, can_pin(self._device))
        with self._after_the_device():
            for part, place in places:
                place.copy_(part, non_blocking=True)
        for part in whole:
            if self._module is not None:
                part.record_stream(self._stream)
            part.untyped_storage().resize_(0)
        try:
            yield
        finally:
            # Allocated outside of this queue's stream, whose freed memory a rollout could not use.
            for part, size in zip(whole, sizes, strict=True):
                part.untyped_storage().resize_(size)
            with self._after_the_device():
                for part, place in places:
                    part.copy_(place, non_blocking=True)
            if self._module is not None:
                self._module.current_stream(self._device).wait_stream(self._stream)

    def _whole(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return the memory behind tensors of the device as bytes, each once."""
        found: dict[int, Tensor] = {}
        for tensor in tensors:
            part = to_local(tensor).detach()
            storage = part.untyped_storage()
            if part.device == self._device and storage.nbytes():
                count = storage.nbytes() // part.element_size()
                found.setdefault(storage.data_ptr(), part.as_strided((count,), (1,), 0).view(torch.uint8))
        return list(found.values())

    @contextmanager
    def _after_the_device(self) -> Iterator[None]:
        """Let copies inside the context begin when the device has done the work that is queued so far."""
        if self._module is None:
            yield
            return
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            yield


def _places(whole: Sequence[Tensor], pinned: bool) -> list[tuple[Tensor, Tensor]]:
    """Return pieces of tensors of bytes, each with a place of its size in CPU memory."""
    places, room = list[tuple[Tensor, Tensor]](), torch.empty(0, dtype=torch.uint8)
    for rest in whole:
        while len(rest):
            if not len(room):
                room = torch.empty(BLOCK, dtype=torch.uint8, pin_memory=pinned)
            size = min(len(rest), len(room))
            places.append((rest[:size], room[:size]))
            rest, room = rest[size:], room[size:]
    return places


@functools.cache
def copy_queue(device: torch.device) -> CopyQueue:
    """Return the queue of a device, one for the whole process."""
    return CopyQueue(device)
