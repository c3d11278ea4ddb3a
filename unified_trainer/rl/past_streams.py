"""The random numbers of samples from several training steps in one batch.

The id of a sample is its position in the batch of its own training step. In a batch of another training step the id
also holds how many training steps earlier the sample was made, so that its noise can be drawn again.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.parallel.random import Streams
from unified_trainer.types import take_rows

IDS = 2**32  # more than the samples of a training step


def aged(sample_id: int, age: int) -> int:
    """Return the id of a sample that was made `age` training steps earlier."""
    return age * IDS + sample_id


def ages(sample_ids: Sequence[int]) -> list[int]:
    """Return how many training steps earlier each sample was made."""
    return [key // IDS for key in sample_ids]


class PastStreams(Streams):
    """The streams of a training step, in which samples of earlier steps have the noise of these steps."""

    def __init__(self, rng: Streams) -> None:
        """`rng` are the streams of the present training step."""
        self._rng, self.shared = rng, rng.shared

    def noise(self, name: str, keys: Sequence[int], shape: Sequence[int]) -> Float[Tensor, "b ..."]:
        """Return the noise of samples with these ids, each from the streams of its own training step."""
        rows: dict[int, list[int]] = {}
        for row, age in enumerate(ages(keys)):
            rows.setdefault(age, []).append(row)
        parts = [
            (self._rng.earlier(age) if age else self._rng).noise(name, [keys[row] % IDS for row in own], shape)
            for age, own in rows.items()
        ]
        order = [row for own in rows.values() for row in own]
        return take_rows(torch.cat(parts), sorted(range(len(order)), key=order.__getitem__))
