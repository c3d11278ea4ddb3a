"""The flow process: x_t = (1 - sigma) x0 + sigma noise, velocity = noise - x0 = dx_t / dsigma.

sigma is the noise level: 1 is pure noise, 0 is data. Noise levels are float64. Tensors of half precision are converted
to float32 before they are combined. Functions of x_t accept any shape whose first axis is the sample; `sigma` is one
number, one per sample [b], or one per sample and latent frame [b, t] (then x_t is [b, c, t, ...]).
"""

import math
from dataclasses import dataclass
from typing import Annotated, Protocol, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.ranges import at_least
from unified_trainer.basics.types import widest

Sigma: TypeAlias = Tensor | float  # one noise level, one per sample, or one per sample and latent frame
# One guidance scale, or one each for the high- and the low-noise expert.
GuidanceScale = Annotated[float | tuple[float, float], at_least(0, 1000)]


def shift_sigma(u: Sigma, shift: float) -> Sigma:
    """Return sigma = s u / (1 + (s - 1) u) with s = shift (SD3, arXiv:2403.03206).

    u and sigma lie in [0, 1]; 0 and 1 are fixed points, and s > 1 moves levels towards noise.
    """
    u = promote(u) if isinstance(u, Tensor) else u
    return shift * u / (1 + (shift - 1) * u)


def unshift_sigma(sigma: Sigma, shift: float) -> Sigma:
    """Return u = sigma / (s - (s - 1) sigma), the inverse of `shift_sigma`."""
    sigma = promote(sigma) if isinstance(sigma, Tensor) else sigma
    return sigma / (shift - (shift - 1) * sigma)


