"""Policy objectives, to be maximised, and what there is to see of them: tensors in, tensors out."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unified_trainer.numerics.kl import gaussian_kl

Mode = Literal["none", "clip", "dual_clip", "soft_clip", "sapo", "ce_gppo", "cispo", "gspo"]
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class ObjectiveParameters:
    """What only one objective reads."""

    dual_clip: float = 3.0  # dual_clip: a worse sample pulls no more once its ratio is above this
    alpha: float = 1.0  # soft_clip: power with which a ratio away from 1 loses weight
    tau_pos: float = 1.0  # sapo: steepness of the gate where the advantage is positive
    tau_neg: float = 1.05  # sapo: and where it is not
    beta_low: float = 0.75  # ce_gppo: share of the gradient left below the range where the advantage is negative
    beta_high: float = 1.0  # ce_gppo: and above the range where it is positive

    def check(self) -> None:
        """Raise ValueError, naming the key, for what cannot be."""
        if self.dual_clip <= 1:
            raise ValueError(f"algorithm.objective_parameters.dual_clip must be above 1, not {self.dual_clip}")
        if self.alpha < 0 or self.beta_low < 0 or self.beta_high < 0:
            raise ValueError("algorithm.objective_parameters: alpha, beta_low and beta_high must not be negative")
        if self.tau_pos <= 0 or self.tau_neg <= 0:
            raise ValueError("algorithm.objective_parameters: tau_pos and tau_neg must be above 0")


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
    """The objective J of each element; r = exp(log_ratio), lo = 1 - clip_low, hi = 1 + clip_high, sg = no gradient.

    The clip range is one, or a tensor of each element's.
    `none`: r A.
    `clip`: min(r A, clip(r, lo, hi) A) (PPO, arXiv:1707.06347).
    `dual_clip`: the same, but not below dual_clip A where A < 0 (arXiv:1912.09729).
    `soft_clip`: sg(min(r, 1 / r)^alpha) r A.
    `sapo`: 4 / tau sigmoid(tau (r - 1)) A, tau by the sign of A (arXiv:2511.20347).
    `ce_gppo`: r A inside; where clip would stop, the bound's value and beta of its slope (arXiv:2509.20712).
    `cispo`: sg(clip(r, lo, hi)) A with the slope of log_ratio; canonically lo = 0 (arXiv:2506.13585).
    `gspo`: clip with one ratio per sample, exp(mean over steps); log_ratio is [b, s] (arXiv:2507.18071).
    """
    ratio = _ratio(mode, log_ratio)
    low, high = 1 - clip_low, 1 + clip_high
    free, clipped = ratio * advantage, ratio.clamp(low, high) * advantage
    if mode == "none":
        return free
    if mode == "soft_clip":
        return torch.minimum(ratio, 1 / ratio).detach() ** alpha * free
    if mode == "sapo":
        tau = torch.where(advantage > 0, ratio.new_tensor(tau_pos), ratio.new_tensor(tau_neg))
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
    """(log_ratio + mean(dmu^2) / (2 std^2)) std: centred on 0 and of one spread at every step (arXiv:2510.22319).

    A log-ratio that is a mean over elements has mean -KL and spread sqrt(2 KL / D); the clip then hits one side alone.
    """
    spread = torch.as_tensor(std, dtype=log_ratio.dtype, device=log_ratio.device).expand_as(mean).flatten(1).mean(1)
    return (log_ratio + gaussian_kl(mean, mean_old.detach(), std)) * spread


def guard_ratio(log_ratio: Float[Tensor, " b"], mean: Tensor, mean_old: Tensor, std: Tensor) -> Float[Tensor, " b"]:
    """exp of the guarded log-ratio: the ratio of GRPO-Guard."""
    return _ratio("none", guarded_log_ratio(log_ratio, mean, mean_old, std))


def leaves_trust_region(
    log_ratio: Float[Tensor, " b"], advantage: Float[Tensor, " b"], kl: Float[Tensor, " b"], bound: float
) -> Bool[Tensor, " b"]:
    """Samples to drop: `bound` of KL per element is reached, and the ratio already moved the advantage's way."""
    return (kl >= bound) & (log_ratio * advantage.sign() > 0)


