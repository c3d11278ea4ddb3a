"""The order of the rows in an epoch: every row once, as a function of the seed and the epoch alone."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from unified_trainer.parallel.random import generator


class Epochs(NamedTuple):
    """Rows, epoch after epoch."""

    order: Callable[[int], np.ndarray]  # epoch -> its rows
    size: int  # rows of an epoch

    def rows(self, first: int, count: int) -> list[int]:
        """Return `count` rows from position `first` on."""
        epochs = range(first // self.size, (first + count - 1) // self.size + 1)
        rows = [row for epoch in epochs for row in self.order(epoch).tolist()]
        start = first - epochs.start * self.size
        return rows[start : start + count]


def in_file_order(epoch: int, *, size: int) -> np.ndarray:
    """Return the rows 0 to size - 1 as they stand in their file, in every epoch."""
    return np.arange(size)


def shuffled(epoch: int, *, seed: int, size: int) -> np.ndarray:
    """Return the rows 0 to size - 1 in random order."""
    return generator(seed, "epoch", epoch).permutation(size)


def one_of_each(epoch: int, *, order: Callable[[int], np.ndarray], clip_of: Sequence[int], seed: int) -> np.ndarray:
    """Return an order with one row of each clip, drawn at random; `clip_of` is the clip of each row."""
    drawn = generator(seed, "caption", epoch).permutation(len(clip_of))
    kept = drawn[np.unique(np.asarray(clip_of)[drawn], return_index=True)[1]]
    rows = order(epoch)
    return rows[np.isin(rows, kept)]


def shuffled_by_row_groups(
    epoch: int, *, seed: int, row_groups: Sequence[int], layouts: Sequence[Sequence[int]]
) -> np.ndarray:
    """Return the rows of all row groups in random order, so that consecutive batches read from few row groups.

    `row_groups` are their numbers of rows. All rows lie on a line: the row groups in random order, the rows of each in
    random order. The line is cut into a piece for each of `lanes` lanes. Position p of the batch belongs to lane
    p lanes // batch in every step, and a lane takes its piece row by row: even lanes from the left, odd ones from the
    right, so that the two lanes of a row group that is cut use it at the same time. A batch thus mixes rows of `lanes`
    row groups, and each is used up before its lane goes to the next one. Where a run is continued with another batch or
    other lanes, the rows that are left of the epoch are laid out anew: each of `layouts` holds from its prompt on.

    Ranks hold fixed positions of the batch. Their number changes no row, and each row group is read once, but for those
    that are cut between lanes of two ranks.
    """
    sizes, draw = np.asarray(row_groups), generator(seed, "row groups", epoch)
    place = np.repeat(draw.permutation(len(sizes)), sizes)  # of the row's group on the line
    line = np.lexsort((draw.random(len(place)), place))
    begin, end = epoch * len(line), (epoch + 1) * len(line)
    order = line[:0]
    for (since, batch, lanes), (until, *_) in zip(layouts, [*layouts[1:], (end,)], strict=True):
        if until <= begin or since >= end:
            continue
        positions = np.arange(max(begin, since), end)
        lane = (positions - since) % batch * lanes // batch
        rest = np.empty_like(line)
        rest[np.lexsort((np.where(lane % 2, -positions, positions), lane))] = line
        order = np.concatenate([order, rest[: until - positions[0]]])
        line = line[~np.isin(line, order)]
    return order
