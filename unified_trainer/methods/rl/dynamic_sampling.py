"""Dynamic sampling: groups of equal rewards are replaced by groups of further prompts (DAPO, arXiv:2503.14476)."""

import torch
from torch import Tensor

from unified_trainer.basics.types import Batch
from unified_trainer.data.loader import Loader
from unified_trainer.methods.rl.groups import GroupConfig, equal_groups, gather_ids
from unified_trainer.methods.rl.rollouts import Check, Rollouts, ScoredSamples
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.rewards.reward import RewardSum


def collect_samples(
    config: GroupConfig,
    rollouts: Rollouts,
    reward: RewardSum,
    loader: Loader,
    batch: Batch,
    step: int,
    rng: Streams,
    mesh: Mesh,
    check: Check | None = None,
) -> tuple[ScoredSamples, dict[str, float]]:
    """Return the samples of a batch and their metrics, with groups of equal rewards replaced.

    Groups are replaced until none is left, or for `dynamic_sampling_rounds` rounds. A new group takes the place of an
    old one on the same ranks. Where rollouts must be uniform, all ranks make as many samples as the rank that must
    replace most, and a rank that replaces fewer drops the rest.
    """
    samples, drawn = rollouts.samples(batch, step, rng, check), 0
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
        if not rows and not rollouts.uniform:
            continue
        padding = int(places.sum(1).max()) - len(rows) if rollouts.uniform else 0  # samples that are dropped
        positions = [samples.batch.sample_ids[row] % loader.samples for row in [*rows, *[0] * padding]]
        spare = next(iter(prompts.values()))
        indices = [prompts.get(position // loader.samples_per_prompt, spare) for position in positions]
        further = loader.batch_of(indices, [position + number * loader.samples for position in positions])
        samples = samples.replaced(rows, rollouts.samples(further, step, rng))
    resampled = {"resampled_groups": float(drawn)} if config.dynamic_sampling_rounds else {}
    return samples, resampled | lag_metrics(samples, step, mesh) | rollouts.metrics()


def lag_metrics(samples: ScoredSamples, step: int, mesh: Mesh) -> dict[str, float]:
    """Return by how many training steps the weights that samples began with are older than the present ones, if so."""
    lag = (step - mesh.all_gather_cpu(samples.versions)).double()
    return {"lag": float(lag.mean()), "lag_max": float(lag.max())} if bool(lag.any()) else {}


def _slots(samples: ScoredSamples, loader: Loader) -> Tensor:
    """The position among the step's groups of each sample, whatever prompt the group has by now."""
    return torch.tensor(samples.batch.sample_ids) % loader.samples // loader.samples_per_prompt
