"""Two experts of one role: which network runs at which noise level (docs/decisions/0006-experts.md).

Only roles know of experts. A method draws noise levels through a role, asks a role for velocities and asks it which
noise levels it trains.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Fraction, NonNegative
from unified_trainer.basics.types import PerFrame, PerSample, take_rows
from unified_trainer.numerics.flow import GuidanceScale, per_sample
from unified_trainer.roles.adapter import FrozenExpertConfig
from unified_trainer.roles.backbone import Backbone

Expert = Literal["high", "low", ""]  # the high-noise or the low-noise expert; "" is the only network of a role
Pick = Callable[[Tensor], Tensor]  # the rows of a tensor [b, ...] that one expert computes
RowMask = Bool[Tensor, " b"] | Bool[Tensor, "b t"]  # the samples, or their frames, that one expert runs on
Balance = Literal["mixed", "natural", "equal"]


@dataclass(frozen=True)
class ExpertConfig(FrozenExpertConfig):
    trained: bool = True
    """Train this expert. If not, its weights stay, and are shared with other roles of the same path."""
    learning_rate: Fraction | None = None
    """Learning rate of this expert; None takes the role's."""
    max_grad_norm: NonNegative | None = None
    """Largest gradient norm of this expert; None takes the role's."""
    offload: bool = False
    """Keep an expert that is not trained in CPU memory and copy it to the device block by block."""


@dataclass(frozen=True)
class ExpertPair:
    """Two networks of one role: `high` runs at noise levels of at least the boundary. None is not in memory."""

    high: Backbone | None
    low: Backbone | None
    boundary: float


def by_expert(networks: Backbone | ExpertPair) -> dict[Expert, Backbone]:
    """Return a role's networks in memory by name, high noise first."""
    if not isinstance(networks, ExpertPair):
        return {"": networks}
    both: dict[Expert, Backbone | None] = {"high": networks.high, "low": networks.low}
    return {expert: backbone for expert, backbone in both.items() if backbone is not None}


@dataclass(frozen=True)
class ExpertLayout:
    """The networks of a role, known from its folder and settings before any weight is read."""

    boundary: float | None = None  # None: one network
    components: Mapping[Expert, str] = field(default_factory=dict)  # folder component of each network
    trained: tuple[Expert, ...] = ()  # networks that are trained
    offloaded: tuple[Expert, ...] = ()  # networks that are kept in CPU memory
    left_out: tuple[Expert, ...] = ()  # networks that are not trained and that nothing runs: they are not loaded

    @property
    def trains_one_of_two(self) -> bool:
        """Whether one of two experts is trained."""
        return self.boundary is not None and len(self.trained) == 1

    def trains(self, sigma: float) -> bool:
        """Return whether the network that runs at this noise level is trained."""
        return expert_at(sigma, self.boundary) in self.trained


def layout_of(
    role: str,
    path: str,
    boundary: float,
    experts: Mapping[Expert, ExpertConfig] | None,
    components: Sequence[str],
    folder_boundary: float | None,
) -> ExpertLayout:
    """Return the networks of a role: two if its folder holds two, or if a trained role sets a boundary.

    `boundary` and `experts` are the role's settings (`experts` is None for a frozen role); `components` and
    `folder_boundary` are the folder's networks, high noise first, and its own boundary. UserError names the key.
    """
    if len(components) == 1 and not boundary:
        if experts and any(config != ExpertConfig() for config in experts.values()):
            raise UserError(
                f"{role}.high and {role}.low are settings of two experts, but {path} holds one network: leave them "
                f"out, or set {role}.boundary to make two experts of it"
            )
        return ExpertLayout(None, {"": components[0]}, ("",) if experts else ())
    if len(components) == 1 and experts is None:
        raise UserError(
            f"{role}.boundary: {path} holds one network and {role} is not trained, so two experts would stay equal: "
            "leave it out"
        )
    at = boundary or folder_boundary
    if at is None:
        raise UserError(f"{path} holds two networks and no boundary_ratio: set {role}.boundary")
    trained = tuple(expert for expert, config in (experts or {}).items() if config.trained)
    for expert, config in (experts or {}).items():
        if config.offload and config.trained:
            raise UserError(
                f"{role}.{expert}.offload needs an expert that is not trained: set --{role}.{expert}.no-trained"
            )
    if experts and not trained:
        raise UserError(f"{role}.high.trained and {role}.low.trained are both off: there is nothing to train")
    offloaded = tuple(expert for expert, config in (experts or {}).items() if config.offload)
    return ExpertLayout(at, {"high": components[0], "low": components[-1]}, trained, offloaded)


