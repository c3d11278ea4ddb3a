"""Every sign and scale of the flow process: x_t = (1 - sigma) x0 + sigma noise, velocity = noise - x0 = dx/dsigma.

Noise levels are float64; tensors of half precision are promoted to float32 before they are combined.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

Sigma = Tensor | float  # one noise level, one per sample, or one per sample and latent frame
GuidanceScale = float | tuple[float, float]  # one, or one of the high- and one of the low-noise expert


def shift_sigma(u: Sigma, shift: float) -> Sigma:
    """sigma = s u / (1 + (s - 1) u): the schedule moved towards noise for s > 1 (SD3, arXiv:2403.03206)."""
    u = promote(u) if isinstance(u, Tensor) else u
    return shift * u / (1 + (shift - 1) * u)


def unshift_sigma(sigma: Sigma, shift: float) -> Sigma:
    """The inverse of `shift_sigma`: u = sigma / (s - (s - 1) sigma)."""
    sigma = promote(sigma) if isinstance(sigma, Tensor) else sigma
    return sigma / (shift - (shift - 1) * sigma)


def high_share(boundary: float, shift: float) -> float:
    """P(sigma >= boundary) of shifted-uniform noise levels: 1 - unshift(boundary)."""
    return 1 - unshift_sigma(boundary, shift)


def sigma_table(num_steps: int, shift: float) -> Float[Tensor, " steps_and_0"]:
    """num_steps + 1 noise levels from 1 down to 0, float64: shifted linspace(1, 0)."""
    if num_steps < 1:
        raise ValueError(f"sigma_table: num_steps must be at least 1, not {num_steps}")
    return shift_sigma(torch.linspace(1, 0, num_steps + 1, dtype=torch.float64), shift)


def warp_steps(steps: Sequence[float], shift: float) -> Float[Tensor, " steps"]:
    """The noise levels of a step list in thousandths, e.g. [1000, 750, 500, 250] (CausVid, arXiv:2412.07772)."""
    return shift_sigma(torch.as_tensor(steps, dtype=torch.float64) / 1000, shift)


def add_noise(x0: Tensor, noise: Tensor, sigma: Sigma) -> Tensor:
    """x_t = (1 - sigma) x0 + sigma noise."""
    x0, noise = promote(x0), promote(noise)
    return per_sample(1 - as_level(sigma), x0) * x0 + per_sample(sigma, x0) * noise


def x0_from_velocity(x_t: Tensor, velocity: Tensor, sigma: Sigma) -> Tensor:
    """x0 = x_t - sigma velocity."""
    x_t = promote(x_t)
    return x_t - per_sample(sigma, x_t) * promote(velocity)


def noise_from_velocity(x_t: Tensor, velocity: Tensor, sigma: Sigma) -> Tensor:
    """noise = x_t + (1 - sigma) velocity."""
    x_t = promote(x_t)
    return x_t + per_sample(1 - as_level(sigma), x_t) * promote(velocity)


def velocity_from_x0(x_t: Tensor, x0: Tensor, sigma: Sigma) -> Tensor:
    """velocity = (x_t - x0) / sigma; sigma must be above 0."""
    x_t = promote(x_t)
    return (x_t - promote(x0)) / per_sample(sigma, x_t)


def guide(cond: Tensor, uncond: Tensor, guidance_scale: Sigma) -> Tensor:
    """uncond + w (cond - uncond): w = 1 is no guidance (arXiv:2207.12598, standard form)."""
    cond, uncond = promote(cond), promote(uncond)
    return uncond + per_sample(guidance_scale, cond) * (cond - uncond)


def second_order_step(
    x_t: Tensor, x0: Tensor, x0_before: Tensor, sigma_before: Sigma, sigma: Sigma, sigma_next: Sigma
) -> Tensor:
    """A deterministic step from the last two predictions of x0: DPM-Solver++(2M) (arXiv:2211.01095).

    With a = 1 - sigma and h the growth of log(a / sigma) over a step:
    x_next = sigma' / sigma x_t + (a' - a sigma' / sigma) D, D = x0 + h / (2 h_before) (x0 - x0_before).
    All levels lie within (0, 1). With x0 for D it is an Euler step.
    """
    x_t, x0, x0_before = promote(x_t), promote(x0), promote(x0_before)
    before, now, after = (torch.logit(1 - as_level(level)) for level in (sigma_before, sigma, sigma_next))
    sigma, sigma_next = as_level(sigma), as_level(sigma_next)
    kept = sigma_next / sigma
    ahead = per_sample((after - now) / (2 * (now - before)), x_t)
    target = x0 + ahead * (x0 - x0_before)
    return per_sample(kept, x_t) * x_t + per_sample(1 - sigma_next - (1 - sigma) * kept, x_t) * target


def promote(x: Tensor) -> Tensor:
    """float32 for half precision, else unchanged."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def as_level(sigma: Sigma) -> Tensor:
    """A noise level (or any per-sample number) as float64."""
    return torch.as_tensor(sigma, dtype=torch.float64)


def per_sample(value: Sigma, like: Tensor) -> Tensor:
    """`value` in the dtype of `like` [b c t ...] and shaped to broadcast: one number, one per sample, or [b, t]."""
    value = as_level(value)
    if value.ndim == 2:
        value = value.reshape(len(value), 1, -1, *[1] * (like.ndim - 3))
    if value.ndim <= 1:
        value = value.reshape(-1, *[1] * (like.ndim - 1))
    return value.to(device=like.device, dtype=like.dtype)
