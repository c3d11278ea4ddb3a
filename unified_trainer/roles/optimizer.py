"""AdamW (arXiv:1711.05101) on this rank's parts of the weights, with moments in float32 or in bf16."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from unified_trainer.basics.types import DTYPES
from unified_trainer.parallel.device import optimizer_kernels
from unified_trainer.parallel.fsdp import offset_of, to_local
from unified_trainer.roles.stochastic_rounding import random_bits, round_to_bf16_

Moments = Literal["fp32", "bf16"]
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's first and second moment, by torch's names
BUCKET = 2**24  # elements whose bf16 moments are in float32 at a time; a larger weight is a bucket of its own


class AdamW:
    """AdamW over named weights, which may be sharded; equal to torch.optim.AdamW bit for bit with float32 moments.

    The update of an element needs no other, so it runs on this rank's plain tensors: an operation on a DTensor costs
    more than the arithmetic of a small weight.

    Moments in bf16 are updated in float32 and rounded stochastically, because a second moment that changes by 1 - beta2
    = 1e-3 of itself would not change in bf16, whose steps are 4e-3 to 8e-3. The random bits are a function of (update,
    weight, element): a run gives the same bits on any number of ranks and after a restart.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        moments: Moments = "fp32",
    ) -> None:
        self._weights = dict(weights)
        self._options = {"beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": weight_decay}
        self._dtype = DTYPES[moments]
        self._device = self._place = next(iter(self._weights.values())).device  # of the update, and of the moments
        self._kernels = optimizer_kernels(self._device)
        self._state: dict[str, dict[str, Tensor]] = {}

    def state(self) -> dict[str, Tensor]:
        """Return counter and moments of every weight, as NAME/step, NAME/exp_avg and NAME/exp_avg_sq."""
        return {f"{key}/{name}": value for key in self._weights for name, value in self._state_of(key).items()}

    @property
    def moments(self) -> list[Tensor]:
        """The moments of the weights that were updated or saved so far."""
        return [state[name] for state in self._state.values() for name in MOMENTS]

    @torch.no_grad()
    def step(self, learning_rate: float, update: int) -> None:
        """Update once the weights that have a gradient; `update` is the number of updates made before."""
        given = [key for key, p in self._weights.items() if p.grad is not None]
        for keys in self._parts(given):
            held = [[self._weights[key].detach() for key in keys], [self._weights[key].grad for key in keys]]
            held += [[self._state_of(key)[name] for key in keys] for name in MOMENTS]
            self._update(keys, [[to_local(x) for x in own] for own in held], learning_rate, update)
        torch.autograd.graph.increment_version([self._weights[key] for key in given])  # the fused kernel does not

    def _parts(self, keys: list[str]) -> Iterable[list[str]]:
        """Return the weights that are updated together."""
        return [keys] if self._dtype == torch.float32 else self._buckets(keys)

    def _update(self, keys: Sequence[str], held: Sequence[list[Tensor]], learning_rate: float, update: int) -> None:
        """Change weights and moments in place; `held` are weights, gradients and both moments, on one device."""
        weights, gradients, *moments = held
        exact = [[moment.float() for moment in own] for own in moments]  # those in float32 themselves
        adamw(
            weights,
            gradients,
            *exact,
            max_exp_avg_sqs=[],
            state_steps=[self._state_of(key)["step"] for key in keys],
            amsgrad=False,
            maximize=False,
            lr=learning_rate,
            **self._options,
            **self._kernels,
        )
        if self._dtype == torch.float32:
            return
        firsts = [crc32(key.encode()) + offset_of(self._weights[key]) for key in keys]
        sizes = [moment.numel() for moment in moments[0]]
        bits = random_bits(update, list(zip(firsts, sizes, strict=True)), weights[0].device)
        for own, values, shift in zip(moments, exact, (0, 16), strict=True):
            round_to_bf16_(own, values, bits >> shift)

    def _buckets(self, keys: Sequence[str]) -> Iterator[list[str]]:
        bucket, size = list[str](), 0
        for key in keys:
            numel = to_local(self._weights[key]).numel()
            if bucket and size + numel > BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(key)
            size += numel
        if bucket:
            yield bucket

    def _state_of(self, key: str) -> dict[str, Tensor]:
        """Return counter and moments of a weight, which take memory from the first update on, or the first save."""
        if key not in self._state:
            p = self._weights[key].detach()
            fused = self._kernels.get("fused", False)  # its kernel reads the counter on the device
            step = torch.tensor(0.0, device=self._device if fused else None)
            moments = {name: torch.zeros_like(p, dtype=self._dtype, device=self._place) for name in MOMENTS}
            self._state[key] = {"step": step, **moments}
        return self._state[key]


class MovedAdamW(AdamW):
    """AdamW whose weights or moments lie in CPU memory: a bucket of them at a time is on the device."""

    def __init__(
        self, weights: Mapping[str, nn.Parameter], *, device: torch.device, place: torch.device, **options: Any
    ) -> None:
        """Update on `device`, and keep the moments on `place`."""
        super().__init__(weights, **options)
        self._device, self._place, self._kernels = device, place, optimizer_kernels(device)

    def _parts(self, keys: list[str]) -> Iterable[list[str]]:
        return self._buckets(keys)

    def _update(self, keys: Sequence[str], held: Sequence[list[Tensor]], learning_rate: float, update: int) -> None:
        moved = [[x.to(self._device) for x in own] for own in held]
        super()._update(keys, moved, learning_rate, update)
        for kept, changed in zip(chain(*held), chain(*moved), strict=True):
            if kept is not changed:
                kept.copy_(changed)