class NoiseLevelLaw(Protocol):
    """A distribution of noise levels, given by its inverse cumulative distribution function."""

    def __call__(self, u: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return the noise level of each u, uniform float64 in [0, 1); non-decreasing in u."""

    def share_above(self, sigma: float) -> float:
        """Return the probability that a drawn noise level is at least `sigma`."""


@dataclass(frozen=True)
class ShiftedUniform:
    """Shifted noise levels: sigma = shift_sigma(U, shift), U the largest of `draws` uniform numbers."""

    shift: float  # s of `shift_sigma`
    draws: int = 1

    def __call__(self, u: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return sigma = shift_sigma(U, shift) in [0, 1), where U = u^(1 / draws)."""
        return shift_sigma(u ** (1 / self.draws), self.shift)

    def share_above(self, sigma: float) -> float:
        """Return P(drawn level >= sigma) = 1 - unshift_sigma(sigma, shift)^draws."""
        return 1 - unshift_sigma(sigma, self.shift) ** self.draws


@dataclass(frozen=True)
class ShiftedGrid:
    """Equally likely noise levels sigma = clip(shift_sigma(k / levels, shift)), k = 0 ... levels - 1.

    DMD and its successors draw the level at which teacher and critic are compared from this law (arXiv:2311.18828).
    """

    shift: float  # s of `shift_sigma`
    clip: tuple[float, float]  # lowest and highest noise level
    levels: int = 1000  # size of the grid

    def __call__(self, u: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return the level of k = floor(levels u)."""
        return as_level(shift_sigma((u * self.levels).floor() / self.levels, self.shift)).clamp(*self.clip)

    def share_above(self, sigma: float) -> float:
        """Return P(drawn level >= sigma), the share of the grid's levels that are at least `sigma`."""
        # The middle of a cell: k / levels * levels may round down to k - 1.
        middles = (torch.arange(self.levels, dtype=torch.float64) + 0.5) / self.levels
        return float((self(middles) >= sigma).double().mean())


def law_on_side(law: NoiseLevelLaw, u: Float[Tensor, "..."], boundary: float, *, above: bool) -> Float[Tensor, "..."]:
    """Return levels of the law given that they are at least `boundary` (`above`), or below it; u is uniform in [0, 1).

    u is stretched to the part of [0, 1) that the law maps to this side. Rounding takes no level to the other side.
    """
    share = law.share_above(boundary)
    if above:
        return law(1 - share + share * u).clamp(min=boundary)
    return law((1 - share) * u).clamp(max=math.nextafter(boundary, 0))


def sigma_table(num_steps: int, shift: float) -> Float[Tensor, " steps_and_0"]:
    """Return num_steps + 1 float64 noise levels from 1 down to 0: linspace(1, 0) shifted.

    Raises ValueError if num_steps is below 1.
    """
    if num_steps < 1:
        raise ValueError(f"sigma_table: num_steps must be at least 1, not {num_steps}")
    return shift_sigma(torch.linspace(1, 0, num_steps + 1, dtype=torch.float64), shift)


def stretched(sigmas: Float[Tensor, " steps_and_0"], terminal: float) -> Float[Tensor, " steps_and_0"]:
    """Return falling levels with 1 - sigma scaled so that the last before the trailing 0 is `terminal`.

    A level of 1 stays. This is how schedulers of LTX-Video (arXiv:2501.00103) and Qwen-Image stretch theirs.
    """
    scale = (1 - terminal) / (1 - sigmas[-2])
    return torch.cat([1 - scale * (1 - sigmas[:-1]), sigmas[-1:]])


def add_noise(x0: Tensor, noise: Tensor, sigma: Sigma) -> Tensor:
    """Return x_t = (1 - sigma) x0 + sigma noise."""
    x0, noise = promote(x0), promote(noise)
    return per_sample(1 - as_level(sigma), x0) * x0 + per_sample(sigma, x0) * noise


def x0_from_velocity(x_t: Tensor, velocity: Tensor, sigma: Sigma) -> Tensor:
    """Return x0 = x_t - sigma velocity."""
    x_t = promote(x_t)
    return x_t - per_sample(sigma, x_t) * promote(velocity)


def noise_from_velocity(x_t: Tensor, velocity: Tensor, sigma: Sigma) -> Tensor:
    """Return noise = x_t + (1 - sigma) velocity."""
    x_t = promote(x_t)
    return x_t + per_sample(1 - as_level(sigma), x_t) * promote(velocity)


def guide(cond: Tensor, uncond: Tensor, guidance_scale: Sigma) -> Tensor:
    """Return uncond + w (cond - uncond) with w = guidance_scale (arXiv:2207.12598).

    w = 1 is no guidance. The form cond + s (cond - uncond), which some papers use, is w = s + 1.
    """
    cond, uncond = promote(cond), promote(uncond)
    return uncond + per_sample(guidance_scale, cond) * (cond - uncond)


def promote(x: Tensor) -> Tensor:
    """Convert float16 and bfloat16 to float32; return other tensors unchanged."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def sample_mean(x: Float[Tensor, "b ..."]) -> Float[Tensor, " b"]:
    """Return the mean over the elements of each sample, accumulated and returned in the widest dtype of its device.

    Differences of such means decide whether a ratio is clipped. The gradient has the dtype of `x`.
    """
    return x.mean(tuple(range(1, x.ndim)), dtype=widest(x.device))


def as_level(sigma: Sigma) -> Tensor:
    """Convert a noise level, or any number per sample, to a tensor of its device's widest dtype; float64 on the CPU."""
    return torch.as_tensor(sigma, dtype=widest(sigma.device) if isinstance(sigma, Tensor) else torch.float64)


def per_sample(value: Sigma, like: Tensor) -> Tensor:
    """Reshape `value` to broadcast over `like` [b, c, t, ...] and convert it to the dtype and device of `like`.

    `value` is one number, one per sample [b], or one per sample and latent frame [b, t]. One number of the CPU stays
    there: it is an argument of the kernel that reads it, and no copy. Others are copied without waiting for the device.
    """
    value = as_level(value)
    if value.ndim == 2:
        value = value.reshape(len(value), 1, -1, *[1] * (like.ndim - 3))
    if value.ndim == 0:
        return on_cpu_or(like, value)
    if value.ndim == 1:
        value = value.reshape(-1, *[1] * (like.ndim - 1))
    return value.to(like.dtype).to(like.device, non_blocking=True)


def on_cpu_or(like: Tensor, value: Tensor | float) -> Tensor:
    """Return a number or tensor in the dtype of `like`: one number on the CPU, others on the device of `like`."""
    value = torch.as_tensor(value).to(like.dtype)
    return value if value.ndim == 0 and value.device.type == "cpu" else value.to(like.device, non_blocking=True)
