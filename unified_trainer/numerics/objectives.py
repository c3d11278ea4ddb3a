"""Policy objectives by name, and their diagnostics.

An objective is a small frozen value: its parameters are its fields, and calling it gives the gain of each element,
which is maximized. The loss and all diagnostics read the same value.

Ratios, and what they are compared with, are in the widest dtype of their device (`types.widest`): a log-ratio is a mean
over the D elements of a latent, and its spread of about 1e-5 at D = 1e6 is only a hundred times the spacing of float32
numbers near a ratio of 1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.effects import RUNS_CODE
from unified_trainer.basics.ranges import NonNegative, Positive, above
from unified_trainer.basics.types import widest
from unified_trainer.numerics.flow import sample_mean
from unified_trainer.numerics.kl import gaussian_kl

LEAST_ERROR = 1e-5  # smallest divisor of a relative error
LOG_RATIO_LIMIT = 20.0  # log-ratios are clipped to this size before exp
SATURATED = 0.1  # share of its largest slope below which SAPO's gate counts as saturated

Bound = float | Tensor  # a number, or one number per element


@dataclass(frozen=True)
class Objective:
    """An objective of a policy gradient. Derive a frozen dataclass from it for one of your own.

    r = exp(clip(log_ratio, -20, 20)) and A = advantage in all formulas; lo = 1 - clip_low, hi = 1 + clip_high, and sg
    stops the gradient.
    """

    kind: Annotated[str, RUNS_CODE] = "clip"
    """Objective: clip, none, dual_clip, soft_clip, sapo, ce_gppo, cispo or gspo (docs/methods/dance_grpo.md has the
    formulas), the name of an installed one, or path/to/file.py:Class or package.module:Class of your own."""
    of_sample: ClassVar[bool] = False  # whether an element's log-ratio is the mean over the transitions of its sample

    def __call__(self, log_ratio: Tensor, advantage: Tensor, clip_low: Bound, clip_high: Bound) -> Tensor:
        """Return the gain of each element, in the widest dtype of its device and the shape of `log_ratio`."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__")

    def metrics(self, log_ratio: Tensor, advantage: Tensor) -> Mapping[str, float]:
        """Return statistics of this objective alone, by the name of their metric."""
        return {}


@dataclass(frozen=True)
class Unclipped(Objective):
    """r A."""

    kind: Annotated[str, RUNS_CODE] = "none"

    def __call__(self, log_ratio: Tensor, advantage: Tensor, clip_low: Bound, clip_high: Bound) -> Tensor:
        return ratio(log_ratio) * advantage


@dataclass(frozen=True)
class Clip(Objective):
    """min(r A, clip(r, lo, hi) A) (PPO, arXiv:1707.06347)."""

    def __call__(self, log_ratio: Tensor, advantage: Tensor, clip_low: Bound, clip_high: Bound) -> Tensor:
        r = ratio(log_ratio)
        return torch.minimum(r * advantage, r.clamp(1 - clip_low, 1 + clip_high) * advantage)


@dataclass(frozen=True)
class DualClip(Clip):
    """The clipped objective, and at least dual_clip A where A < 0 (arXiv:1912.09729)."""

    kind: Annotated[str, RUNS_CODE] = "dual_clip"
    dual_clip: Annotated[float, above(1)] = 3.0
    """Ratio above which an element of negative advantage has no gradient."""

    def __call__(self, log_ratio: Tensor, advantage: Tensor, clip_low: Bound, clip_high: Bound) -> Tensor:
        gain = super().__call__(log_ratio, advantage, clip_low, clip_high)
        return torch.where(advantage < 0, torch.maximum(gain, self.dual_clip * advantage), gain)


@dataclass(frozen=True)
class SoftClip(Objective):
    """sg(min(r, 1 / r)^alpha) r A."""

    kind: Annotated[str, RUNS_CODE] = "soft_clip"
    alpha: NonNegative = 1.0
    """Exponent of the weight min(r, 1 / r); 0 does not clip."""

    def __call__(self, log_ratio: Tensor, advantage: Tensor, clip_low: Bound, clip_high: Bound) -> Tensor:
        r = ratio(log_ratio)
        return torch.minimum(r, 1 / r).detach() ** self.alpha * r * advantage


