"""Groups of samples: what they have in common, how they are compared, and who is learnt from."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unified_trainer.data.batch_plan import BatchPlan
from unified_trainer.data.loader import Loader
from unified_trainer.numerics.advantages import (
    Estimator,
    below_threshold,
    best_of_n,
    group_advantages,
    spread,
    zero_variance,
)
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.rl.minibatches import Minibatch, plan_minibatches
from unified_trainer.roles.reward import Reward, Scores
from unified_trainer.types import Batch, PerSample


@dataclass(frozen=True)
class GroupConfig:
    num_prompts: int = 8  # prompts per training step, over all ranks
    num_samples: int = 8  # samples of each prompt: the group an advantage is relative to
    prompts_per_update: int = 8  # prompts of one optimizer update; num_prompts / this updates per rollout
    rollout_batch: int = 32  # samples generated, decoded and scored at a time
    update_batch: int = 32  # samples per backward pass
    init_same_noise: bool = False  # one initial noise per prompt and step instead of one per sample
    advantage: Estimator = "grpo"  # estimator of a group
    advantage_clip: float = 5.0  # largest absolute advantage
    reward_threshold: float = float("-inf")  # a group whose mean reward is below it teaches nothing
    best_of_n: int = 0  # samples of each group learnt from, half the best and half the worst; 0 is all
    dynamic_sampling_rounds: int = 0  # times at most that further prompts are drawn in place of groups of equal rewards
    failure_below: float | None = None  # a group with a lower mean reward is a failure of its prompt; prompts are then
    # drawn in proportion to failures + 1. None draws every prompt once an epoch

    @property
    def needs_clips(self) -> bool:
        return False

    def check_groups(self) -> None:
        """Raise ValueError, naming the key, for what cannot be."""
        if self.num_samples < 2:
            raise ValueError("algorithm.num_samples must be at least 2: a group of one has no advantage")
        if self.rollout_batch < 1:
            raise ValueError(f"algorithm.rollout_batch must be at least 1, not {self.rollout_batch}")
        if self.dynamic_sampling_rounds < 0:
            raise ValueError(
                f"algorithm.dynamic_sampling_rounds must not be negative, but is {self.dynamic_sampling_rounds}"
            )
        if self.advantage_clip <= 0:
            raise ValueError(f"algorithm.advantage_clip must be above 0, not {self.advantage_clip}")
        if self.best_of_n and not (2 <= self.best_of_n <= self.num_samples and self.best_of_n % 2 == 0):
            raise ValueError(
                f"algorithm.best_of_n must be even and at most algorithm.num_samples, not {self.best_of_n}"
            )

    def plan(self) -> BatchPlan:
        names = ("num_prompts", "num_samples", "prompts_per_update", "update_batch")
        keys = tuple(f"algorithm.{name}" for name in names)
        sizes = (self.num_prompts, self.num_samples, self.prompts_per_update, self.update_batch)
        return BatchPlan(*sizes, keys, by_failures=self.failure_below is not None)


@dataclass(frozen=True)
class Advantages:
    """What the rewards of a training step lead to."""

    advantages: PerSample  # of this rank's samples
    minibatches: list[list[Minibatch]]  # of each update; none for one that nothing is left of
    metrics: dict[str, float]
    words: tuple[str, ...]  # of updates that are skipped, if any is


def compute_advantages(
    config: GroupConfig,
    reward: Reward,
    scores: Scores,
    penalty: PerSample | None,
    batch: Batch,
    loader: Loader,
    mesh: Mesh,
) -> Advantages:
    """Advantages within the groups of all ranks, who is learnt from in each update, and what the rewards were.

    Compared are the rewards less the penalty; thresholds, failures and metrics are of the rewards themselves.
    """
    everyone = scores.gathered(mesh)
    ids, all_rewards = gather_ids(batch, everyone.parts, mesh), reward.total(everyone.parts)
    below = below_threshold(all_rewards, ids, config.reward_threshold)
    if penalty is not None:
        penalised = all_rewards - mesh.gather(penalty.double())
        advantages, equal = group_advantages(penalised, ids, config.advantage), zero_variance(penalised, ids)
    else:
        equal = equal_groups(config, reward, everyone.parts, ids)
        if config.advantage == "gdpo":  # each part against its group, before they are weighted
            weights = list(reward.weights.values())
            advantages = group_advantages(everyone.parts, ids, "gdpo", weights=weights)
        else:
            advantages = group_advantages(all_rewards, ids, config.advantage)
    advantages[below | equal] = 0.0
    useful = ~equal
    if config.best_of_n:
        useful &= best_of_n(advantages, ids, config.best_of_n)
    updates = config.num_prompts // config.prompts_per_update
    minibatches = plan_minibatches(useful, advantages, mesh.data_rank, mesh.data_size, updates, config.update_batch)
    in_groups, between_groups = spread(all_rewards, ids)
    failed: list[int] = []
    if config.failure_below is not None:
        failed = ids[below_threshold(all_rewards, ids, config.failure_below)].unique().tolist()
        loader.note_failures(failed)
    metrics = {
        "reward": all_rewards.mean().item(),
        "reward_std": all_rewards.std().item(),
        "reward_std_in_groups": in_groups,
        "reward_std_between_groups": between_groups,
        "frac_zero_advantage": (advantages == 0).double().mean().item(),
        "frac_zero_std_groups": len(ids[below | equal].unique()) / len(ids.unique()),
        "skipped_updates": float(sum(not parts for parts in minibatches)),
    }
    if config.failure_below is not None:
        metrics["failed_groups"] = len(failed) / len(ids.unique())
    skipped, count = int(metrics["skipped_updates"]), len(ids.unique())
    equals, lows = len(ids[equal].unique()), len(ids[below & ~equal].unique())
    words = (
        f"{skipped} of {updates} updates skipped, nothing to learn is left in them: of {count} groups "
        f"{equals} have equal rewards, {lows} are below algorithm.reward_threshold"
    )
    metrics |= reward.metrics(everyone, ids)
    start = mesh.data_rank * len(batch)
    mine = advantages[start : start + len(batch)].clamp(-config.advantage_clip, config.advantage_clip)
    return Advantages(mine.float(), minibatches, metrics, (words,) if skipped else ())


def equal_groups(
    config: GroupConfig, reward: Reward, parts: Float[Tensor, "all r"], ids: Int[Tensor, " all"]
) -> Bool[Tensor, " all"]:
    """Samples of groups with nothing to say: of equal rewards, or where each part is compared, of equal parts."""
    if config.advantage == "gdpo":
        return torch.stack([zero_variance(part, ids) for part in parts.unbind(1)]).all(0)
    return zero_variance(reward.total(parts), ids)


def gather_ids(batch: Batch, like: Tensor, mesh: Mesh) -> Int[Tensor, " all"]:
    """The prompt ids of all ranks' samples, rank by rank."""
    return mesh.gather(torch.tensor(batch.prompt_ids, device=like.device))
