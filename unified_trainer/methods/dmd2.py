"""DMD2: a few-step student whose samples follow the teacher's distribution (arXiv:2405.14867)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.types import Batch, Latents, of_kind
from unified_trainer.methods.base import Loss, MethodSetup
from unified_trainer.methods.distribution_matching import MatchingConfig, matching_losses, simulated
from unified_trainer.methods.score_directions import DirectedMethod
from unified_trainer.numerics.flow import add_noise, x0_from_velocity
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.causal import Causal, by_chunk
from unified_trainer.sampling.solver import trainable_steps


@dataclass(frozen=True)
class DMD2Config(MatchingConfig):
    rollout: Literal["simulate", "data"] = "simulate"
    """Student samples: from noise by the sampler (simulate), or one call on noised clips (data). A causal student has
    clips alone, whose chunks are noised apart (CausVid, arXiv:2412.07772)."""

    @property
    def needs_clips(self) -> bool:
        return self.rollout == "data" or self.gan_weight > 0

    def check(self, setup: MethodSetup) -> None:
        super().check(setup)
        if setup.sampler.chunks.causal and self.rollout == "simulate":
            raise UserError(
                "sampler.chunks.chunk_frames must be 0 for dmd2 with algorithm.rollout simulate: self_forcing trains a "
                "causal student on samples from noise, and algorithm.rollout data on clips"
            )


class DMD2(DirectedMethod):
    """Sample with the student, move the samples along fake - real, and train the critic on them."""

    config_class = DMD2Config

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        yield from matching_losses(self.config, self.matching, step, batch, rng, self._sample)

    def _sample(self, batch: Batch, rng: Streams, purpose: str) -> Latents:
        """Sample from noise up to a step drawn equal on all ranks, or from noised clips at steps of their own.

        A chunk of a causal student may also be at the level of finished chunks, as those after it will see it.
        """
        if self.config.rollout == "simulate":
            return simulated(self.student, self.sampler, batch, rng, purpose)
        levels = self.sampler.sigmas()[trainable_steps(self.student, self.sampler)]
        noise = rng.noise(f"{purpose} noise", batch.sample_ids, batch.latent_shape).to(self.student.device)
        chunks = self.sampler.chunks
        if chunks.causal:
            finished = levels.new_tensor([chunks.context_noise])
            if self.student.trains(finished[0]):
                levels = torch.cat([levels, finished])
            drawn = by_chunk(f"{purpose} step", batch, rng, chunks)
        else:
            drawn = rng.uniform(f"{purpose} step", batch.sample_ids)
        sigma = levels[(drawn * len(levels)).long()]
        x_t = add_noise(batch.latents, noise, sigma)
        if chunks.causal:
            velocity = of_kind(Causal, self.student).masked_velocity(x_t, sigma, batch.cond, chunks)
        else:
            velocity = self.student.velocity(x_t, sigma, batch.cond)
        return x0_from_velocity(x_t, velocity, sigma)
