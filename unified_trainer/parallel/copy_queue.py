"""Copies between a device and CPU memory, in a queue of their own beside the device's work."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unified_trainer.parallel.device import can_pin


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
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
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


@functools.cache
def copy_queue(device: torch.device) -> CopyQueue:
    """Return the queue of a device, one for the whole process."""
    return CopyQueue(device)
