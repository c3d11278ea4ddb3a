"""KL divergence between policy and reference: estimators, closed forms, and an adaptive coefficient."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.numerics.flow import on_cpu_or, promote, sample_mean

Estimate = Literal["k1", "k2", "k3"]
KL = Literal["exact", "k1", "k2", "k3", "velocity"]
STEP_BOUND = 0.2  # limit of the relative KL error in one update of the adaptive coefficient


def kl_estimate(kind: Estimate, log_prob: Tensor, log_prob_ref: Tensor) -> Tensor:
    """Estimate KL(policy | reference) element by element from log-densities l and lr (Schulman, 2020).

    `k1`: l - lr, unbiased, may be negative. `k2`: (l - lr)^2 / 2. `k3`: e^(lr - l) - (lr - l) - 1, also called
    low_var_kl. As a loss, k1 has the gradient of l alone, whose expectation under the policy is zero.
    The result has the shape of `log_prob`. Raises ValueError for an unknown `kind`.
    """
    if kind not in get_args(Estimate):
        raise ValueError(f"unknown KL estimate {kind!r}; have {', '.join(get_args(Estimate))}")
    difference = promote(log_prob) - promote(log_prob_ref)
    if kind == "k1":
        return difference
    return difference.square() / 2 if kind == "k2" else torch.expm1(-difference) + difference


def gaussian_kl_estimate(
    kind: Estimate, x_next: Tensor, mean: Tensor, mean_ref: Tensor, std: Tensor
) -> Float[Tensor, " b"]:
    """Estimate the KL per element between Gaussians of equal std, see `gaussian_kl`, from a draw of the policy.

    It is the mean over the elements of each sample of `kl_estimate` at the log-ratio of one element,
    d = (mean - mean_ref) (2 x_next - mean - mean_ref) / (2 std^2); k2 and k3 of the mean log-ratio would be about 1/D
    of a KL. Over draws of the policy, k1 and k3 have the KL as their expectation, and k2 of an element is higher by
    half the square of that element's KL. The gradients of k2 and k3 have the gradient of the KL as their expectation,
    the gradient of k1 has expectation zero. The result is in the widest dtype of its device; `mean` keeps its graph,
    x_next is detached. Raises ValueError where std is 0.
    """
    std = _checked_std("gaussian_kl_estimate", std, mean)
    x_next, mean, mean_ref = promote(x_next).detach(), promote(mean), promote(mean_ref)
    log_ratio = (mean - mean_ref) * ((x_next - mean) + (x_next - mean_ref)) / (2 * std.square())
    return sample_mean(kl_estimate(kind, log_ratio, log_ratio.new_zeros(())))


def gaussian_kl(mean: Tensor, mean_ref: Tensor, std: Tensor) -> Float[Tensor, " b"]:
    """Return the KL per element between Gaussians of equal std: the mean of (mean - mean_ref)^2 / (2 std^2).

    The mean is over the elements of each sample, in the widest dtype of its device; `std` broadcasts over `mean`.
    Raises ValueError where std is 0.
    """
    std = _checked_std("gaussian_kl", std, mean)
    return sample_mean(((promote(mean) - promote(mean_ref)) / std).square()) / 2


def velocity_kl(velocity: Tensor, velocity_ref: Tensor) -> Float[Tensor, " b"]:
    """Return the mean of (velocity - velocity_ref)^2 over the elements of each sample.

    It is proportional to `gaussian_kl` at a fixed noise level, without the weight of that level.
    """
    return (promote(velocity) - promote(velocity_ref)).square().flatten(1).mean(1)


@dataclass
class AdaptiveKL:
    """A KL coefficient that rises while the KL is above its target and falls while it is below (arXiv:1909.08593)."""

    coefficient: float  # current value
    target: float  # KL to keep, per element
    horizon: float  # samples over which the coefficient changes by at most about 20 %

    def __post_init__(self) -> None:
        if self.target <= 0 or self.horizon <= 0:
            raise ValueError(f"AdaptiveKL: target and horizon must be above 0, not {self.target} and {self.horizon}")

    def update(self, kl: float, count: int) -> float:
        """Multiply the coefficient by 1 + clip(kl / target - 1, -0.2, 0.2) count / horizon and return it.

        `kl` is the mean KL of the last `count` samples.
        """
        error = min(STEP_BOUND, max(-STEP_BOUND, kl / self.target - 1))
        self.coefficient *= 1 + error * count / self.horizon
        return self.coefficient


def _checked_std(name: str, std: Tensor, mean: Tensor) -> Tensor:
    """Return std in the dtype of the mean, see `on_cpu_or`; ValueError where it is 0."""
    if bool((torch.as_tensor(std) <= 0).any()):
        raise ValueError(f"{name}: a step with std 0 is deterministic and has no density")
    return on_cpu_or(promote(mean), std)
