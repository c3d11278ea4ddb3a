"""Windows of MixGRPO: which transitions of a training step are stochastic (arXiv:2507.21802).

`progressive` moves from the noisiest transitions on and starts over at the end; `random` is anew anywhere in each
training step; `decay` moves as `progressive`, but stays at later places for shorter.
"""

import bisect
import itertools
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from unified_trainer.numerics.kernels import Tail


@dataclass(frozen=True)
class WindowConfig:
    size: int = 0  # transitions with noise, which alone are stored and trained; the others are Euler steps. 0: all
    schedule: Literal["progressive", "random", "decay"] = "progressive"  # from noise to data, anywhere, or ever faster
    every: int = 25  # training steps at one place
    stride: int = 1  # transitions from one place to the next
    decay: float = 0.1  # a place p after decay_from is held exp(-decay (p - decay_from)) as long; at least one step
    decay_from: int = 0  # number of the last transition whose place is held in full
    tail: Tail = "euler"  # of the steps after the window: Euler, or second order (DPM-Solver++) from the second one on

    def check(self, transitions: int) -> None:
        """Raise ValueError, naming the key, for what cannot be among this many stochastic transitions."""
        if not 0 <= self.size <= transitions:
            raise ValueError(
                f"algorithm.window.size is {self.size}, outside the table: sampler.num_steps leaves "
                f"{transitions} transitions that can have noise"
            )
        if self.tail == "second_order" and not self.size:
            raise ValueError("algorithm.window.size must be above 0 for algorithm.window.tail second_order")
        if self.every < 1 or self.stride < 1:
            raise ValueError("algorithm.window.every and algorithm.window.stride must be at least 1")
        if self.decay < 0 or self.decay_from < 0:
            raise ValueError("algorithm.window.decay and algorithm.window.decay_from must not be negative")

    def at(self, step: int, transitions: int, shared: np.random.Generator) -> range:
        """The stochastic transitions of a training step, the same on all ranks; a function of the step alone."""
        size = self.size or transitions
        last = transitions - size
        if self.schedule == "random":
            first = int(shared.integers(last + 1)) if last else 0
            return range(first, first + size)
        places = self._places(last)
        ends = list(itertools.accumulate(self._held(place) for place in places))
        place = places[bisect.bisect_right(ends, step % ends[-1])]
        return range(place, place + size)

    def everywhere(self, transitions: int) -> list[range]:
        """Every window that `at` can give."""
        size = self.size or transitions
        last = transitions - size
        places = range(last + 1) if self.schedule == "random" else self._places(last)
        return [range(place, place + size) for place in places]

    def _places(self, last: int) -> list[int]:
        return sorted({*range(0, last, self.stride), last})

    def _held(self, place: int) -> int:
        """Training steps at a place."""
        if self.schedule == "progressive":
            return self.every
        return math.ceil(self.every * math.exp(-self.decay * max(0, place - self.decay_from)))