@dataclass(frozen=True)
class SAPO(Objective):
    """4 / tau sigmoid(tau (r - 1)) A; tau is tau_pos where A > 0, else tau_neg (arXiv:2511.20347)."""

    kind: Annotated[str, RUNS_CODE] = "sapo"
    tau_pos: Positive = 1.0
    """Steepness of the gate for positive advantages."""
    tau_neg: Positive = 1.05
    """Steepness of the gate for advantages of 0 and below."""

    def __call__(self, log_ratio: Tensor, advantage: Tensor, clip_low: Bound, clip_high: Bound) -> Tensor:
        r, tau = ratio(log_ratio), self._tau(advantage)
        return 4 / tau * torch.sigmoid(tau * (r - 1)) * advantage

    def metrics(self, log_ratio: Tensor, advantage: Tensor) -> Mapping[str, float]:
        gate = torch.sigmoid(self._tau(advantage) * (ratio(log_ratio) - 1))
        return {"saturated_fraction": float((4 * gate * (1 - gate) < SATURATED).double().mean())}

    def _tau(self, advantage: Tensor) -> Tensor:
        tau = torch.full_like(advantage, self.tau_neg, dtype=widest(advantage.device))
        return tau.masked_fill(advantage > 0, self.tau_pos)


@dataclass(frozen=True)
class CEGPPO(Objective):
    """r A inside the clip range; outside the gradient is scaled, not stopped (arXiv:2509.20712).

    beta_low lo r / sg(r) A where A < 0 and r < lo; beta_high hi r / sg(r) A where A > 0 and r > hi; else r A.
    """

    kind: Annotated[str, RUNS_CODE] = "ce_gppo"
    beta_low: NonNegative = 0.75
    """Scale of the gradient below the clip range for negative advantages."""
    beta_high: NonNegative = 1.0
    """Scale of the gradient above the clip range for positive advantages."""

    def __call__(self, log_ratio: Tensor, advantage: Tensor, clip_low: Bound, clip_high: Bound) -> Tensor:
        r, low, high = ratio(log_ratio), 1 - clip_low, 1 + clip_high
        unit = r / r.detach()  # 1, with the gradient of log_ratio
        gain = torch.where((advantage < 0) & (r < low), self.beta_low * low * unit * advantage, r * advantage)
        return torch.where((advantage > 0) & (r > high), self.beta_high * high * unit * advantage, gain)


@dataclass(frozen=True)
class CISPO(Objective):
    """sg(clip(r, lo, hi)) r / sg(r) A: the weight is clipped, no gradient is (arXiv:2506.13585, where lo = 0)."""

    kind: Annotated[str, RUNS_CODE] = "cispo"

    def __call__(self, log_ratio: Tensor, advantage: Tensor, clip_low: Bound, clip_high: Bound) -> Tensor:
        r = ratio(log_ratio)
        return r.clamp(1 - clip_low, 1 + clip_high).detach() * (r / r.detach()) * advantage


@dataclass(frozen=True)
class GSPO(Clip):
    """The clipped objective with one ratio per sample, exp of the mean log-ratio of its transitions (arXiv:2507.18071).

    It takes log-ratios [b, s] of s transitions and gives [b]; or [b], where each is that of its sample already.
    """

    kind: Annotated[str, RUNS_CODE] = "gspo"
    of_sample: ClassVar[bool] = True

    def __call__(self, log_ratio: Tensor, advantage: Tensor, clip_low: Bound, clip_high: Bound) -> Tensor:
        whole = log_ratio.mean(1) if log_ratio.ndim == 2 else log_ratio
        return super().__call__(whole, advantage, clip_low, clip_high)


OBJECTIVES: Mapping[str, type[Objective]] = {
    kind.kind: kind for kind in (Clip, Unclipped, DualClip, SoftClip, SAPO, CEGPPO, CISPO, GSPO)
}


def clips_ratios(objective: Objective) -> bool:
    """Return whether an objective reads its clip range."""
    moved, advantage = torch.tensor([-0.5, 0.5, -0.5, 0.5]), torch.tensor([1.0, 1.0, -1.0, -1.0])
    narrow, wide = (objective(moved, advantage, range_, range_) for range_ in (0.1, 0.9))
    return not torch.equal(narrow, wide)


