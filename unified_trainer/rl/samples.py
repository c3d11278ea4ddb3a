"""Scored samples: what the student sampled in a training step, and what the reward gave for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unified_trainer.meter import phase
from unified_trainer.roles.reward import Reward, Scores
from unified_trainer.types import Batch, Rollout


@dataclass(frozen=True)
class ScoredSamples:
    """This rank's samples of one training step: prompts, rollouts and scores, row by row."""

    batch: Batch
    rollout: Rollout
    scores: Scores

    def replaced(self, rows: Sequence[int], others: "ScoredSamples") -> "ScoredSamples":
        """Return these samples with the first of the others in the given rows."""
        order = list(range(len(self.batch)))
        for i, row in enumerate(rows):
            order[row] = len(order) + i
        rollout = Rollout.cat([self.rollout, others.rollout]).take(order)
        scores = Scores.cat([self.scores, others.scores]).take(order)
        return ScoredSamples(self.batch.cat(others.batch).take(order), rollout, scores)


def sample_and_score(batch: Batch, size: int, sample: Callable[[Batch], Rollout], reward: Reward) -> ScoredSamples:
    """Sample, decode and score `size` samples at a time."""
    rollouts, scores = [], []
    parts = batch.split(size)
    for number, part in enumerate(parts, 1):
        with phase("rollout", number, len(parts)):
            rollouts.append(sample(part))
        scores.append(reward.score(rollouts[-1].x0, part.prompts))
    return ScoredSamples(batch, Rollout.cat(rollouts), Scores.cat(scores))
