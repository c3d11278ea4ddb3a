"""Dynamic sampling: groups of equal rewards are replaced by groups of further prompts (DAPO, arXiv:2503.14476)."""

import torch
from torch import Tensor

from unified_trainer.basics.types import Batch
from unified_trainer.data.loader import Loader
from unified_trainer.methods.base import Metrics
from unified_trainer.methods.rl.groups import GroupConfig, equal_groups, gather_ids
from unified_trainer.methods.rl.rollouts import AroundRollouts, Rollouts, ScoredSamples
from unified_trainer.parallel.random import Streams
from unified_trainer.rewards.reward import RewardSum


def with_replacement(source: Rollouts, config: GroupConfig, reward: RewardSum, loader: Loader) -> Rollouts:
    """Return the source, with dynamic sampling around it if the settings ask for it."""
    return DynamicSampling(source, config, reward, loader) if config.dynamic_sampling_rounds else source


class DynamicSampling(AroundRollouts):
    """Samples of another source, in whose batches groups of equal rewards are replaced.

    Groups are replaced until none is left, or for `dynamic_sampling_rounds` rounds. A new group takes the place of an
    old one on the same ranks. Where rollouts must be uniform, all ranks make as many samples as the rank that must
    replace most, and a rank that replaces fewer drops the rest.
    """

    def __init__(self, source: Rollouts, config: GroupConfig, reward: RewardSum, loader: Loader) -> None:
        super().__init__(source)
        self._config, self._reward, self._loader = config, reward, loader
        self._drawn = 0  # groups that were replaced in this step

    def samples(self, batch: Batch, step: int, rng: Streams) -> ScoredSamples:
        loader, mesh, uniform = self._loader, self._loader.mesh, self.uniform
        samples, self._drawn = self._source.samples(batch, step, rng), 0
        for number in range(1, self._config.dynamic_sampling_rounds + 1):
            prompts = self._further(samples, step)
            if not prompts:
                break
            self._drawn += len(prompts)
            slots = mesh.gather(_slots(samples, loader)).tolist()
            places = torch.tensor([slot in prompts for slot in slots]).reshape(mesh.data_size, -1)
            rows = places[mesh.data_rank].nonzero().flatten().tolist()
            if not rows and not uniform:
                continue
            padding = int(places.sum(1).max()) - len(rows) if uniform else 0  # samples that are dropped
            positions = [samples.batch.sample_ids[row] % loader.samples for row in [*rows, *[0] * padding]]
            spare = next(iter(prompts.values()))
            indices = [prompts.get(position // loader.samples_per_prompt, spare) for position in positions]
            further = loader.batch_of(indices, [position + number * loader.samples for position in positions])
            samples = samples.replaced(rows, self._source.samples(further, step, rng))
        return samples

    def metrics(self) -> Metrics:
        return {"resampled_groups": float(self._drawn)} | super().metrics()

    def _further(self, samples: ScoredSamples, step: int) -> dict[int, int]:
        """Return further prompts by the slots of the groups of equal rewards that they replace."""
        mesh = self._loader.mesh
        scores = samples.scores.gathered(mesh)
        rewards, ids = samples.rewards(self._reward, scores, mesh), gather_ids(samples.batch, scores.parts, mesh)
        equal = equal_groups(self._config, rewards, scores.parts, ids)
        slots = mesh.gather(_slots(samples, self._loader).to(equal.device))
        empty = slots[equal].unique().tolist()
        return dict(zip(empty, self._loader.further(step, self._drawn, len(empty)), strict=False))


def _slots(samples: ScoredSamples, loader: Loader) -> Tensor:
    """The position among the step's groups of each sample, whatever prompt the group has by now."""
    return torch.tensor(samples.batch.sample_ids) % loader.samples // loader.samples_per_prompt
