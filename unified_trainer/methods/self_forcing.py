"""Self-forcing: a causal few-step student trained on its own chunk-by-chunk rollouts (arXiv:2506.08009)."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from unified_trainer.basics.types import Batch, Latents
from unified_trainer.methods.base import Loss
from unified_trainer.methods.chunk_matching import ChunkMatchingConfig, trained_frames
from unified_trainer.methods.distribution_matching import matching_losses
from unified_trainer.methods.score_directions import DirectedMethod
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.causal import CausalStudent
from unified_trainer.sampling.solver import predict_chunks


@dataclass(frozen=True)
class SelfForcingConfig(ChunkMatchingConfig):
    @property
    def needs_clips(self) -> bool:
        return self.gan_weight > 0


class SelfForcing(DirectedMethod):
    """Generate as at inference, with a KV cache, and match the teacher's distribution over the whole clip."""

    config_class = SelfForcingConfig
    student: CausalStudent

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        yield from matching_losses(self.config, self.matching, step, batch, rng, self._generate, self._trained_frames)

    def _generate(self, batch: Batch, rng: Streams, purpose: str) -> Latents:
        def draw(name: str | int) -> Latents:
            return rng.noise(f"{purpose} {name}", batch.sample_ids, batch.latent_shape).to(self.student.device)

        frames = batch.latent_shape[1]
        first = frames - self.config.gradient_frames
        exits = self.config.exits(self.student, self.sampler, frames, rng)
        return predict_chunks(self.student, draw("noise"), batch, self.sampler, draw, exits, first)

    def _trained_frames(self, x0: Latents) -> Tensor | None:
        """The frames whose chunks have gradient, or None for all."""
        frames = x0.shape[2]
        return trained_frames(self.sampler.chunks, frames, frames - self.config.gradient_frames, x0.device)
