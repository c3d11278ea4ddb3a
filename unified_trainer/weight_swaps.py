"""Exchange of a sampler's weights for newer ones while it makes samples, and a record of which weights made what.

The sampler marks with `exchange_weights` where weights may change, and notes with `note_transition` what it makes.
Whoever wants swaps runs it inside `WeightSwaps.use`; elsewhere the marks do nothing. No method needs code for it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np


class WeightSwaps:
    """The swaps of one rollout; used once."""

    def __init__(self, version: int, take: Callable[[int], int]) -> None:
        """`take(version)` puts newer weights than these into the role, if there are some, and returns their version.

        `version` is that of the weights which the role has now.
        """
        self._version, self._take = version, take
        self._made: dict[int, list[int]] = {}  # transition -> versions, one for each chunk

    @contextmanager
    def use(self) -> Iterator[None]:
        """Swap weights in what runs inside."""
        before = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(before)

    @property
    def versions(self) -> np.ndarray:
        """The version of the weights that made each transition of each chunk, [s, k]."""
        return np.array([self._made[s] for s in sorted(self._made)], dtype=np.int64)

    def exchange(self) -> bool:
        """Take newer weights, if there are some, and return whether there were."""
        before, self._version = self._version, self._take(self._version)
        return self._version != before

    def note(self, s: int) -> None:
        """Note that the present weights have made transition s, of the next chunk."""
        self._made.setdefault(s, []).append(self._version)


_CURRENT: ContextVar[WeightSwaps | None] = ContextVar("weight_swaps", default=None)


def exchange_weights() -> bool:
    """Mark a place where weights may be exchanged; return whether they were."""
    swaps = _CURRENT.get()
    return swaps is not None and swaps.exchange()


def note_transition(s: int) -> None:
    """Mark that transition s was made, of the next chunk of a causal student."""
    swaps = _CURRENT.get()
    if swaps is not None:
        swaps.note(s)
