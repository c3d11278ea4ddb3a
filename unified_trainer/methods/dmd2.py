"""DMD2: a few-step student whose samples follow the teacher's distribution (arXiv:2405.14867)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from unified_trainer.methods.base import Loss
from unified_trainer.methods.distribution_matching import (
    DistributionMatching,
    MatchingConfig,
    distribution_matching_gradient,
    distribution_matching_loss,
)
from unified_trainer.numerics.flow import add_noise, x0_from_velocity
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.critic import Critic
from unified_trainer.roles.role import Frozen, Trainable
from unified_trainer.sampling import SamplerConfig, predict_at, trainable_steps
from unified_trainer.types import Batch, Latents

__all__ = ["DMD2", "DMD2Config", "distribution_matching_gradient", "distribution_matching_loss"]


@dataclass(frozen=True)
class DMD2Config(MatchingConfig):
    rollout: Literal["simulate", "data"] = "simulate"  # samples from noise by the sampler, or from noised clips

    @property
    def needs_clips(self) -> bool:
        return self.rollout == "data" or self.gan_weight > 0

    def check(self, sampler: SamplerConfig) -> None:
        super().check(sampler)
        if sampler.chunks.causal:
            raise ValueError("sampler.chunks.chunk_frames must be 0 for dmd2; self_forcing trains causal students")


class DMD2:
    """Sample with the student, push the samples along fake - real, and let the critic follow."""

    trained_for_sampler: ClassVar[bool] = True

    def __init__(
        self, config: DMD2Config, sampler: SamplerConfig, *, student: Trainable, teacher: Frozen, critic: Critic
    ) -> None:
        self.config, self.sampler, self.student = config, sampler, student
        self.matching = DistributionMatching(config, teacher, critic)

    def micro_batches(self, batch: Batch) -> list[Batch]:
        return batch.split(self.config.micro_batch)

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        student_moves, critic_moves = self.config.updates_at(step)
        shared = student_moves and self.config.critic_samples == "shared"
        if student_moves:
            x0 = self._sample(batch, rng, "student")
            yield self.matching.student_loss(x0, batch, rng)
        if critic_moves:
            if not shared:
                with torch.no_grad():
                    x0 = self._sample(batch, rng, "critic")
            yield self.matching.critic_loss(x0.detach(), batch, rng)

    def _sample(self, batch: Batch, rng: Streams, turn: str) -> Latents:
        """What the student makes of noise, at a step drawn for all ranks; or of noised clips, a step for each."""
        steps = self.sampler.num_steps

        def draw(name: str | int) -> Latents:
            return rng.noise(f"{turn} {name}", batch.sample_ids, batch.latent_shape).to(self.student.device)

        if self.config.rollout == "simulate":
            exits = trainable_steps(self.student, self.sampler)
            last = exits[int(rng.shared.integers(len(exits)))]
            return predict_at(self.student, draw("noise"), batch, self.sampler, draw, last)
        rows = (rng.uniform(f"{turn} step", batch.sample_ids) * steps).long()
        sigma = self.sampler.sigmas()[rows]
        x_t = add_noise(batch.latents, draw("noise"), sigma)
        return x0_from_velocity(x_t, self.student.velocity(x_t, sigma, batch.cond), sigma)
