"""Rows of a batch with equal inputs: a network is called once for all of them."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class EqualRows:
    """Which of b rows are equal, and the n rows that stand for all."""

    keys: tuple[Hashable, ...]  # of the n sets of equal rows
    first: tuple[int, ...]  # the first row of each set
    place: tuple[int, ...]  # of every row: the position of its set

    @classmethod
    def of(cls, keys: Iterable[Hashable]) -> "EqualRows":
        """Return the rows of equal keys."""
        rows = list(keys)
        distinct = list(dict.fromkeys(rows))
        places = {key: place for place, key in enumerate(distinct)}
        return cls(tuple(distinct), tuple(map(rows.index, distinct)), tuple(places[key] for key in rows))

    @property
    def any(self) -> bool:
        """Whether two rows are equal."""
        return len(self.first) < len(self.place)

    def reduce(self, rows: Float[Tensor, "b ..."]) -> Float[Tensor, "n ..."]:
        """Return the rows that stand for all."""
        return torch.stack([rows[i] for i in self.first])

    def spread(self, rows: Float[Tensor, "n ..."]) -> Float[Tensor, "b ..."]:
        """Return for every row the one that stands for it; its gradient is the sum of theirs.

        There is no index on the device: nothing waits for it, and the sum has one order.
        """
        parts = rows.unbind(0)
        return torch.stack([parts[i] for i in self.place])
