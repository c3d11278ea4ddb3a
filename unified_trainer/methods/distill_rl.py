"""Distillation and reward in one run: one rollout teaches the critic and moves the student by teacher and reward.

The joint objective is max E[R] - beta KL(p || p_teacher), whose law is p_teacher exp(R / beta) / Z. Neighbors: DMDR,
arXiv:2511.13649; Reward Forcing, arXiv:2512.04678; RTDMD, arXiv:2605.26108.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.types import Batch, PerSample
from unified_trainer.data.batch_plan import largest_divisor
from unified_trainer.methods.base import Loss, Metrics, frozen, initial_copy, trained
from unified_trainer.methods.distill_rl_settings import DistillRLConfig
from unified_trainer.methods.distribution_matching import DistributionMatching, MatchingMethod
from unified_trainer.methods.rl.dynamic_sampling import with_replacement
from unified_trainer.methods.rl.groups import Groups
from unified_trainer.methods.rl.minibatches import Minibatch
from unified_trainer.methods.rl.rollout_method import PolicyMethod
from unified_trainer.methods.rl.rollouts import ScoredSamples
from unified_trainer.methods.rl.scored_groups import ScoredGroups
from unified_trainer.methods.rl.updates import LossAt, MinibatchLoss
from unified_trainer.methods.x0_terms import X0Terms
from unified_trainer.numerics.advantages import capped_share, tilt_weights
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.rewards.reward import Reward
from unified_trainer.roles.critic import Critic
from unified_trainer.sampling.solver import SamplerConfig


class DistillRL(PolicyMethod, MatchingMethod):
    """Roll out and score; teach the critic the samples, then move the student along the sum of the terms."""

    config_class = DistillRLConfig
    roles = {
        "student": trained(),
        "teacher": frozen(),
        "critic": trained(Critic, starts_from="teacher"),
        "reference": initial_copy("student", when=lambda config: config.kl_coefficient > 0),
    }

    def __init__(self, config: DistillRLConfig, sampler: SamplerConfig, **parts: Any) -> None:
        super().__init__(config, sampler, **parts)
        if config.reward_gradient.weight and not isinstance(self.reward, Reward):
            raise UserError(
                "algorithm.reward_gradient needs the scorers in the training processes: set rollouts.workers 0, or "
                "algorithm.reward_gradient.weight 0"
            )
        self.matching = DistributionMatching(
            config.matching,
            self.teacher,
            self.critic,
            gan_weight=config.gan.weight,
            gan_critic_weight=config.gan.critic_weight,
        )
        self.x0_terms = X0Terms(config, sampler, self.student, self.matching, self.reward)
        self.groups = Groups(config, self.reward, self.loader)
        self.rollouts = with_replacement(self.rollouts, config, self.reward, self.loader)

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        config, metrics = self.config, Metrics()
        window, trained = self.update.transitions(step, rng, metrics)
        samples = self.roll_out(batch, step, rng, mesh, metrics)
        trajectories = self.update.trajectories(samples, step, window, rng)
        penalty = self.update.kl.penalty(trajectories, mesh, metrics)
        advantages = self.groups.advantages(samples, penalty, metrics)
        scored = advantages.groups
        critic_weights = self._critic_weights(scored, config.tilt.beta_at(step), mesh, metrics)

        updates, weights = advantages.minibatches, config.weights_at(step)
        values = advantages.values[:, None].expand(-1, len(trained))
        start_update = self.update.begin(trajectories, values, trained, updates, mesh)
        rows_of = torch.arange(len(samples.batch)).chunk(len(updates))
        moved = False  # whether the student has changed since the rollout
        for minibatches, rows in zip(updates, rows_of, strict=True):
            parts = rows.split(largest_divisor(len(rows), config.update_batch))
            if config.trains_critic:
                yield from self._critic_losses(samples, parts, critic_weights, rng)
            passes = self._surrogate_passes(minibatches, trained, start_update, moved, weights["surrogate"])
            passes += self.x0_terms.passes(samples, parts, rng, weights)
            for loss_of in passes:
                loss, last = loss_of(), loss_of is passes[-1]
                yield Loss("student", loss.value, last, metrics | loss.metrics, (*scored.messages, *loss.messages))
            moved = moved or bool(passes)
            if not passes:
                yield Loss("student", torch.zeros((), requires_grad=True), False, metrics, advantages.messages)

    def _critic_weights(self, groups: ScoredGroups, beta: float, mesh: Mesh, metrics: Metrics) -> PerSample | None:
        """Return exp(-reward / beta) of this rank's samples, centered and normalised; None without beta."""
        if not (beta and len(groups.ids)):
            return None
        rewards, ids, largest = groups.rewards, groups.ids, self.config.tilt.max_weight
        weights = groups.everywhere(tilt_weights(rewards, ids, -beta, largest))
        metrics["tilt_capped"] = capped_share(rewards, ids, -beta, largest)
        mean_of_all = len(weights) / len(ids)  # the loss is a mean over all samples
        return (weights * mean_of_all).chunk(mesh.data_size)[mesh.data_rank].float()

    def _critic_losses(
        self, samples: ScoredSamples, parts: tuple[Tensor, ...], weights: PerSample | None, rng: Streams
    ) -> Iterator[Loss]:
        """Flow matching on the rollout's x0, before the student moves, weighted by exp(-R / beta)."""
        for number in range(self.config.critic_updates):
            for part in parts:
                rows, own = part.tolist(), None if weights is None else weights[part]
                batch, x0 = samples.batch.take(rows), samples.rollout.end(rows)
                loss = self.matching.critic_loss(x0, batch, rng.numbered(number), own)
                ess = {} if own is None else {"tilt_ess": own.mean() ** 2 / own.square().mean()}
                yield Loss("critic", loss.value / len(parts), part is parts[-1], loss.metrics | ess)

    def _surrogate_passes(
        self,
        minibatches: list[Minibatch],
        transitions: list[int],
        start_update: Callable[[list[Minibatch]], LossAt],
        moved: bool,
        weight: float,
    ) -> list[Callable[[], MinibatchLoss]]:
        """The surrogate of each trained transition, on the samples that have an advantage."""
        if not (minibatches and weight):
            return []
        if moved:  # an update by the other terms alone came before: the replay differs from the rollout
            self.update.on_policy.over = True
        loss_at = start_update(minibatches)

        def loss_of(s: int, minibatch: Minibatch) -> MinibatchLoss:
            last = s == transitions[-1] and minibatch is minibatches[-1]
            loss = loss_at(minibatch, s, last)
            return MinibatchLoss(weight * (loss.value / len(transitions)), loss.metrics, loss.messages)

        return [partial(loss_of, s, minibatch) for s in transitions for minibatch in minibatches]