def calibrated_clip(shift: float, elements: int, guard_std: float | None = None) -> tuple[float, float]:
    """clip_low and clip_high that a policy just reaches whose mean moved by `shift` standard deviations per element.

    With k = shift^2 / 2 the log-ratio of D elements then has mean -k and deviation d = sqrt(2 k / D): the range is
    exp(-d - k) to exp(d). A guarded one has mean 0 and deviation d guard_std, and so has its range.
    """
    deviation = shift / math.sqrt(elements)
    if guard_std is not None:
        return -math.expm1(-deviation * guard_std), math.expm1(deviation * guard_std)
    return -math.expm1(-deviation - shift**2 / 2), math.expm1(deviation)


def outside_clip(log_ratio: Tensor, *, clip_low: float | Tensor, clip_high: float | Tensor) -> Tensor:
    """Where the ratio has left (1 - clip_low, 1 + clip_high)."""
    ratio = log_ratio.exp()
    return (ratio <= 1 - clip_low) | (ratio >= 1 + clip_high)


def diagnostics(
    mode: Mode,
    log_ratio: Tensor,
    advantage: Tensor,
    *,
    clip_low: float | Tensor = 0.2,
    clip_high: float | Tensor = 0.2,
    **parameters: float,
) -> dict[str, float]:
    """What an objective does with its samples, one definition for all modes; g = dJ / dlog_ratio, U = |g| / |A|.

    `clip_fraction`: share of ratios not in (lo, hi). `zero_gradient_fraction`: share with (A > 0, r > hi) or (A < 0, r < lo), where clip has
    no gradient. `u_mean`, `u_p50`, `u_p90`, `u_p99`: of U. `ess`: (sum U)^2 / (N sum U^2), the share of samples that
    carry the gradient; 0 when none does. Samples without advantage count in the shares only. A sample of gspo is its
    whole sequence.
    """
    log_ratio, advantage = log_ratio.detach().double(), advantage.detach().double()
    with torch.enable_grad():
        leaf = log_ratio.requires_grad_()
        objective = surrogate(mode, leaf, advantage, clip_low=clip_low, clip_high=clip_high, **parameters)
        (slope,) = torch.autograd.grad(objective.sum(), leaf)
    if mode == "gspo":
        slope, log_ratio = slope.sum(1), log_ratio.mean(1)
    ratio = log_ratio.detach().exp()
    dead = ((advantage > 0) & (ratio > 1 + clip_high)) | ((advantage < 0) & (ratio < 1 - clip_low))
    some = advantage != 0
    use = slope[some].abs() / advantage[some].abs() if bool(some.any()) else torch.zeros(1, dtype=torch.float64)
    squares = use.square().sum()
    p50, p90, p99 = torch.quantile(use, use.new_tensor([0.5, 0.9, 0.99])).tolist()
    return {
        "clip_fraction": float(
            outside_clip(log_ratio.detach(), clip_low=clip_low, clip_high=clip_high).double().mean()
        ),
        "zero_gradient_fraction": float(dead.double().mean()),
        "u_mean": float(use.mean()),
        "u_p50": p50,
        "u_p90": p90,
        "u_p99": p99,
        "ess": float(use.sum().square() / (len(use) * squares)) if squares > 0 else 0.0,
    }


def _ratio(mode: Mode, log_ratio: Tensor) -> Tensor:
    if mode not in get_args(Mode):
        raise ValueError(f"unknown surrogate {mode!r}; have {', '.join(get_args(Mode))}")
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if mode != "gspo":
        return log_ratio.exp()
    if log_ratio.ndim != 2:
        raise ValueError(f"gspo needs the log-ratios of all steps, [b, s], not {list(log_ratio.shape)}")
    return log_ratio.mean(1).exp()
