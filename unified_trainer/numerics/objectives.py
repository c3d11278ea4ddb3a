"""Policy-gradient objectives, to be maximized, and their diagnostics.

Ratios, and what they are compared with, are in the widest dtype of their device (`types.widest`): a log-ratio is a mean
over the D elements of a latent, and its spread of about 1e-5 at D = 1e6 is only a hundred times the spacing of float32
numbers near a ratio of 1.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unified_trainer.basics.ranges import NonNegative, Positive, above
from unified_trainer.basics.types import widest
from unified_trainer.numerics.flow import sample_mean
from unified_trainer.numerics.kl import gaussian_kl

Mode = Literal["none", "clip", "dual_clip", "soft_clip", "sapo", "ce_gppo", "cispo", "gspo"]
LOG_RATIO_LIMIT = 20.0  # log-ratios are clipped to this size before exp


@dataclass(frozen=True)
class ObjectiveParameters:
    """Parameters that a single objective reads; see `surrogate` for the formulas."""

    dual_clip: Annotated[float, above(1)] = 3.0
    """For dual_clip: ratio above which a sample of negative advantage has no gradient."""
    alpha: NonNegative = 1.0
    """For soft_clip: exponent of the weight min(r, 1 / r)."""
    tau_pos: Positive = 1.0
    """For sapo: steepness of the gate for positive advantages."""
    tau_neg: Positive = 1.05
    """For sapo: steepness of the gate for advantages of 0 and below."""
    beta_low: NonNegative = 0.75
    """For ce_gppo: gradient scale below the clip range for negative advantages."""
    beta_high: NonNegative = 1.0
    """For ce_gppo: gradient scale above the clip range for positive advantages."""


def surrogate(
    mode: Mode,
    log_ratio: Tensor,
    advantage: Tensor,
    *,
    clip_low: float | Tensor = 0.2,
    clip_high: float | Tensor = 0.2,
    dual_clip: float = ObjectiveParameters.dual_clip,
    alpha: float = ObjectiveParameters.alpha,
    tau_pos: float = ObjectiveParameters.tau_pos,
    tau_neg: float = ObjectiveParameters.tau_neg,
    beta_low: float = ObjectiveParameters.beta_low,
    beta_high: float = ObjectiveParameters.beta_high,
) -> Tensor:
    """Return the objective J of each element, to be maximized.

    r = exp(clip(log_ratio, -20, 20)), A = advantage, lo = 1 - clip_low, hi = 1 + clip_high, sg = stop-gradient.
    `none`: r A.
    `clip`: min(r A, clip(r, lo, hi) A) (PPO, arXiv:1707.06347).
    `dual_clip`: as `clip`, and at least dual_clip A where A < 0 (arXiv:1912.09729).
    `soft_clip`: sg(min(r, 1 / r)^alpha) r A.
    `sapo`: 4 / tau sigmoid(tau (r - 1)) A; tau is tau_pos where A > 0, else tau_neg (arXiv:2511.20347).
    `ce_gppo`: beta_low lo r / sg(r) A where A < 0 and r < lo; beta_high hi r / sg(r) A where A > 0 and r > hi;
    else r A (arXiv:2509.20712).
    `cispo`: sg(clip(r, lo, hi)) r / sg(r) A; canonically lo = 0 (arXiv:2506.13585).
    `gspo`: `clip` with one ratio per sample, exp of the mean of log_ratio [b, s] over s (arXiv:2507.18071).

    `clip_low` and `clip_high` are numbers or one number per element. The result is in the widest dtype of its device
    and has the shape of `log_ratio`; [b] for `gspo`. Raises ValueError for an unknown mode.
    """
    ratio = _ratio(mode, log_ratio)
    low, high = 1 - clip_low, 1 + clip_high
    free, clipped = ratio * advantage, ratio.clamp(low, high) * advantage
    if mode == "none":
        return free
    if mode == "soft_clip":
        return torch.minimum(ratio, 1 / ratio).detach() ** alpha * free
    if mode == "sapo":
        tau = torch.where(advantage > 0, torch.full_like(ratio, tau_pos), torch.full_like(ratio, tau_neg))
        return 4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage
    if mode in ("ce_gppo", "cispo"):
        slope = ratio / ratio.detach()  # of value 1 and with the gradient of log_ratio
        if mode == "cispo":
            return clipped.detach() * slope
        objective = torch.where((advantage < 0) & (ratio < low), beta_low * low * slope * advantage, free)
        return torch.where((advantage > 0) & (ratio > high), beta_high * high * slope * advantage, objective)
    objective = torch.minimum(free, clipped)
    if mode == "dual_clip":
        return torch.where(advantage < 0, torch.maximum(objective, dual_clip * advantage), objective)
    return objective


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


def leaves_trust_region(
    log_ratio: Float[Tensor, " b"], advantage: Float[Tensor, " b"], kl: Float[Tensor, " b"], bound: float
) -> Bool[Tensor, " b"]:
    """Return which samples to drop: KL per element >= `bound` and the ratio has moved in the advantage's direction."""
    return (kl >= bound) & (log_ratio * advantage.sign() > 0)


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
    mode: Mode,
    log_ratio: Tensor,
    advantage: Tensor,
    *,
    clip_low: float | Tensor = 0.2,
    clip_high: float | Tensor = 0.2,
    weight: Tensor | None = None,
    **parameters: float,
) -> dict[str, float]:
    """Return statistics of an objective, with one definition for all modes; g = dJ / dlog_ratio, U = |g| / |A|.

    J is multiplied by the weight of each element, if there are weights; `gspo` has none.

    `clip_fraction`: share of ratios not in (lo, hi). `zero_gradient_fraction`: share with (A > 0, r > hi) or
    (A < 0, r < lo), where `clip` has no gradient. `u_mean`, `u_p50`, `u_p90`, `u_p99`: mean and quantiles of U.
    `ess`: (sum U)^2 / (N sum U^2), the share of samples that carry the gradient; 0 when none does. Samples with A = 0
    count in the two fractions only. For `gspo` a sample is the whole sequence.
    """
    log_ratio, advantage = log_ratio.detach().double(), advantage.detach().double()
    with torch.enable_grad():
        leaf = log_ratio.requires_grad_()
        objective = surrogate(mode, leaf, advantage, clip_low=clip_low, clip_high=clip_high, **parameters)
        (slope,) = torch.autograd.grad((objective if weight is None else weight * objective).sum(), leaf)
    if mode == "gspo":
        slope, log_ratio = slope.sum(1), log_ratio.mean(1)
    ratio = log_ratio.detach().exp()
    stopped = ((advantage > 0) & (ratio > 1 + clip_high)) | ((advantage < 0) & (ratio < 1 - clip_low))
    used = advantage != 0
    u = slope[used].abs() / advantage[used].abs() if bool(used.any()) else torch.zeros(1, dtype=torch.float64)
    squares = u.square().sum()
    p50, p90, p99 = torch.quantile(u, u.new_tensor([0.5, 0.9, 0.99])).tolist()
    outside = outside_clip(log_ratio.detach(), clip_low=clip_low, clip_high=clip_high)
    return {
        "clip_fraction": float(outside.double().mean()),
        "zero_gradient_fraction": float(stopped.double().mean()),
        "u_mean": float(u.mean()),
        "u_p50": p50,
        "u_p90": p90,
        "u_p99": p99,
        "ess": float(u.sum().square() / (len(u) * squares)) if squares > 0 else 0.0,
    }


def _ratio(mode: Mode, log_ratio: Tensor) -> Tensor:
    """Return exp of the clipped log-ratio, in the widest dtype of its device; one per sample for gspo."""
    if mode not in get_args(Mode):
        raise ValueError(f"unknown surrogate {mode!r}; have {', '.join(get_args(Mode))}")
    log_ratio = log_ratio.to(widest(log_ratio.device)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if mode != "gspo":
        return log_ratio.exp()
    if log_ratio.ndim != 2:
        raise ValueError(f"gspo needs the log-ratios of all steps, [b, s], not {list(log_ratio.shape)}")
    return log_ratio.mean(1).exp()
