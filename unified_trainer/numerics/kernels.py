"""The student as a stochastic sampler: transition kernels and their log-densities."""

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
    per_sample,
    promote,
    second_order_step,
    x0_from_velocity,
)

Kernel = Literal["ode", "dance", "flow", "flow_wan", "cps"]
Tail = Literal["euler", "second_order"]
PURE_NOISE = 1 - 1e-3  # from this noise level on, `sigma_max` stands in where a kernel is singular


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
    """Mean and standard deviation of x_next given x_t, one reverse step from sigma to sigma_next < sigma.

    With dt = sigma_next - sigma and the kernel's diffusion s (see `_diffusion`):
    mean = x + dt (v + s^2 / (2 sigma) (x + (1 - sigma) v)), std = s sqrt(-dt).
    `cps` (arXiv:2509.05952) instead keeps the noise level exact: std = sigma_next sin(level pi / 2),
    mean = (1 - sigma_next) x0 + sqrt(sigma_next^2 - std^2) noise; at level 1 it renoises x0, as few-step students do.
    `sigma_max` is the second noise level of the table. The std broadcasts over x_t; half precision becomes float32.
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
    """The diffusion s of a kernel at a noise level, float64.

    `ode`: 0. `dance`: level, the eta of DanceGRPO (arXiv:2505.07818). `flow`: level sqrt(sigma / (1 - sigma))
    (Flow-GRPO, arXiv:2505.05470), with 1 - sigma_max below the bar where sigma is 1. `flow_wan`: sigma_max sigma,
    which has no level.
    """
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
    """Gaussian log-density of x_next, averaged over the elements of each sample; x_next takes no gradient.

    Not `normalised`: -(x_next - mean)^2 alone, as published for cps.
    """
    if bool((torch.as_tensor(std) <= 0).any()):
        raise ValueError("log_prob: a step with std 0 is deterministic and has no density")
    mean = promote(mean)
    std = torch.as_tensor(std, dtype=mean.dtype, device=mean.device)
    error = promote(x_next).detach() - mean
    if not normalised:
        return -error.square().flatten(1).mean(1)
    density = -0.5 * (error / std).square() - std.log() - 0.5 * math.log(2 * math.pi)
    return density.flatten(1).mean(1)


@dataclass(frozen=True)
class Policy:
    """A kernel along a table of noise levels; transition s goes from level s to level s + 1."""

    kernel: Kernel
    level: float  # of the kernel's noise
    sigmas: Float[Tensor, " steps_and_0"]
    normalised: bool = True  # density; False is -(x_next - mean)^2 alone
    tail: Tail = "euler"  # of the deterministic steps after the last stochastic one

    def step(self, s: int, x_t: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of x_next."""
        sigma, sigma_next, second = self.sigmas[s], self.sigmas[s + 1], self.sigmas[1]
        return transition(self.kernel, x_t, velocity, sigma, sigma_next, self.level, sigma_max=second)

    def euler_step(self, s: int, x_t: Tensor, velocity: Tensor, x0_before: Tensor | None) -> Tensor:
        """x_next without noise: Euler, or of second order if it follows on a prediction of x0 at the level before."""
        sigma, sigma_next = self.sigmas[s], self.sigmas[s + 1]
        if x0_before is None:
            return transition("ode", x_t, velocity, sigma, sigma_next, 0.0)[0]
        x0 = x0_from_velocity(x_t, velocity, sigma)
        return second_order_step(x_t, x0, x0_before, self.sigmas[s - 1], sigma, sigma_next)

    def log_prob(self, x_next: Tensor, mean: Tensor, std: Tensor) -> Float[Tensor, " b"]:
        return log_prob(x_next, mean, std, normalised=self.normalised)

    def std(self, s: int) -> float:
        """How much noise transition s draws, in float32 as it is drawn; 0 is a step without density."""
        return float(self.step(s, *torch.zeros(2, 1, 1))[1])

    def mean_gain(self, s: int) -> float:
        """How far a unit of velocity moves the mean of transition s: |d mean / d velocity|."""
        return abs(float(self.step(s, *torch.tensor([[[0.0]], [[1.0]]], dtype=torch.float64))[0]))


def _needed(kernel: Kernel, sigma_max: Sigma | None) -> Tensor:
    if sigma_max is None or bool((as_level(sigma_max) >= 1).any()):
        raise ValueError(f"transition: {kernel} needs sigma_max, the table's second noise level, below 1")
    return as_level(sigma_max)
