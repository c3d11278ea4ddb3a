"""Groups that teach nothing are replaced by those of further prompts (DAPO, arXiv:2503.14476)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unified_trainer.data.loader import Loader
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.rl.groups import GroupConfig, equal_groups, gather_ids
from unified_trainer.roles.reward import Reward, Scores
from unified_trainer.types import Batch, Rollout


@dataclass(frozen=True)
class ScoredSamples:
    """What this rank's samples became, and what they are worth."""

    batch: Batch
    rollout: Rollout
    scores: Scores

    def replaced(self, rows: list[int], others: "ScoredSamples") -> "ScoredSamples":
        """With the first of the others in these rows."""
        order = list(range(len(self.batch)))
        for i, row in enumerate(rows):
            order[row] = len(order) + i
        rollout = Rollout.cat([self.rollout, others.rollout]).take(order)
        scores = Scores.cat([self.scores, others.scores]).take(order)
        return ScoredSamples(self.batch.cat(others.batch).take(order), rollout, scores)


def resample_groups(
    samples: ScoredSamples,
    config: GroupConfig,
    collect: Callable[[Batch], ScoredSamples],
    reward: Reward,
    loader: Loader,
    step: int,
    mesh: Mesh,
) -> tuple[ScoredSamples, dict[str, float]]:
    """Draw further prompts for the groups of equal rewards, until none is left, or for `dynamic_sampling_rounds` rounds.

    A new group takes the place of an old one on the same ranks. All ranks make as many samples as the one that lacks
    most; those of a rank that lacks less are dropped.
    """
    asked = 0
    for number in range(1, config.dynamic_sampling_rounds + 1):
        parts = samples.scores.gathered(mesh).parts
        equal = equal_groups(config, reward, parts, gather_ids(samples.batch, parts, mesh))
        slots = mesh.gather(_slots(samples, loader).to(equal.device))
        lacking = slots[equal].unique().tolist()
        prompts = dict(zip(lacking, loader.further(step, asked, len(lacking)), strict=False))
        if not prompts:
            break
        asked += len(prompts)
        places = torch.tensor([slot in prompts for slot in slots.tolist()]).reshape(mesh.data_size, -1)
        rows = places[mesh.data_rank].nonzero().flatten().tolist()
        fill = [0] * (int(places.sum(1).max()) - len(rows))  # made because others make theirs, and dropped
        positions = [samples.batch.sample_ids[row] % loader.samples for row in [*rows, *fill]]
        spare = next(iter(prompts.values()))
        indices = [prompts.get(position // loader.samples_per_prompt, spare) for position in positions]
        batch = loader.batch_of(indices, [position + number * loader.samples for position in positions])
        samples = samples.replaced(rows, collect(batch))
    return samples, {"resampled_groups": float(asked)} if config.dynamic_sampling_rounds else {}


def _slots(samples: ScoredSamples, loader: Loader) -> Tensor:
    """Which of the step's groups each sample is in, whatever prompt that has by now."""
    return torch.tensor(samples.batch.sample_ids) % loader.samples // loader.samples_per_prompt
