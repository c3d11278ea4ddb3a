"""What the updates of a training step learn from: the samples left by the filters, in passes that all ranks share."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Minibatch:
    """The samples of one backward pass."""

    rows: Int[Tensor, " m"]  # among this rank's samples
    weights: Float[Tensor, " m"]  # of each in this rank's loss; 0 for those that only fill up

    @property
    def real(self) -> Bool[Tensor, " m"]:
        return self.weights > 0


def plan_minibatches(
    useful: Bool[Tensor, " all"], advantages: Float[Tensor, " all"], rank: int, ranks: int, updates: int, micro: int
) -> list[list[Minibatch]]:
    """Each update's passes on this rank, `micro` samples each; none for an update without any advantage.

    Samples of all ranks come in rank by rank, a rank's update by update. A rank with fewer useful samples than another
    fills up with weight 0, since all must make as many passes. The mean over ranks of the weighted sums is the mean
    over all useful samples of the update.
    """
    useful_of, advantage_of = (x.reshape(ranks, updates, -1) for x in (useful, advantages))
    size = useful_of.shape[2]
    minibatches = []
    for update in range(updates):
        chosen = useful_of[:, update]
        if not bool((advantage_of[:, update] * chosen).any()):
            minibatches.append([])
            continue
        passes = -(-int(chosen.sum(1).max()) // micro)
        mine = chosen[rank].nonzero().flatten()
        rows = torch.zeros(passes * micro, dtype=torch.int64)
        rows[: len(mine)] = mine
        weights = torch.zeros(passes * micro)
        weights[: len(mine)] = ranks / float(chosen.sum())
        parts = zip((rows + update * size).split(micro), weights.split(micro), strict=True)
        minibatches.append([Minibatch(*part) for part in parts])
    return minibatches
