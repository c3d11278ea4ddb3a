"""Groups of samples of one prompt: their settings, their advantages, and the samples that updates train on."""

import math
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import CountOrZero, Finite, PeriodOrZero, Range
from unified_trainer.basics.types import Batch, PerSample
from unified_trainer.data.batch_plan import BatchPlan, largest_divisor
from unified_trainer.data.loader import Loader
from unified_trainer.methods.base import MethodSetup, Metrics
from unified_trainer.methods.rl.minibatches import Minibatch, plan_minibatches
from unified_trainer.methods.rl.rollout_config import RolloutConfig
from unified_trainer.methods.rl.rollouts import STORED, ScoredSamples
from unified_trainer.methods.rl.scored_groups import ScoredGroups
from unified_trainer.numerics.advantages import (
    Estimator,
    below_threshold,
    best_of_n,
    group_advantages,
    spread,
    zero_variance,
)
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.rewards.reward import RewardSum


@dataclass(frozen=True)
class GroupConfig(RolloutConfig):
    """Settings of the methods that compare the samples of a prompt by reward."""

    advantage: Estimator = "grpo"
    """Advantage estimator; grpo is measured in docs/methods/dance_grpo.md, the others are experimental."""
    reward_threshold: Annotated[float, Range(also=(-math.inf,))] = -math.inf
    """Groups whose mean reward is below this get advantage 0 (experimental)."""
    best_of_n: CountOrZero = 0
    """Train on this many samples of each group, half the best and half the worst; 0 trains on all (experimental)."""
    dynamic_sampling_rounds: CountOrZero = 0
    """Rounds at most in which groups of equal rewards are replaced by further prompts (experimental)."""
    failure_below: Finite | None = None
    """A group with a lower mean reward is a failure of its prompt, and prompts are drawn in proportion to failures + 1;
    None draws every prompt once an epoch (experimental)."""
    failure_half_life: PeriodOrZero = 0
    """Training steps in which the count of a failure falls by half; 0 never forgets one (experimental)."""

    def check(self, setup: MethodSetup) -> None:
        super().check(setup)
        if self.num_samples < 2:
            raise UserError("algorithm.num_samples must be at least 2: a group of one has no advantage")
        if self.best_of_n and not (2 <= self.best_of_n <= self.num_samples and self.best_of_n % 2 == 0):
            raise UserError(f"algorithm.best_of_n must be even and at most algorithm.num_samples, not {self.best_of_n}")
        if self.failure_half_life and self.failure_below is None:
            raise UserError("algorithm.failure_half_life needs algorithm.failure_below: nothing counts failures")

    def plan(self) -> BatchPlan:
        by_failures, further = self.failure_below is not None, self.dynamic_sampling_rounds > 0
        kept = 0.5 ** (1 / self.failure_half_life) if self.failure_half_life else 1.0
        return replace(super().plan(), by_failures=by_failures, failures_kept=kept, further=further)


@dataclass(frozen=True)
class Advantages:
    """The advantages of a training step's samples, and the minibatches of its updates."""

    values: PerSample  # of this rank's samples
    minibatches: list[list[Minibatch]]  # of each update; empty for an update without any advantage
    messages: tuple[str, ...]  # names samples that are left out and skipped updates, if any
    groups: ScoredGroups

    @classmethod
    def none(cls, scored: ScoredGroups, own: int, updates: int) -> "Advantages":
        """Return those of a step without a group whose samples are all scored: no update trains."""
        return cls(torch.zeros(own), [[]] * updates, scored.messages, scored)


