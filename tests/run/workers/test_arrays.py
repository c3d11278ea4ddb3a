"""Samples as they travel between processes."""

import torch

from unified_trainer.basics.types import Rollout
from unified_trainer.rewards.reward import Scores
from unified_trainer.run.workers import arrays

CPU = torch.device("cpu")


def test_samples_arrive_as_they_were_made():
    x0 = torch.randn(2, 16, 2, 2, 2)
    rollout = Rollout(torch.randn(2, 3, 16, 2, 2, 2), torch.randn(2, 2, dtype=torch.float64), x0)
    scores = Scores(torch.randn(2, 1), {"mean": torch.randn(2)}, torch.randn(2, 4))
    for made, there in (
        (rollout, arrays.to_rollout(arrays.of_rollout(rollout), CPU)),
        (scores, arrays.to_scores(arrays.of_scores(scores), CPU)),
    ):
        for name, value in vars(made).items():
            other = getattr(there, name)
            pairs = [(value[key], other[key]) for key in value] if isinstance(value, dict) else [(value, other)]
            assert all(torch.equal(one, two) and one.dtype == two.dtype for one, two in pairs)
