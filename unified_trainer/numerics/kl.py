"""KL divergence between policy and reference: closed forms, estimates, and an adaptive coefficient."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.numerics.flow import on_cpu_or, promote, sample_mean

Estimate = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
KLKind = Literal["exact", "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
STEP_BOUND = 0.2  # limit of the relative KL error in one update of the adaptive coefficient


def kl_estimate(kind: Estimate, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return an estimate of KL(p | q) for each draw of p, from its log-densities under p and q (Schulman, 2020).

    With d = log_p - log_q: `kl` or `k1`: d, unbiased, may be negative; as a loss its gradient has expectation zero.
    `abs`: |d|. `mse` or `k2`: d^2 / 2. `low_var_kl` or `k3`: e^-d + d - 1, unbiased and never negative. The result has
    the shape of `log_p`. Raises ValueError for an unknown `kind`.
    """
    d = promote(log_p) - promote(log_q)
    if kind in ("kl", "k1"):
        return d
    if kind == "abs":
        return d.abs()
    if kind in ("mse", "k2"):
        return d.square() / 2
    if kind in ("low_var_kl", "k3"):
        return torch.expm1(-d) + d
    raise ValueError(f"unknown KL estimate {kind!r}; have {', '.join(get_args(Estimate))}")


def gaussian_kl_estimate(
    kind: Estimate, x_next: Tensor, mean: Tensor, mean_ref: Tensor, std: Tensor
) -> Float[Tensor, " b"]:
    """Estimate `gaussian_kl` from draws of the policy: the mean of `kl_estimate` over the elements of each sample.

    d = (mean - mean_ref) (2 x_next - mean - mean_ref) / (2 std^2) is the log-ratio of one element: estimates of the
    mean log-ratio of D elements would be about 1 / D of a KL. Over draws of the policy kl and low_var_kl have the KL k
    of an element as their expectation, mse has k + k^2 / 2, and abs has about sqrt(4 k / pi). Gradients of mse and
    low_var_kl have that of the KL as their expectation. x_next takes no gradient. The result is in the widest dtype of
    its device. Raises ValueError where std is 0.
    """
    std = _checked_std("gaussian_kl_estimate", std, mean)
    x_next, mean, mean_ref = promote(x_next).detach(), promote(mean), promote(mean_ref)
    d = (mean - mean_ref) * ((x_next - mean) + (x_next - mean_ref)) / (2 * std.square())
    return sample_mean(kl_estimate(kind, d, torch.zeros_like(d)))


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
