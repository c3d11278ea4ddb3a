"""Dynamic sampling: groups of equal rewards are replaced by groups of further prompts (DAPO, arXiv:2503.14476)."""

from collections.abc import Callable

import torch
from torch import Tensor

from unified_trainer.data.loader import Loader
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.rl.groups import GroupConfig, equal_groups, gather_ids
from unified_trainer.rl.samples import ScoredSamples
from unified_trainer.roles.reward import Reward
from unified_trainer.types import Batch


def resample_groups(
    samples: ScoredSamples,
    config: GroupConfig,
    collect: Callable[[Batch], ScoredSamples],
    reward: Reward,
    loader: Loader,
    step: int,
    mesh: Mesh,
) -> tuple[ScoredSamples, dict[str, float]]:
    """Replace groups of equal rewards until none is left, or for `dynamic_sampling_rounds` rounds.

    A new group takes the place of an old one on the same ranks. All ranks make as many samples as the rank that must
    replace most; a rank that replaces fewer drops the rest.
    """
    drawn = 0
    for number in range(1, config.dynamic_sampling_rounds + 1):
        parts = samples.scores.gathered(mesh).parts
        equal = equal_groups(config, reward, parts, gather_ids(samples.batch, parts, mesh))
        slots = mesh.gather(_slots(samples, loader).to(equal.device))
        empty = slots[equal].unique().tolist()
        prompts = dict(zip(empty, loader.further(step, drawn, len(empty)), strict=False))
        if not prompts:
            break
        drawn += len(prompts)
        places = torch.tensor([slot in prompts for slot in slots.tolist()]).reshape(mesh.data_size, -1)
        rows = places[mesh.data_rank].nonzero().flatten().tolist()
        padding = [0] * (int(places.sum(1).max()) - len(rows))  # sampled because other ranks sample, then dropped
        positions = [samples.batch.sample_ids[row] % loader.samples for row in [*rows, *padding]]
        spare = next(iter(prompts.values()))
        indices = [prompts.get(position // loader.samples_per_prompt, spare) for position in positions]
        batch = loader.batch_of(indices, [position + number * loader.samples for position in positions])
        samples = samples.replaced(rows, collect(batch))
    return samples, {"resampled_groups": float(drawn)} if config.dynamic_sampling_rounds else {}


def _slots(samples: ScoredSamples, loader: Loader) -> Tensor:
    """The position among the step's groups of each sample, whatever prompt the group has by now."""
    return torch.tensor(samples.batch.sample_ids) % loader.samples // loader.samples_per_prompt
