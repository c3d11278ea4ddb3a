"""The student as a stochastic sampler: transition kernels and their log-densities."""

import math
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.flow import Sigma, as_level, per_sample, promote

Kernel = Literal["ode", "dance", "cps"]


def transition(
    kernel: Kernel,
    x_t: Tensor,
    velocity: Tensor,
    sigma: Sigma,
    sigma_next: Sigma,
    level: float,
    *,
    sigma_max: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of x_next given x_t, one reverse step from sigma to sigma_next < sigma.

    With dt = sigma_next - sigma and the kernel's diffusion s:
    mean = x + dt (v + s^2 / (2 sigma) (x + (1 - sigma) v)), std = s sqrt(-dt).
    `ode`: s = 0. `dance`: s = level, the eta of DanceGRPO (arXiv:2505.07818).
    `sigma_max`, the level that stands in for sigma = 1 where a kernel is singular there, is not used by these two.
    The std broadcasts over x_t; half precision is promoted to float32.
    """
    if kernel not in get_args(Kernel):
        raise ValueError(f"unknown kernel {kernel!r}; have {', '.join(get_args(Kernel))}")
    x_t, velocity = promote(x_t), promote(velocity)
    sigma, sigma_next = as_level(sigma), as_level(sigma_next)
    if bool((sigma_next >= sigma).any()):
        raise ValueError("transition: sigma_next must be below sigma")
    if kernel == "cps":
        std = sigma_next * math.sin(level * math.pi / 2)
        noise = x_t + per_sample(1 - sigma, x_t) * velocity
        x0 = x_t - per_sample(sigma, x_t) * velocity
        mean = per_sample(1 - sigma_next, x_t) * x0 + per_sample((sigma_next**2 - std**2).sqrt(), x_t) * noise
        return mean, per_sample(std, x_t)
    diffusion = as_level(level if kernel == "dance" else 0.0)
    dt = sigma_next - sigma
    noise = x_t + per_sample(1 - sigma, x_t) * velocity
    drift = velocity + per_sample(diffusion**2 / (2 * sigma), x_t) * noise
    return x_t + per_sample(dt, x_t) * drift, per_sample(diffusion * (-dt).sqrt(), x_t)


def log_prob(x_next: Tensor, mean: Tensor, std: Tensor) -> Float[Tensor, " b"]:
    """Gaussian log-density of x_next, averaged over the elements of each sample; x_next takes no gradient."""
    if bool((torch.as_tensor(std) <= 0).any()):
        raise ValueError("log_prob: a step with std 0 is deterministic and has no density")
    mean, std = promote(mean), promote(torch.as_tensor(std, device=mean.device))
    error = (promote(x_next).detach() - mean) / std
    density = -0.5 * error.square() - std.log() - 0.5 * math.log(2 * math.pi)
    return density.flatten(1).mean(1)
