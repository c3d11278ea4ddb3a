"""A role's two experts: which network runs at which noise level (docs/decisions/0006-experts.md)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from unified_trainer.numerics.flow import GuidanceScale, per_sample
from unified_trainer.roles.backbone import Backbone
from unified_trainer.types import PerFrame, PerSample

Side = Literal["high", "low", ""]  # of the boundary; "" is all noise levels, of a role with one network
Rows = slice | Int[Tensor, " m"]
Share = Bool[Tensor, " b"] | Bool[Tensor, "b t"]  # the samples, or their frames, on one side
Balance = Literal["mixed", "natural", "equal"]


@dataclass(frozen=True)
class ExpertConfig:
    trained: bool = True  # False leaves the expert as it is, and its weights shared with roles of the same path
    learning_rate: float | None = None  # of this expert; None is the role's
    max_grad_norm: float | None = None  # of this expert's gradient; None is the role's
    offload: bool = False  # keep an expert that is not trained in CPU memory, copied to the device block by block


@dataclass(frozen=True)
class Experts:
    """Two networks of one role in memory: `high` runs at noise levels of at least the boundary."""

    high: Backbone
    low: Backbone
    boundary: float


@dataclass(frozen=True)
class ExpertLayout:
    """What a role is made of, known before any weight is read."""

    boundary: float | None = None  # None: one network
    components: Mapping[Side, str] = field(default_factory=lambda: {"": "transformer"})  # of the folder
    trained: tuple[Side, ...] = ()  # what of it learns
    offloaded: tuple[Side, ...] = ()  # what of it waits in CPU memory

    def learns(self, sigma: float) -> bool:
        """Whether the network that runs at this noise level is trained."""
        return side_of(sigma, self.boundary) in self.trained

    def refuse_idle(self, places: Sequence[Sequence[float]], what: str, way_out: str) -> None:
        """ValueError if at one of the places no noise level is of a network that learns."""
        for levels in places:
            if self.boundary is not None and not any(self.learns(level) for level in levels):
                side = side_of(levels[0], self.boundary)
                told = ", ".join(f"{level:.4g}" for level in levels)
                raise ValueError(
                    f"{what} lies wholly in the {side}-noise expert, which is not trained: noise levels {told}, "
                    f"boundary {self.boundary:g}. {way_out}"
                )


def layout_of(
    role: str,
    path: str,
    boundary: float,
    experts: Mapping[Side, ExpertConfig] | None,
    components: Sequence[str],
    said: float | None,
) -> ExpertLayout:
    """The networks of a role: two if its folder holds two, or if a role that learns is told where to split.

    `boundary` and `experts` are the role's settings, the latter None for one that nobody trains; `components` and
    `said` are the folder's networks, of high noise first, and its own boundary. ValueError names the key.
    """
    if not 0 <= boundary < 1:
        raise ValueError(f"{role}.boundary must be in (0, 1), or 0 for the folder's own, not {boundary}")
    if len(components) == 1 and not boundary:
        if experts and any(config != ExpertConfig() for config in experts.values()):
            raise ValueError(
                f"{role}.high and {role}.low are of two experts, but {path} holds one network: leave them out, or set "
                f"{role}.boundary to make two of it"
            )
        return ExpertLayout(trained=("",) if experts else ())
    if len(components) == 1 and experts is None:
        raise ValueError(f"{role}.boundary: {path} holds one network, and two that stay equal are one: leave it out")
    at = boundary or said
    if at is None:
        raise ValueError(f"{path} holds two networks and no boundary_ratio: set {role}.boundary")
    trained = tuple(side for side, config in (experts or {}).items() if config.trained)
    for side, config in (experts or {}).items():
        if config.offload and config.trained:
            raise ValueError(
                f"{role}.{side}.offload is for an expert that stays as it is: set {role}.{side}.trained False"
            )
    if experts and not trained:
        raise ValueError(f"{role}.high.trained and {role}.low.trained are both False: there is nothing to train")
    offloaded = tuple(side for side, config in (experts or {}).items() if config.offload)
    return ExpertLayout(at, {"high": components[0], "low": components[-1]}, trained, offloaded)


def side_of(sigma: float, boundary: float | None) -> Side:
    """The side of one noise level."""
    return "" if boundary is None else "high" if sigma >= boundary else "low"


def shares(sigma: PerSample | PerFrame, boundary: float) -> dict[Side, Share]:
    """Which samples, or frames of them, are on which side."""
    high = sigma >= boundary
    return {"high": high, "low": ~high}


def ask(
    shares: Mapping[Side, Share], call: Callable[[Side, Rows], tuple[Shaped[Tensor, "..."], ...]]
) -> tuple[Shaped[Tensor, "..."], ...]:
    """Each side's `call` on the rows that have a share in it, its answers joined row by row.

    A side without rows here, that runs because another rank has some, gets one whose answer is thrown away: a pass of
    sharded weights needs all ranks, forward and backward.
    """
    if len(shares) == 1:
        return call(next(iter(shares)), slice(None))
    joined: list[Tensor] = []
    for side, share in shares.items():
        rows = share.reshape(len(share), -1).any(1).nonzero().flatten()
        rows = rows if len(rows) else torch.zeros(1, dtype=torch.int64, device=share.device)
        parts = [_spread(answer, share, rows) for answer in call(side, rows)]
        joined = [a + b for a, b in zip(joined, parts, strict=True)] if joined else parts
    return tuple(joined)


def _spread(answer: Shaped[Tensor, "m ..."], share: Share, rows: Int[Tensor, " m"]) -> Shaped[Tensor, "b ..."]:
    """The answer at its rows, zero elsewhere and where a row has no share."""
    kept = torch.where(per_sample(share[rows], answer) > 0, answer, 0.0)
    return kept.new_zeros(len(share), *kept.shape[1:]).index_add(0, rows.to(kept.device), kept)


def scale_at(
    guidance_scale: GuidanceScale, sigma: PerSample, boundary: float | None, role: str
) -> float | Float[Tensor, " b"]:
    """The guidance scale of each sample: one number for all, or one for each side."""
    if not isinstance(guidance_scale, tuple):
        return guidance_scale
    if boundary is None:
        raise ValueError(f"{role} is one network and has one guidance_scale, not {guidance_scale}")
    high, low = (torch.tensor(scale, dtype=torch.float64) for scale in guidance_scale)
    scales = torch.where(sigma.cpu() >= boundary, high, low)
    return 1.0 if bool((scales == 1).all()) else scales


def check_guidance(key: str, guidance_scale: GuidanceScale, role: str, split: ExpertLayout) -> None:
    """ValueError unless two scales are for two experts."""
    if isinstance(guidance_scale, tuple) and layout.boundary is None:
        raise ValueError(f"{key} {guidance_scale} is for two experts, but {role} is one network: give one number")


def one_side(
    u: PerSample, share: float, balance: Balance, shared: np.random.Generator
) -> tuple[Float[Tensor, " b"], float]:
    """Uniform numbers as `balance` draws them, and their weight in the loss.

    `share` of [0, 1), its end, belongs to the high-noise expert. `mixed` leaves each number where it is. The others
    take one side for all, drawn equal on all ranks, so that one expert runs: `natural` with the probability it has,
    which leaves the law as it is, `equal` with 1/2, which the weight p / q makes up for.
    """
    if balance == "mixed":
        return u, 1.0
    chance = share if balance == "natural" else 0.5
    if shared.random() < chance:
        return 1 - share + share * u, share / chance
    return (1 - share) * u, (1 - share) / (1 - chance)


def check_balance(balance: Balance, share: float | None, role: str) -> None:
    """ValueError unless `balance` is of two experts, both with noise levels; `share` is that of the high-noise one."""
    if balance != "mixed" and share is None:
        raise ValueError(f"algorithm.expert_balance must be mixed: {role} is one network")
    if balance == "equal" and share in (0, 1):
        raise ValueError(
            f"algorithm.expert_balance equal needs noise levels on both sides of {role}'s boundary, but the "
            f"high-noise expert has {share:.0%} of them: set natural"
        )
