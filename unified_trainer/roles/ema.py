"""Exponential moving average (EMA) of a role's weights, sharded as the weights are."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from unified_trainer.errors import UserError
from unified_trainer.parallel.fsdp import to_local


class EMA:
    """An average that follows shadow <- decay shadow + (1 - decay) weight, once per update of the role.

    In the first `start` updates it is the weight itself.
    """

    def __init__(self, weights: dict[str, Tensor], decay: float, start: int = 0) -> None:
        if not 0 <= decay < 1:
            raise UserError(f"ema_decay must be in [0, 1), not {decay}")
        self.decay, self.start = decay, start
        self._weights = weights
        self.shadow = {name: weight.detach().clone() for name, weight in weights.items()}

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Follow the weights after the role's update number `updates`, counted from 1."""
        decay = self.decay if updates > self.start else 0.0
        shadows = [to_local(shadow) for shadow in self.shadow.values()]
        torch._foreach_lerp_(shadows, [to_local(weight.detach()) for weight in self._weights.values()], 1 - decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Run the role on the EMA weights inside the context, and on its own again after it."""
        with exchanged(self._weights, self.shadow):
            yield


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
        live = weight.detach().clone()
        weight.copy_(others[name])
        others[name].copy_(live)