class Groups:
    """The groups of a training step's samples, each of one prompt, over all ranks."""

    def __init__(self, config: GroupConfig, reward: RewardSum, loader: Loader) -> None:
        self._config, self._reward, self._loader, self._mesh = config, reward, loader, loader.mesh

    def advantages(self, samples: ScoredSamples, penalty: PerSample | None, metrics: Metrics) -> Advantages:
        """Compute advantages within the groups, plan each update's minibatches, and note rewards and groups.

        Advantages compare the rewards minus the penalty; thresholds, failures and metrics use the rewards themselves.
        """
        config, mesh = self._config, self._mesh
        scored = ScoredGroups.of(samples, samples.batch.prompt_ids, self._reward, mesh, metrics)
        updates, own = config.num_prompts // config.prompts_per_update, len(samples.batch)
        ids, rewards = scored.ids, scored.rewards
        if not len(ids):  # the only group of the step
            return Advantages.none(scored, own, updates)
        advantages, equal = self._compare(scored, penalty)
        below = below_threshold(rewards, ids, config.reward_threshold)
        useful = ~equal | (config.advantage == "global")  # equal rewards still differ from those of other prompts
        advantages[below | ~useful] = 0.0
        if config.best_of_n:
            useful &= best_of_n(advantages, ids, config.best_of_n)
        size = largest_divisor(own // updates, config.update_batch)
        all_useful, all_advantages = scored.everywhere(useful), scored.everywhere(advantages)
        minibatches = plan_minibatches(all_useful, all_advantages, mesh.data_rank, mesh.data_size, updates, size)
        metrics |= reward_metrics(rewards, ids)
        metrics["frac_zero_advantage"] = (advantages == 0).double().mean().item()
        message = self._note_groups(rewards, ids, equal, below, minibatches, metrics)
        metrics |= self._reward.metrics(scored.scores, ids)
        mine = all_advantages[mesh.data_rank * own :][:own].clamp(-config.advantage_clip, config.advantage_clip)
        return Advantages(mine.float(), minibatches, (*scored.messages, *message), scored)

    def _compare(self, scored: ScoredGroups, penalty: PerSample | None) -> tuple[PerSample, Bool[Tensor, " all"]]:
        """Return the advantages of the samples, and which are of groups of equal rewards."""
        config, parts, rewards, ids = self._config, scored.scores.parts, scored.rewards, scored.ids
        if penalty is not None:
            rewards = rewards - self._mesh.gather(penalty).cpu().double()[scored.rows]
            return group_advantages(rewards, ids, config.advantage), zero_variance(rewards, ids)
        equal = equal_groups(config, rewards, parts, ids)
        if config.advantage == "gdpo":  # compares each part in its group, before the parts are weighted
            weights = list(self._reward.weights.values())
            return group_advantages(parts, ids, "gdpo", weights=weights), equal
        return group_advantages(rewards, ids, config.advantage), equal

    def _note_groups(
        self,
        rewards: PerSample,
        ids: Int[Tensor, " all"],
        equal: Bool[Tensor, " all"],
        below: Bool[Tensor, " all"],
        minibatches: list[list[Minibatch]],
        metrics: Metrics,
    ) -> tuple[str, ...]:
        """Note how many groups and updates teach nothing, and failures; return a message about skipped updates."""
        config = self._config
        groups, equals, lows = (len(ids[rows].unique()) for rows in (slice(None), equal, below & ~equal))
        skipped = sum(not parts for parts in minibatches)
        metrics |= {"frac_zero_std_groups": equals / groups, "skipped_updates": float(skipped)}
        if config.reward_threshold > float("-inf"):
            metrics["frac_below_threshold_groups"] = lows / groups
        if config.failure_below is not None:
            failed = ids[below_threshold(rewards, ids, config.failure_below)].unique().tolist()
            self._loader.note_failures(row for row in failed if row < STORED)  # stored groups were counted when made
            metrics["failed_groups"] = len(failed) / groups
        if not skipped:
            return ()
        return (
            f"{skipped} of {len(minibatches)} updates skipped because no sample has an advantage: of {groups} groups "
            f"{equals} have equal rewards, {lows} are below algorithm.reward_threshold",
        )


def reward_metrics(rewards: PerSample, ids: Int[Tensor, " all"]) -> Metrics:
    """Return mean and standard deviations of all samples' rewards; those in and between groups where groups exist."""
    metrics = {"reward": rewards.mean().item(), "reward_std": rewards.std().item()}
    in_groups, between_groups = spread(rewards, ids)
    if in_groups is not None:
        metrics |= {"reward_std_in_groups": in_groups, "reward_std_between_groups": between_groups}
    return metrics


def equal_groups(
    config: GroupConfig, rewards: PerSample, parts: Float[Tensor, "all r"], ids: Int[Tensor, " all"]
) -> Bool[Tensor, " all"]:
    """Return the samples of groups of equal rewards; for gdpo, of groups whose parts are all equal."""
    if config.advantage == "gdpo":
        return torch.stack([zero_variance(part, ids) for part in parts.unbind(1)]).all(0)
    return zero_variance(rewards, ids)


def gather_ids(batch: Batch, like: Tensor, mesh: Mesh) -> Int[Tensor, " all"]:
    """Return the prompt ids of all ranks' samples, rank by rank."""
    return mesh.gather(torch.tensor(batch.prompt_ids, device=like.device))
