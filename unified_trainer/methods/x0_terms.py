"""The terms of `distill_rl` that act on the x0 of one call: matching, discriminator, distance, reward gradient."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import torch
from torch import Tensor

from unified_trainer.methods.distill_rl_settings import DistillRLConfig
from unified_trainer.methods.distribution_matching import DistributionMatching, PartWeights
from unified_trainer.numerics.flow import x0_from_velocity
from unified_trainer.numerics.guidance_parts import advantage_weights
from unified_trainer.parallel.random import Streams
from unified_trainer.rl.rollouts import ScoredSamples
from unified_trainer.rl.updates import MinibatchLoss
from unified_trainer.roles.reward import Reward, RewardSum
from unified_trainer.roles.role import Trainable
from unified_trainer.sampling import SamplerConfig, policy_velocity, trainable_steps
from unified_trainer.types import Batch, Latents, PerSample


class X0Terms:
    """Replays a call of the rollout's samples and computes the terms of its x0."""

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

    def exit(self, rng: Streams) -> int:
        """Return the call whose x0 is matched, equal on all ranks."""
        if self.config.matching.exits == "last":
            return self.sampler.num_steps - 1
        calls = trainable_steps(self.student, self.sampler)
        return calls[int(rng.shared.integers(len(calls)))]

    def passes(
        self,
        samples: ScoredSamples,
        parts: tuple[Tensor, ...],
        match_weights: PerSample | None,
        advantages: PerSample,
        rng: Streams,
        weights: Mapping[str, float],
    ) -> list[Callable[[], MinibatchLoss]]:
        """Return the passes of an update: each call with a term, in parts of the samples, by row.

        `match_weights` are of the direction of each sample. Terms that are not among `weights` are left out.
        """
        exit_call, last = self.exit(rng), self.sampler.num_steps - 1
        matching, gan, distance, gradient = (
            weights.get(name, 0.0) for name in ("matching", "gan", "distance", "reward_gradient")
        )

        def one(call: int, rows: Tensor) -> MinibatchLoss:
            index, rollout = rows.tolist(), samples.rollout
            batch, value, metrics = samples.batch.take(index), torch.zeros(()), {}
            x_t, sigma = rollout.state(call, index), self.sigmas[call]
            velocity = policy_velocity(self.student, x_t, sigma, batch, self.sampler, rollout.end(index))
            x0 = x0_from_velocity(x_t, velocity, sigma)
            if (matching or gan) and call == exit_call:
                own = None if match_weights is None else match_weights[rows]
                parts_of = self._part_weights(advantages[rows])
                loss, gan_loss, level_weight, metrics = self.matching.student_terms(x0, batch, rng, None, own, parts_of)
                value = matching * (level_weight * loss)
                if gan_loss is not None:
                    value = value + gan * (level_weight * gan_loss)
            if distance and call == exit_call:
                loss = self._distance(x_t, sigma, velocity, batch)
                value, metrics = value + distance * loss.mean(), metrics | {"teacher_distance": loss.detach()}
            if gradient and call == last:
                loss, found = self._reward_loss(x0, batch)
                value, metrics = value + gradient * loss, metrics | found
            return MinibatchLoss(value / len(parts), metrics)

        calls = sorted(
            {call for call, weight in ((exit_call, matching or gan or distance), (last, gradient)) if weight}
        )
        return [partial(one, call, rows) for call in calls for rows in parts]

    def _part_weights(self, advantages: PerSample) -> PartWeights | None:
        """Return the weights of the two parts of the direction of these samples; None for the plain direction."""
        config = self.config.matching
        if not config.in_parts:
            return None
        scales = advantage_weights(advantages, config.advantage_scale)
        return PartWeights(config.conditional_weight, config.guidance_weight * scales)

    def _distance(self, x_t: Latents, sigma: Tensor, velocity: Latents, batch: Batch) -> PerSample:
        """Return the mean squared difference of the velocity to the guided teacher's, which has no gradient."""
        with torch.no_grad():
            level, scale = sigma.expand(len(batch)), self.config.matching.guidance_scale
            target = self.matching.teacher.guided_velocity(x_t, level, batch.cond, batch.uncond, scale)
        return (velocity - target).square().flatten(1).mean(1)

    def _reward_loss(self, x0: Latents, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return -R, or how far R is below the margin, averaged; the gradient passes the decoder and the scorers."""
        reward = cast(Reward, self.reward).score_with_gradient(x0, batch.prompts)
        margin = self.config.reward_gradient.margin
        losses = -reward if math.isinf(margin) else (margin - reward).relu()
        return losses.mean(), {"reward_gradient_loss": losses.detach()}
