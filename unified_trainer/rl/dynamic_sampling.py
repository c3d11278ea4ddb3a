"""Groups that teach nothing are replaced by those of further prompts (DAPO, arXiv:2503.14476)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unified_trainer.data.loader import Feed
from unified_trainer.rl.groups import GroupConfig, equal_groups, gather_ids
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.roles.reward import Reward, Scores
from unified_trainer.types import Batch, Rollout


@dataclass(frozen=True)
class Samples:
    """What this rank's samples became, and what they are worth."""

    batch: Batch
    rollout: Rollout
    scores: Scores

    def replaced(self, rows: list[int], others: "Samples") -> "Samples":
        """With the first of the others in these rows."""
        order = list(range(len(self.batch)))
        for i, row in enumerate(rows):
            order[row] = len(order) + i
        rollout = Rollout.cat([self.rollout, others.rollout]).take(order)
        scores = Scores.cat([self.scores, others.scores]).take(order)
        return Samples(self.batch.cat(others.batch).take(order), rollout, scores)


def refill(
    samples: Samples,
    config: GroupConfig,
    collect: Callable[[Batch], Samples],
    reward: Reward,
    feed: Feed,
    step: int,
    mesh: Mesh,
) -> tuple[Samples, dict[str, float]]:
    """Draw further prompts for the groups of equal rewards, until none is left, or for `refill_rounds` rounds.

    A new group takes the place of an old one on the same ranks. All ranks make as many samples as the one that lacks
    most; those of a rank that lacks less are dropped.
    """
    asked = 0
    for number in range(1, config.refill_rounds + 1):
        parts = samples.scores.everywhere(mesh).parts
        equal = equal_groups(config, reward, parts, gather_ids(samples.batch, parts, mesh))
        slots = mesh.gather(_slots(samples, feed).to(equal.device))
        lacking = slots[equal].unique().tolist()
        prompts = dict(zip(lacking, feed.further(step, asked, len(lacking)), strict=False))
        if not prompts:
            break
        asked += len(prompts)
        places = torch.tensor([slot in prompts for slot in slots.tolist()]).reshape(mesh.data_size, -1)
        rows = places[mesh.data_rank].nonzero().flatten().tolist()
        fill = [0] * (int(places.sum(1).max()) - len(rows))  # made because others make theirs, and dropped
        positions = [samples.batch.sample_ids[row] % feed.samples for row in [*rows, *fill]]
        spare = next(iter(prompts.values()))
        indices = [prompts.get(position // feed.samples_per_prompt, spare) for position in positions]
        batch = feed.batch_of(indices, [position + number * feed.samples for position in positions])
        samples = samples.replaced(rows, collect(batch))
    return samples, {"refilled_groups": float(asked)} if config.refill_rounds else {}


def _slots(samples: Samples, feed: Feed) -> Tensor:
    """Which of the step's groups each sample is in, whatever prompt that has by now."""
    return torch.tensor(samples.batch.sample_ids) % feed.samples // feed.samples_per_prompt
