"""The student as a stochastic sampler: transition kernels and their log-densities (see `transition`)."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.numerics.flow import (
    Sigma,
    as_level,
    noise_from_velocity,
    on_cpu_or,
    per_sample,
    promote,
    sample_mean,
    x0_from_velocity,
)

Kernel = Literal["ode", "dance", "flow", "flow_wan", "cps"]
PURE_NOISE = 1 - 1e-3  # at or above this noise level, `sigma_max` replaces sigma where a kernel is singular


def transition(
    kernel: Kernel,
    x_t: Tensor,
    velocity: Tensor,
    sigma: Sigma,
    sigma_next: Sigma,
    level: float,
    *,
    sigma_max: Sigma | None = None,
) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of x_next given x_t, for a reverse step from sigma to sigma_next < sigma.

    With v = velocity, dt = sigma_next - sigma and the diffusion s of the kernel:
    mean = x + dt (v + s^2 / (2 sigma) (x + (1 - sigma) v)), std = s sqrt(-dt).
    `ode`: s = 0.
    `dance`: s = level, the eta of DanceGRPO (arXiv:2505.07818).
    `flow`: s = level sqrt(sigma / (1 - sigma)), with 1 - sigma_max in place of 1 - sigma where sigma is 1 (Flow-GRPO,
    arXiv:2505.05470).
    `flow_wan`: s = sigma_max sigma; `level` is unused.
    `cps` (Flow-CPS, arXiv:2509.05952) keeps the noise level of x_next exact: std = sigma_next sin(level pi / 2),
    mean = (1 - sigma_next) x0 + sqrt(sigma_next^2 - std^2) noise. Level 1 renoises x0, as few-step students do.

    `sigma_max` is the second noise level of the table. The std has a shape that broadcasts over x_t [b, ...].
    Raises ValueError if sigma_next is not below sigma, or if the kernel needs a `sigma_max` below 1 and has none.
    """
    x_t, velocity = promote(x_t), promote(velocity)
    sigma, sigma_next = as_level(sigma), as_level(sigma_next)
    if bool((sigma_next >= sigma).any()):
        raise ValueError("transition: sigma_next must be below sigma")
    noise = noise_from_velocity(x_t, velocity, sigma)
    if kernel == "cps":
        std = sigma_next * math.sin(level * math.pi / 2)
        kept = (sigma_next.square() - std.square()).sqrt()
        x0 = x0_from_velocity(x_t, velocity, sigma)
        return per_sample(1 - sigma_next, x_t) * x0 + per_sample(kept, x_t) * noise, per_sample(std, x_t)
    s, dt = _diffusion(kernel, sigma, level, sigma_max), sigma_next - sigma
    drift = velocity + per_sample(s.square() / (2 * sigma), x_t) * noise
    return x_t + per_sample(dt, x_t) * drift, per_sample(s * (-dt).sqrt(), x_t)


def _diffusion(kernel: Kernel, sigma: Sigma, level: float, sigma_max: Sigma | None = None) -> Tensor:
    """Return the diffusion s of `transition`, in the widest dtype of its device."""
    if kernel not in get_args(Kernel):
        raise ValueError(f"unknown kernel {kernel!r}; have {', '.join(get_args(Kernel))}")
    sigma = as_level(sigma)
    if kernel == "dance":
        return torch.full_like(sigma, level)
    if kernel == "flow":
        singular = sigma >= PURE_NOISE
        guarded = torch.where(singular, _needed(kernel, sigma_max), sigma) if bool(singular.any()) else sigma
        return level * (sigma / (1 - guarded)).sqrt()
    return _needed(kernel, sigma_max) * sigma if kernel == "flow_wan" else torch.zeros_like(sigma)


def log_prob(x_next: Tensor, mean: Tensor, std: Tensor, *, normalised: bool = True) -> Float[Tensor, " b"]:
    """Return the Gaussian log-density of x_next, averaged over the elements of each sample, in the widest dtype.

    It is the mean over elements of -(x_next - mean)^2 / (2 std^2) - ln std - ln(2 pi) / 2; `normalised` False gives the
    mean of -(x_next - mean)^2, as published for `cps`. `mean` keeps its graph, x_next is detached. Raises ValueError
    where std is 0.
    """
    if bool((torch.as_tensor(std) <= 0).any()):
        raise ValueError("log_prob: a step with std 0 is deterministic and has no density")
    mean = promote(mean)
    std = on_cpu_or(mean, std)
    error = promote(x_next).detach() - mean
    if not normalised:
        return -sample_mean(error.square())
    density = -0.5 * (error / std).square() - std.log() - 0.5 * math.log(2 * math.pi)
    return sample_mean(density)


@dataclass(frozen=True)
class Policy:
    """A transition kernel along a table of noise levels; transition s goes from sigmas[s] to sigmas[s + 1]."""

    kernel: Kernel
    level: float  # noise strength of the kernel, `level` in `transition`
    sigmas: Float[Tensor, " steps_and_0"]  # falling, float64, 0 at the end
    normalised: bool = True  # whether log_prob is the Gaussian density or -(x_next - mean)^2 alone

    def step(self, s: int, x_t: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of x_next for transition s, see `transition`."""
        sigma, sigma_next, second = self.sigmas[s], self.sigmas[s + 1], self.sigmas[1]
        return transition(self.kernel, x_t, velocity, sigma, sigma_next, self.level_at(s), sigma_max=second)

    def level_at(self, s: int) -> float:
        """Return the noise strength of transition s."""
        return self.level

    def log_prob(self, x_next: Tensor, mean: Tensor, std: Tensor) -> Float[Tensor, " b"]:
        """Return the log-density of x_next averaged over elements, see `log_prob`."""
        return log_prob(x_next, mean, std, normalised=self.normalised)

    def std(self, s: int) -> float:
        """Return the standard deviation of transition s, rounded to float32; 0 if it has no density."""
        return float(self.step(s, *torch.zeros(2, 1, 1))[1])

    def mean_gain(self, s: int) -> float:
        """Return |d mean / d velocity| of transition s."""
        return abs(float(self.step(s, *torch.tensor([[[0.0]], [[1.0]]], dtype=torch.float64))[0]))


@dataclass(frozen=True)
class CappedPolicy(Policy):
    """A policy of kernel dance or flow with std = min(level, c / std_1) std_1, at most c = `std_cap`.

    std_1 = s sqrt(-dt) is the standard deviation at level 1: LongCat-Video's truncated noise (arXiv:2510.22200).
    """

    std_cap: float = math.inf

    def level_at(self, s: int) -> float:
        """Return min(level, c / std_1) of transition s."""
        sigma, dt = self.sigmas[s], self.sigmas[s + 1] - self.sigmas[s]
        std_1 = _diffusion(self.kernel, sigma, 1.0, self.sigmas[1]) * (-dt).sqrt()
        return min(self.level, self.std_cap / float(std_1))


def _needed(kernel: Kernel, sigma_max: Sigma | None) -> Tensor:
    """Return `sigma_max` as a level; ValueError if it is missing or not below 1."""
    if sigma_max is None or bool((as_level(sigma_max) >= 1).any()):
        raise ValueError(f"transition: {kernel} needs sigma_max, the table's second noise level, below 1")
    return as_level(sigma_max)
