"""Minibatches of an update: the samples left by the filters, in as many passes on every rank."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Minibatch:
    """The samples of one backward pass."""

    rows: Int[Tensor, " m"]  # among this rank's samples
    weights: Float[Tensor, " m"]  # of each sample in this rank's loss; 0 for padding

    @property
    def real(self) -> Bool[Tensor, " m"]:
        """Samples that are not padding."""
        return self.weights > 0


def plan_minibatches(
    useful: Bool[Tensor, " all"], advantages: Float[Tensor, " all"], rank: int, ranks: int, updates: int, size: int
) -> list[list[Minibatch]]:
    """Return each update's minibatches of `size` samples on this rank; none for an update without any advantage.

    Samples come in rank by rank, a rank's update by update. A rank with fewer useful samples than another is padded
    with weight 0, since all ranks must make as many passes. The mean over ranks of the weighted sums is the mean over
    all useful samples of the update.
    """
    useful_of, advantage_of = (x.reshape(ranks, updates, -1) for x in (useful, advantages))
    per_update = useful_of.shape[2]
    plan = []
    for update in range(updates):
        chosen = useful_of[:, update]
        if not bool((advantage_of[:, update] * chosen).any()):
            plan.append([])
            continue
        passes = -(-int(chosen.sum(1).max()) // size)
        mine = chosen[rank].nonzero().flatten()
        rows = torch.zeros(passes * size, dtype=torch.int64)
        rows[: len(mine)] = mine
        weights = torch.zeros(passes * size)
        weights[: len(mine)] = ranks / float(chosen.sum())
        parts = zip((rows + update * per_update).split(size), weights.split(size), strict=True)
        plan.append([Minibatch(*part) for part in parts])
    return plan
