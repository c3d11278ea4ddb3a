"""Windows of stochastic transitions in a training step (MixGRPO, arXiv:2507.21802).

`progressive` moves from the noisiest transitions to the data and then starts over; `random` draws a place in each
training step.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Count, CountOrZero, Period


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

    def check(self, transitions: int) -> None:
        """Raise UserError, naming the key, for settings that do not fit this number of stochastic transitions."""
        if self.size > transitions:
            raise UserError(
                f"algorithm.window.size must be at most {transitions}, the transitions that can be stochastic with "
                f"this sampler.num_steps and algorithm.noise_range, not {self.size}"
            )

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
