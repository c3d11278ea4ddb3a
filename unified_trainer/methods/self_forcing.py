"""Self-forcing: a causal few-step student trained on its own chunk-by-chunk rollouts (arXiv:2506.08009)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Frames
from unified_trainer.basics.types import Batch, Latents
from unified_trainer.methods.base import Loss, Method, MethodSetup, frozen, trained
from unified_trainer.methods.distribution_matching import MatchingConfig, matching_losses
from unified_trainer.methods.score_directions import matching_of
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.causal import CausalStudent
from unified_trainer.roles.critic import Critic
from unified_trainer.roles.role import Frozen
from unified_trainer.sampling.solver import SamplerConfig, predict_chunks, trainable_steps


@dataclass(frozen=True)
class SelfForcingConfig(MatchingConfig):
    same_step_across_chunks: bool = True
    """Draw one exit step for all chunks of a rollout instead of one for each."""
    last_step_only: bool = False
    """Every chunk exits at the sampler's last step."""
    gradient_frames: Frames = 21
    """Latent frames at the end whose chunks are trained; earlier chunks are context only."""

    @property
    def needs_clips(self) -> bool:
        return self.gan_weight > 0

    def check(self, setup: MethodSetup) -> None:
        super().check(setup)
        if not setup.sampler.chunks.causal:
            raise UserError("sampler.chunks.chunk_frames must be at least 1: self_forcing trains a causal student")
        least = setup.sampler.chunks.chunk_frames
        if self.gradient_frames < least:
            raise UserError(
                f"algorithm.gradient_frames must be at least sampler.chunks.chunk_frames ({least}), so that a chunk is "
                f"trained, not {self.gradient_frames}"
            )
        if self.last_step_only:
            setup.require_trained("student", [setup.sampler.sigmas()[-2:-1].tolist()], "algorithm.last_step_only")


class SelfForcing(Method):
    """Generate as at inference, with a KV cache, and match the teacher's distribution over the whole clip."""

    config_class = SelfForcingConfig
    roles = {"student": trained(), "teacher": frozen(), "critic": trained(Critic, starts_from="teacher")}
    trained_for_sampler = True

    def __init__(
        self,
        config: SelfForcingConfig,
        sampler: SamplerConfig,
        *,
        student: CausalStudent,
        teacher: Frozen,
        critic: Critic,
    ) -> None:
        self.config, self.sampler, self.student = config, sampler, student
        self.matching = matching_of(config, teacher, critic)

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        yield from matching_losses(self.config, self.matching, step, batch, rng, self._generate, self._trained_frames)

    def _generate(self, batch: Batch, rng: Streams, purpose: str) -> Latents:
        def draw(name: str | int) -> Latents:
            return rng.noise(f"{purpose} {name}", batch.sample_ids, batch.latent_shape).to(self.student.device)

        frames = batch.latent_shape[1]
        first = frames - self.config.gradient_frames
        return predict_chunks(self.student, draw("noise"), batch, self.sampler, draw, self._exits(frames, rng), first)

    def _exits(self, frames: int, rng: Streams) -> list[int]:
        """The sampling step at which each chunk stops, equal on all ranks."""
        count, calls = len(self.sampler.chunks.ranges(frames)), trainable_steps(self.student, self.sampler)
        if self.config.last_step_only:
            return [self.sampler.num_steps - 1] * count
        if self.config.same_step_across_chunks:
            return [calls[int(rng.shared.integers(len(calls)))]] * count
        return [calls[i] for i in rng.shared.integers(len(calls), size=count)]

    def _trained_frames(self, x0: Latents) -> Tensor | None:
        """The frames whose chunks have gradient, or None for all."""
        frames = x0.shape[2]
        first = frames - self.config.gradient_frames
        if first <= 0:
            return None
        trained = [start >= first for start, stop in self.sampler.chunks.ranges(frames) for _ in range(start, stop)]
        return torch.tensor(trained, device=x0.device)[:, None, None]
