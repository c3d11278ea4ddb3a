"""Exponential moving average (EMA) of a role's weights, sharded as the weights are, on their device or on the CPU."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.parallel.device import can_pin
from unified_trainer.parallel.fsdp import to_local


class EMA:
    """An average that follows shadow <- decay shadow + (1 - decay) weight, once per update of the role.

    In the first `start` updates it is the weight itself. In float32 an update is lost if (1 - decay) (weight - shadow)
    is below half the distance of shadow to the next number, which is 2^-25 to 2^-24 of it: the average then rests up to
    6e-8 / (1 - decay) of the weight beside it.
    """

    def __init__(self, weights: dict[str, Tensor], decay: float, start: int = 0) -> None:
        if not 0 <= decay < 1:
            raise UserError(f"ema_decay must be in [0, 1), not {decay}")
        self.decay, self.start = decay, start
        self._weights = weights
        self._shadow = {name: self._stored(weight.detach()) for name, weight in weights.items()}

    @property
    def shadow(self) -> dict[str, Tensor]:
        """The EMA weights by name."""
        return self._shadow

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Follow the weights after the role's update number `updates`, counted from 1."""
        self._follow([to_local(weight.detach()) for weight in self._weights.values()], self._decay_at(updates))

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Run the role on the EMA weights inside the context, and on its own again after it."""
        with exchanged(self._weights, self.shadow):
            yield

    def _stored(self, weight: Tensor) -> Tensor:
        return weight.clone()

    def _decay_at(self, updates: int) -> float:
        return self.decay if updates > self.start else 0.0

    def _follow(self, weights: Sequence[Tensor], decay: float) -> None:
        torch._foreach_lerp_([to_local(shadow) for shadow in self._shadow.values()], weights, 1 - decay)


class HostEMA(EMA):
    """An EMA in CPU memory that a thread updates while training goes on; reading it waits for the thread.

    On an accelerator the weights are copied into pinned memory in the order of its stream, so that what changes them
    next comes after the copy. An update waits only if the average of the one before is not done.
    """

    def __init__(self, weights: dict[str, Tensor], decay: float, start: int = 0) -> None:
        super().__init__(weights, decay, start)
        self._device = next(iter(weights.values())).device
        pinned = can_pin(self._device)
        local = [to_local(shadow) for shadow in self._shadow.values()]
        self._arriving = [torch.empty_like(part, pin_memory=pinned) for part in local]
        self._thread = ThreadPoolExecutor(1, "ema")
        self._pending: Future[None] | None = None

    @property
    def shadow(self) -> dict[str, Tensor]:
        self._wait()
        return self._shadow

    def _stored(self, weight: Tensor) -> Tensor:
        return weight.to("cpu", copy=True)

    def _follow(self, weights: Sequence[Tensor], decay: float) -> None:
        self._wait()  # the thread reads the pinned copies until its average is done
        for arriving, weight in zip(self._arriving, weights, strict=True):
            arriving.copy_(weight, non_blocking=True)
        copied = None if self._device.type == "cpu" else torch.Event(self._device)
        if copied is not None:
            copied.record()
        self._pending = self._thread.submit(self._average, copied, decay)

    @torch.no_grad()
    def _average(self, copied: torch.Event | None, decay: float) -> None:
        if copied is not None:
            copied.synchronize()
        super()._follow(self._arriving, decay)

    def _wait(self) -> None:
        """Wait for the average of the last update; raise what its thread raised."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None


@contextmanager
def exchanged(weights: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> Iterator[None]:
    """Exchange the values of weights with those of other tensors, on any device, inside the context."""
    _exchange(weights, others)
    try:
        yield
    finally:
        _exchange(weights, others)


@torch.no_grad()
def _exchange(weights: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
    for name, weight in weights.items():
        own, other = to_local(weight), to_local(others[name])
        live = own.detach().clone()
        own.copy_(other)
        other.copy_(live)
