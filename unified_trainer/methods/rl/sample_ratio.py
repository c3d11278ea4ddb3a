"""One ratio for all trained transitions of a sample, as GSPO compares samples (arXiv:2507.18071)."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from unified_trainer.methods.rl.minibatches import Minibatch
from unified_trainer.methods.rl.replay import Replay, Trajectories

Compare = Callable[[Trajectories, Tensor, int], Replay]  # the samples of some rows at one transition


def of_samples(
    ratios: Compare, compare: Compare, trajectories: Trajectories, parts: Sequence[Minibatch], trained: Sequence[int]
) -> Compare:
    """Return `compare` with the mean log-ratio over the trained transitions of its sample in place of its own.

    A first pass of `ratios`, without gradient, computes all log-ratios of the update's minibatches: one more network
    call for each trained transition, and never the graph of more than one in memory. Each transition then has the value
    of the mean and its own gradient, as in the paper's GSPO-token, so that advantages may differ between transitions.
    The loss is a mean over transitions, which makes its gradient that of the mean log-ratio.
    """
    with torch.no_grad():
        means = {
            tuple(part.rows.tolist()): torch.stack([ratios(trajectories, part.rows, s).ratio for s in trained]).mean(0)
            for part in parts
        }

    def compared(trajectories: Trajectories, rows: Tensor, s: int) -> Replay:
        replay = compare(trajectories, rows, s)
        own = replay.ratio - replay.ratio.detach()  # 0, with the gradient of this transition
        return replace(replay, ratio=means[tuple(rows.tolist())] + own)

    return compared
