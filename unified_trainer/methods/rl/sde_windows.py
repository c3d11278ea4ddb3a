"""Windows of stochastic transitions in a training step (MixGRPO, arXiv:2507.21802).

`progressive` moves from the noisiest transitions to the data and then starts over; `random` draws a place in each
training step.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Count, CountOrZero, Period
from unified_trainer.sampling.outside_window import OutsideWindow


@dataclass(frozen=True)
class WindowConfig:
    size: CountOrZero = 0
    """Stochastic transitions of a training step, which alone are stored and which are all trained; others are Euler
    steps. 0: all transitions are stochastic, and algorithm.timestep_fraction of them are trained."""
    schedule: Literal["progressive", "random"] = "progressive"
    """Where the window is: moving from noise to data (progressive), or anywhere (random, experimental)."""
    every: Period = 25
    """Training steps at one place."""
    stride: Count = 1
    """Transitions from one place to the next."""
    outside_steps: CountOrZero = 0
    """Network calls of a sample outside of the window, before and after it in proportion to the sampler's steps there,
    by a solver of second order (DPM-Solver++ 2M, experimental). 0: the sampler's own Euler steps."""

    def check(self, transitions: int) -> None:
        """Raise UserError, naming the key, for settings that do not fit this number of stochastic transitions."""
        if self.size > transitions:
            raise UserError(
                f"algorithm.window.size must be at most {transitions}, the transitions that can be stochastic with "
                f"this sampler.num_steps and algorithm.noise_range, not {self.size}"
            )

    def check_outside(self, num_steps: int, windows: list[range], *, flow_map: bool) -> None:
        """Raise UserError unless `outside_steps` calls can make the steps outside of each of these windows."""
        key, fewest, most = "algorithm.window.outside_steps", 1 + any(w.start for w in windows), num_steps - self.size
        if not self.size:
            raise UserError(f"{key} must be 0 without algorithm.window.size: all transitions are then stochastic")
        if flow_map:
            raise UserError(f"{key} must be 0 for a flow map (student.flow_map): it predicts the sampler's own steps")
        if not fewest <= self.outside_steps <= most:
            raise UserError(
                f"{key} must be 0, or {fewest} to {most}, not {self.outside_steps}: the sampler has {most} steps "
                "outside of the window, and needs a call before a window that is not at the start, and one after it"
            )

    def outside(self, sigmas: Float[Tensor, " steps_and_0"], window: range) -> OutsideWindow:
        """Return the steps outside of a window of a sampler with these noise levels."""
        if self.outside_steps:
            return OutsideWindow.of_calls(sigmas, window, self.outside_steps)
        return OutsideWindow.of_sampler(sigmas, window)

    def at(self, step: int, transitions: int, shared: np.random.Generator) -> range:
        """Return the stochastic transitions of a training step, equal on all ranks."""
        size = self.size or transitions
        last = transitions - size
        if self.schedule == "random":
            first = int(shared.integers(last + 1)) if last else 0
            return range(first, first + size)
        places = self._places(last)
        place = places[step // self.every % len(places)]
        return range(place, place + size)

    def all(self, transitions: int) -> list[range]:
        """Return every window that `at` can return."""
        size = self.size or transitions
        last = transitions - size
        places = range(last + 1) if self.schedule == "random" else self._places(last)
        return [range(place, place + size) for place in places]

    def _places(self, last: int) -> list[int]:
        return sorted({*range(0, last, self.stride), last})