def expert_at(sigma: float, boundary: float | None) -> Expert:
    """Return the expert that runs at a noise level."""
    return "" if boundary is None else "high" if sigma >= boundary else "low"


def row_masks(sigma: PerSample | PerFrame, boundary: float) -> dict[Expert, RowMask]:
    """Return the samples, or frames of samples, that each expert runs on."""
    high = sigma >= boundary
    return {"high": high, "low": ~high}


def route(
    masks: Mapping[Expert, RowMask], call: Callable[[Expert, Pick], tuple[Shaped[Tensor, "..."], ...]]
) -> tuple[Shaped[Tensor, "..."], ...]:
    """Call each expert on its rows and join the results row by row.

    An expert without rows on this rank, which runs because another rank has some, gets one row whose result is dropped:
    a pass of sharded weights needs all ranks, forward and backward.
    """
    if len(masks) == 1:
        return call(next(iter(masks)), lambda x: x)
    joined: list[Tensor] = []
    for expert, mask in masks.items():
        rows = mask.reshape(len(mask), -1).any(1).nonzero().flatten()
        rows = rows if len(rows) else torch.zeros(1, dtype=torch.int64, device=mask.device)
        pick = partial(take_rows, rows=rows.tolist())
        parts = [_scatter(result, mask, rows) for result in call(expert, pick)]
        joined = [a + b for a, b in zip(joined, parts, strict=True)] if joined else parts
    return tuple(joined)


def _scatter(result: Shaped[Tensor, "m ..."], mask: RowMask, rows: Int[Tensor, " m"]) -> Shaped[Tensor, "b ..."]:
    """Place the results at their rows, with zeros elsewhere and where the mask is False."""
    kept = torch.where(per_sample(mask[rows], result) > 0, result, 0.0)
    return kept.new_zeros(len(mask), *kept.shape[1:]).index_add(0, rows.to(kept.device, non_blocking=True), kept)


def scale_at(
    guidance_scale: GuidanceScale, sigma: PerSample | PerFrame, boundary: float | None, role: str
) -> float | PerSample | PerFrame:
    """Return the guidance scale at each noise level: one number, or one for each expert."""
    if not isinstance(guidance_scale, tuple):
        return guidance_scale
    if boundary is None:
        raise UserError(f"{role} is one network and has one guidance_scale, not {guidance_scale}")
    high, low = (torch.tensor(scale, dtype=torch.float64) for scale in guidance_scale)
    scales = torch.where(sigma.cpu() >= boundary, high, low)
    return 1.0 if bool((scales == 1).all()) else scales


def balanced_uniform(
    u: PerSample, share: float, balance: Balance, shared: np.random.Generator
) -> tuple[Float[Tensor, " b"], float]:
    """Return uniform numbers restricted to one expert's noise levels, and the weight p / q of their loss.

    `share`, the end of [0, 1), belongs to the high-noise expert. `mixed` changes nothing. The others draw one expert
    for all samples, the same on all ranks, so that one network runs: `natural` with the expert's own probability p,
    which leaves the distribution as it is, `equal` with probability q = 1/2, which the weight p / q corrects.
    """
    if balance == "mixed":
        return u, 1.0
    chance = share if balance == "natural" else 0.5
    if shared.random() < chance:
        return 1 - share + share * u, share / chance
    return (1 - share) * u, (1 - share) / (1 - chance)


def check_balance(key: str, balance: Balance, share: float | None) -> None:
    """Raise UserError unless `balance` fits the high-noise expert's share of noise levels, None for one network."""
    if balance != "mixed" and share is None:
        raise UserError(f"{key} must be mixed: it chooses between two experts, but there is one network")
    if balance == "equal" and share in (0, 1):
        raise UserError(
            f"{key} equal needs noise levels on both sides of the boundary, but the high-noise expert has {share:.0%} "
            f"of them: set {key} natural"
        )
