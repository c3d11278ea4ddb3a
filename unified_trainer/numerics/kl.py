"""KL divergence between policy and reference: closed forms, and an adaptive coefficient."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.numerics.flow import on_cpu_or, promote, sample_mean

STEP_BOUND = 0.2  # limit of the relative KL error in one update of the adaptive coefficient


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
