"""The clipped objective of a policy gradient, its variants for latents of many elements, and its diagnostics.

Ratios, and what they are compared with, are in the widest dtype of their device (`types.widest`): a log-ratio is a mean
over the D elements of a latent, and its spread of about 1e-5 at D = 1e6 is only a hundred times the spacing of float32
numbers near a ratio of 1.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.types import widest
from unified_trainer.numerics.flow import sample_mean
from unified_trainer.numerics.kl import gaussian_kl

LEAST_ERROR = 1e-5  # smallest divisor of a relative error
LOG_RATIO_LIMIT = 20.0  # log-ratios are clipped to this size before exp


def surrogate(
    log_ratio: Tensor, advantage: Tensor, *, clip_low: float | Tensor = 0.2, clip_high: float | Tensor = 0.2
) -> Tensor:
    """Return min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) of each element, to be maximized (PPO, arXiv:1707.06347).

    r = exp(clip(log_ratio, -20, 20)), A = advantage. `clip_low` and `clip_high` are numbers or one number per element.
    The result is in the widest dtype of its device and has the shape of `log_ratio`.
    """
    ratio = log_ratio.to(widest(log_ratio.device)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)


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
    log_ratio: Tensor,
    advantage: Tensor,
    *,
    clip_low: float | Tensor = 0.2,
    clip_high: float | Tensor = 0.2,
) -> dict[str, float]:
    """Return statistics of the clipped objective; g = dJ / dlog_ratio, U = |g| / |A|.

    `clip_fraction`: share of ratios not in (lo, hi). `zero_gradient_fraction`: share with (A > 0, r > hi) or
    (A < 0, r < lo), where it has no gradient. `u_mean`, `u_p50`, `u_p90`, `u_p99`: mean and quantiles of U.
    `ess`: (sum U)^2 / (N sum U^2), the share of samples that carry the gradient; 0 when none does. Samples with A = 0
    count in the two fractions only.
    """
    log_ratio, advantage = log_ratio.detach().double(), advantage.detach().double()
    with torch.enable_grad():
        leaf = log_ratio.requires_grad_()
        objective = surrogate(leaf, advantage, clip_low=clip_low, clip_high=clip_high)
        (slope,) = torch.autograd.grad(objective.sum(), leaf)
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
