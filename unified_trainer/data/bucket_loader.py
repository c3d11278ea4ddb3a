"""The batches of clips of several shapes, each of one shape."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from unified_trainer.data.batch_plan import Position
from unified_trainer.data.loader import Loader
from unified_trainer.parallel.random import generator


class BucketLoader(Loader):
    """Batches of one shape each. The rows of a shape, a bucket, have epochs of their own, as those of a loader have.

    In an epoch of all rows, a bucket is drawn as often as its rows fill a batch, in random order. The rows that are
    left begin its first batch of the next epoch: none is left out, and none comes again before all of its bucket have.
    The bucket of a step follows from seed, step and the rows taken before, which a checkpoint's position holds.
    """

    def __init__(self, *parts: Any, shapes: Sequence[Sequence[int]], **options: Any) -> None:
        """`shapes` are those of the rows of the source."""
        names = np.array(["x".join(map(str, shape)) for shape in shapes])
        self._members = {name: np.flatnonzero(names == name) for name in dict.fromkeys(names.tolist())}
        super().__init__(*parts, **options)

    def go_on(self, position: Position) -> None:
        self._plan = replace(self._plan, begun=position)
        self._begun = {name: self._laid_out(Position(**position.buckets.get(name, {}))) for name in self._members}
        self._of = {name: self._epochs_of(rows, self._begun[name].layouts) for name, rows in self._members.items()}
        self._taken = {name: begun.prompts for name, begun in self._begun.items()}  # rows, by all draws
        self._draws: list[tuple[str, int]] = []  # of each step since: its bucket, and the rows of it taken before

    def position(self, step: int) -> Position:
        taken = self._taken | dict(reversed(self._draws[step - self._plan.begun.step :]))
        buckets = {name: asdict(replace(begun, prompts=taken[name])) for name, begun in self._begun.items()}
        return Position(step, self._plan.prompts_before(step), buckets=buckets)

    def _rows(self, step: int, early: int = 0) -> list[int]:
        while (done := step - self._plan.begun.step) >= len(self._draws):
            self._draw(self._plan.begun.step + len(self._draws))
        name, first = self._draws[done]
        return self._of[name].rows(first, self._plan.at(step).prompts)

    def _rows_before(self, steps: int) -> Sequence[int]:
        if self._plan.prompts_before(steps) > sum(epochs.size for epochs in self._of.values()):
            return range(len(self._source))
        return sorted({row for step in range(self._plan.begun.step, steps) for row in self._rows(step)})

    def _draw(self, step: int) -> None:
        """Draw the bucket of a step: each batch that the epoch has left is as likely as any other.

        The epoch is the first that has a whole batch left. In the order of the file, the next row decides.
        """
        count, taken, of = self._plan.at(step).prompts, self._taken, self._of
        epoch = min(-(-(taken[name] + count) // of[name].size) for name in of)
        left = {name: (epoch * of[name].size - taken[name]) // count for name in of}
        names = [name for name in of if left[name] > 0]
        chance = np.array([left[name] for name in names])
        name = names[int(generator(self._seed, "bucket", step).choice(len(names), p=chance / chance.sum()))]
        if not self._shuffle:
            name = min(names, key=lambda name: (taken[name] // of[name].size, of[name].rows(taken[name], 1)))
        self._draws.append((name, taken[name]))
        taken[name] += count
