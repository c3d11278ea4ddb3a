"""The terms of `distill_rl` that act on the x0 of the last call: matching, discriminator, reward gradient."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import torch
from torch import Tensor

from unified_trainer.basics.types import Batch, Latents
from unified_trainer.methods.distill_rl_settings import DistillRLConfig
from unified_trainer.methods.distribution_matching import DistributionMatching
from unified_trainer.methods.rl.rollouts import ScoredSamples
from unified_trainer.methods.rl.updates import MinibatchLoss
from unified_trainer.numerics.flow import x0_from_velocity
from unified_trainer.parallel.random import Streams
from unified_trainer.rewards.reward import Reward, RewardSum
from unified_trainer.roles.role import Trainable
from unified_trainer.sampling.solver import SamplerConfig, policy_velocity


class X0Terms:
    """Replays the last call of the rollout's samples and computes the terms of its x0."""

    def __init__(
        self,
        config: DistillRLConfig,
        sampler: SamplerConfig,
        student: Trainable,
        matching: DistributionMatching,
        reward: RewardSum,
    ) -> None:
        self.config, self.sampler, self.student = config, sampler, student
        self.matching, self.reward = matching, reward
        self.sigmas = config.policy(sampler).sigmas

    def passes(
        self, samples: ScoredSamples, parts: tuple[Tensor, ...], rng: Streams, weights: Mapping[str, float]
    ) -> list[Callable[[], MinibatchLoss]]:
        """Return the passes of an update, in parts of the samples, by row; none where no term has a weight."""
        matching, gan, gradient = (weights[name] for name in ("matching", "gan", "reward_gradient"))
        last = self.sampler.num_steps - 1

        def loss_of(rows: Tensor) -> MinibatchLoss:
            index, rollout = rows.tolist(), samples.rollout
            batch, value, metrics = samples.batch.take(index), torch.zeros(()), {}
            x_t, sigma = rollout.state(last, index), self.sigmas[last]
            velocity = policy_velocity(self.student, x_t, sigma, batch, self.sampler, rollout.end(index))
            x0 = x0_from_velocity(x_t, velocity, sigma)
            if matching or gan:
                loss, gan_loss, level_weight, metrics = self.matching.student_terms(x0, batch, rng)
                value = matching * (level_weight * loss)
                if gan_loss is not None:
                    value = value + gan * (level_weight * gan_loss)
            if gradient:
                loss, reward_metrics = self._reward_loss(x0, batch)
                value, metrics = value + gradient * loss, metrics | reward_metrics
            return MinibatchLoss(value / len(parts), metrics)

        return [partial(loss_of, rows) for rows in parts] if matching or gan or gradient else []

    def _reward_loss(self, x0: Latents, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return -R, or how far R is below the margin, averaged; the gradient passes the decoder and the scorers."""
        when = f"update {self.student.updates + 1}"
        reward = cast(Reward, self.reward).score_with_gradient(x0, batch.prompts, when)
        margin = self.config.reward_gradient.margin
        losses = -reward if math.isinf(margin) else (margin - reward).relu()
        return losses.mean(), {"reward_gradient_loss": losses.detach()}
