"""The groups of a training step in which every sample has its scores; the others are left out of it, and counted."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from unified_trainer.basics.types import PerSample
from unified_trainer.methods.base import Metrics
from unified_trainer.methods.rl.rollouts import ScoredSamples
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.rewards.reward import RewardSum, Scores


@dataclass(frozen=True)
class ScoredGroups:
    """The samples of all ranks that are compared, equal on all of them: all but groups with an unscored sample."""

    rows: Int[Tensor, " n"]  # among the samples of all ranks, rank by rank
    ids: Int[Tensor, " n"]
    scores: Scores
    rewards: PerSample
    messages: tuple[str, ...]  # names the samples that are left out, if any
    _count: int  # samples of all ranks

    @classmethod
    def of(
        cls, samples: ScoredSamples, own_ids: Sequence[int], reward: RewardSum, mesh: Mesh, metrics: Metrics
    ) -> "ScoredGroups":
        """Gather the scores of samples in groups of equal ids, and note how many have none; UserError for too many."""
        scores, ids = samples.scores.gathered(mesh), mesh.gather(torch.tensor(own_ids))
        metrics |= (unscored := reward.count_unscored(scores.parts))
        rewards, count = samples.rewards(reward, scores, mesh), len(ids)
        rows = (~torch.isin(ids, ids[rewards.isnan()])).nonzero().flatten()
        left = f"{count - len(rows)} of {count} samples are left out: {{:g}} of them cannot be scored".format
        messages = tuple(map(left, unscored.values()))
        return cls(rows, ids[rows], scores.take(rows.tolist()), rewards[rows], messages, count)

    def everywhere(self, values: Tensor) -> Tensor:
        """Return values of these samples as values of all ranks' samples: 0 or False for those that are left out."""
        return values.new_zeros(self._count).index_copy(0, self.rows, values)
