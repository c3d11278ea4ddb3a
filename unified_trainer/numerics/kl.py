"""How far the policy is from a reference: estimates from log-densities, exact forms, and a coefficient that follows."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.numerics.flow import promote

Estimate = Literal["k1", "k2", "k3"]
KL = Literal["exact", "k1", "k2", "k3", "velocity"]
STEP_BOUND = 0.2  # of the relative error that an adaptive coefficient answers to


def kl_estimate(kind: Estimate, log_prob: Tensor, log_prob_ref: Tensor) -> Tensor:
    """KL(policy | reference) of each sample from its log-densities l and lr (Schulman, 2020).

    `k1`: l - lr, unbiased, may be negative. `k2`: (l - lr)^2 / 2. `k3`: e^(lr - l) - (lr - l) - 1, also called
    low_var_kl. As a loss, k1 has the gradient of l alone, which is zero on average under the policy itself.
    """
    if kind not in get_args(Estimate):
        raise ValueError(f"unknown KL estimate {kind!r}; have {', '.join(get_args(Estimate))}")
    difference = promote(log_prob) - promote(log_prob_ref)
    if kind == "k1":
        return difference
    return difference.square() / 2 if kind == "k2" else torch.expm1(-difference) + difference


def gaussian_kl(mean: Tensor, mean_ref: Tensor, std: Tensor) -> Float[Tensor, " b"]:
    """KL per element between two Gaussians of one std: mean over elements of (mean - mean_ref)^2 / (2 std^2)."""
    if bool((torch.as_tensor(std) <= 0).any()):
        raise ValueError("gaussian_kl: a step with std 0 is deterministic and has no density")
    std = torch.as_tensor(std, dtype=promote(mean).dtype, device=mean.device)
    return ((promote(mean) - promote(mean_ref)) / std).square().flatten(1).mean(1) / 2


def velocity_kl(velocity: Tensor, velocity_ref: Tensor) -> Float[Tensor, " b"]:
    """Mean over elements of (v - v_ref)^2: the KL without its weight of the noise level."""
    return (promote(velocity) - promote(velocity_ref)).square().flatten(1).mean(1)


@dataclass
class AdaptiveKL:
    """A KL coefficient that rises when the KL is above its target and falls below it (arXiv:1909.08593)."""

    coefficient: float  # now
    target: float  # KL to settle at
    horizon: float  # samples over which the coefficient may change by its own size

    def __post_init__(self) -> None:
        if self.target <= 0 or self.horizon <= 0:
            raise ValueError(f"AdaptiveKL: target and horizon must be above 0, not {self.target} and {self.horizon}")

    def update(self, kl: float, count: int) -> float:
        """After `count` samples of mean KL `kl`: coefficient (1 + clip(kl / target - 1, +-0.2) count / horizon)."""
        error = min(STEP_BOUND, max(-STEP_BOUND, kl / self.target - 1))
        self.coefficient *= 1 + error * count / self.horizon
        return self.coefficient