def ratio(log_ratio: Tensor) -> Tensor:
    """Return exp(clip(log_ratio, -20, 20)), in the widest dtype of its device."""
    return log_ratio.to(widest(log_ratio.device)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def relative_error(prediction: Tensor, target: Tensor) -> Float[Tensor, " b"]:
    """Return mean (p - t)^2 / w over the elements of each sample, w = max(mean |p - t|, 1e-5) without gradient.

    Samples of large and of small error have gradients of one size so (DiffusionNFT, arXiv:2509.16117).
    """
    error = (prediction - target).flatten(1)
    return error.square().mean(1) / sample_mean(error.detach().abs()).clamp(min=LEAST_ERROR).to(error)


def guarded_log_ratio(
    log_ratio: Float[Tensor, " b"], mean: Tensor, mean_old: Tensor, std: Tensor
) -> Float[Tensor, " b"]:
    """Return (log_ratio + mean(dmu^2) / (2 std^2)) std, dmu = mean - mean_old (GRPO-Guard, arXiv:2510.22319).

    The mean is over the D elements of a sample. A log-ratio averaged over elements has expectation -k and standard
    deviation sqrt(2 k / D), k the KL per element, so a symmetric clip range acts on one side only. The guarded
    log-ratio has expectation 0 and the same scale at every step. It is in the widest dtype of its device; `mean_old`
    takes no gradient.
    """
    std = torch.as_tensor(std)
    spread = std.to(widest(mean.device)) if std.ndim == 0 else sample_mean(std.to(mean.device).expand_as(mean))
    return (log_ratio + gaussian_kl(mean, mean_old.detach(), std)) * spread


def calibrated_clip(shift: float, elements: int, guard_std: float | None = None) -> tuple[float, float]:
    """Return (clip_low, clip_high) that a policy reaches once its mean has moved by `shift` std per element.

    With D = elements and k = shift^2 / 2, the log-ratio has mean -k and standard deviation d = sqrt(2 k / D): the range
    of ratios is [exp(-d - k), exp(d)]. A guarded log-ratio (see `guarded_log_ratio`) at a transition of standard
    deviation `guard_std` has mean 0 and standard deviation d guard_std: the range is [exp(-d guard_std),
    exp(d guard_std)].
    """
    deviation = shift / math.sqrt(elements)
    if guard_std is not None:
        return -math.expm1(-deviation * guard_std), math.expm1(deviation * guard_std)
    return -math.expm1(-deviation - shift**2 / 2), math.expm1(deviation)


def outside_clip(log_ratio: Tensor, *, clip_low: float | Tensor, clip_high: float | Tensor) -> Tensor:
    """Return where the ratio is not inside the open interval (1 - clip_low, 1 + clip_high)."""
    ratio = log_ratio.double().exp()
    return (ratio <= 1 - clip_low) | (ratio >= 1 + clip_high)


def diagnostics(
    objective: Objective,
    log_ratio: Tensor,
    advantage: Tensor,
    *,
    clip_low: Bound,
    clip_high: Bound,
    weight: Bound = 1.0,
) -> dict[str, float]:
    """Return statistics of an objective J; g = d(weight J) / dlog_ratio of an element, of GSPO a sample; U = |g / A|.

    `clip_fraction`: share of ratios not in (lo, hi). `zero_gradient_fraction`: share with A other than 0 and g = 0; for
    `clip` these are (A > 0, r > hi) and (A < 0, r < lo). `u_mean`, `u_p50`, `u_p90`, `u_p99`: mean and quantiles of U.
    `ess`: (sum U)^2 / (N sum U^2), the share of samples that carry the gradient; 0 when none does. Samples with A = 0
    count in the two fractions only. To these come the metrics of the objective's own.
    """
    log_ratio, advantage = log_ratio.detach().double(), advantage.detach().double()
    with torch.enable_grad():
        leaf = log_ratio.requires_grad_()
        (slope,) = torch.autograd.grad((weight * objective(leaf, advantage, clip_low, clip_high)).sum(), leaf)
    if slope.ndim == 2:  # transitions of samples, of which an objective has one ratio
        slope, log_ratio = slope.sum(1), log_ratio.mean(1)
    used = advantage != 0
    u = slope[used].abs() / advantage[used].abs() if bool(used.any()) else torch.zeros(1, dtype=torch.float64)
    squares = u.square().sum()
    p50, p90, p99 = torch.quantile(u, u.new_tensor([0.5, 0.9, 0.99])).tolist()
    outside = outside_clip(log_ratio.detach(), clip_low=clip_low, clip_high=clip_high)
    return {
        "clip_fraction": float(outside.double().mean()),
        "zero_gradient_fraction": float((used & (slope == 0)).double().mean()),
        "u_mean": float(u.mean()),
        "u_p50": p50,
        "u_p90": p90,
        "u_p99": p99,
        "ess": float(u.sum().square() / (len(u) * squares)) if squares > 0 else 0.0,
        **objective.metrics(log_ratio.detach(), advantage),
    }
