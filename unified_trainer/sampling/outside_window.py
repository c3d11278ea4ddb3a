"""The probability flow, which a policy's rollout follows outside of its window."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.types import Latents
from unified_trainer.numerics.flow import promote, x0_from_velocity
from unified_trainer.numerics.kernels import transition
from unified_trainer.sampling.shared_calls import Velocity

Levels = Float[Tensor, " _"]  # falling noise levels, float64; the last may be 0
FlowSolver = Callable[[Velocity, Latents, Levels], Latents]  # the state at the last level from that at the first


def euler(velocity: Velocity, x_t: Latents, levels: Levels) -> Latents:
    """Return x at the last level by Euler steps, x' = x + (sigma' - sigma) v."""
    for sigma, sigma_next in pairwise(levels):
        x_t, _ = transition("ode", x_t, velocity(x_t, sigma), sigma, sigma_next, 0.0)
    return x_t


def dpm_solver_2m(velocity: Velocity, x_t: Latents, levels: Levels) -> Latents:
    """Return x at the last level by DPM-Solver++ (2M), a multistep solver of second order (arXiv:2211.01095).

    With lambda = ln((1 - sigma) / sigma), steps h = lambda' - lambda and the step g before h, it is
    x' = r x + (1 - sigma' - r (1 - sigma)) (x0 + h / (2 g) (x0 - x0_before)), r = sigma' / sigma. A step is of first
    order, as an Euler step, where h or g is infinite, at noise level 0 or 1, and where there is no step before it.
    """
    steps = (1 / levels - 1).log().diff()
    weights = torch.where(steps[1:].isfinite(), steps[1:] / (2 * steps[:-1]), 0.0).tolist()
    x_t = x0_before = promote(x_t)
    for (sigma, sigma_next), weight in zip(pairwise(levels), [0.0, *weights][: len(steps)], strict=True):
        x0 = end = x0_from_velocity(x_t, velocity(x_t, sigma), sigma)
        if weight:
            end = x0 + weight * (x0 - x0_before)
        kept = sigma_next / sigma
        x_t = float(kept) * x_t + float(1 - sigma_next - kept * (1 - sigma)) * end
        x0_before = x0
    return x_t


@dataclass(frozen=True)
class OutsideWindow:
    """How a rollout goes from noise to its window, and from there to data."""

    before: Levels  # from the sampler's first level to that of the window's first transition
    after: Levels  # from the level where the window's last transition ends to 0
    solve: FlowSolver

    @classmethod
    def of_sampler(cls, sigmas: Levels, window: range) -> "OutsideWindow":
        """Return Euler steps of the sampler's own noise levels."""
        return cls(sigmas[: window.start + 1], sigmas[window.stop :], euler)

    @classmethod
    def of_calls(cls, sigmas: Levels, window: range, calls: int) -> "OutsideWindow":
        """Return steps of second order in this many network calls, divided in proportion to the sampler's own.

        Each side that has steps of the sampler has a call. The levels lie evenly among the sampler's, and on some of
        them where the numbers divide.
        """
        last = len(sigmas) - 1
        share = round(calls * window.start / (last - len(window)))
        before = min(max(share, 1), calls - 1) if window.start else 0
        places = np.linspace(0, window.start, before + 1), np.linspace(window.stop, last, calls - before + 1)
        towards, onwards = (torch.from_numpy(np.interp(at, range(last + 1), sigmas)) for at in places)
        return cls(towards, onwards, dpm_solver_2m)

    @property
    def calls(self) -> int:
        """Network calls of each sample."""
        return len(self.before) + len(self.after) - 2
