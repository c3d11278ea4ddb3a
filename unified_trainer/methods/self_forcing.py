"""Self-forcing: a causal few-step student trained on what it generates itself, chunk by chunk (arXiv:2506.08009)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unified_trainer.methods.base import Loss
from unified_trainer.methods.distribution_matching import DistributionMatching, MatchingConfig
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.causal import CausalStudent
from unified_trainer.roles.critic import Critic
from unified_trainer.roles.experts import ExpertLayout
from unified_trainer.roles.role import Frozen
from unified_trainer.sampling import SamplerConfig, predict_chunks, trainable_steps
from unified_trainer.types import Batch, Latents


@dataclass(frozen=True)
class SelfForcingConfig(MatchingConfig):
    same_step_across_chunks: bool = True  # one exit step for all chunks of a rollout, instead of one for each
    last_step_only: bool = False  # every chunk exits at the sampler's last step
    gradient_frames: int = 21  # latent frames at the end whose chunks are trained; earlier ones are only looked back on

    @property
    def needs_clips(self) -> bool:
        return self.gan_weight > 0

    def check(self, sampler: SamplerConfig) -> None:
        super().check(sampler)
        if not sampler.chunks.causal:
            raise ValueError("sampler.chunks.chunk_frames must be at least 1: self_forcing trains a causal student")
        if self.gradient_frames < 1:
            raise ValueError(f"algorithm.gradient_frames must be at least 1, not {self.gradient_frames}")

    def check_experts(self, sampler: SamplerConfig, layouts: Mapping[str, ExpertLayout]) -> None:
        super().check_experts(sampler, layouts)
        if self.last_step_only:
            exits = sampler.sigmas()[-2:-1].tolist()
            layouts["student"].refuse_idle([exits], "the last step", "Set algorithm.last_step_only False")


class SelfForcing:
    """Generate as at inference, with a cache, and match the teacher's distribution over the whole clip."""

    trained_for_sampler: ClassVar[bool] = True

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
        self.matching = DistributionMatching(config, teacher, critic)

    def micro_batches(self, batch: Batch) -> list[Batch]:
        return batch.split(self.config.micro_batch)

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        student_moves, critic_moves = self.config.updates_at(step)
        shared = student_moves and self.config.critic_samples == "shared"
        if student_moves:
            x0 = self._generate(batch, rng, "student")
            yield self.matching.student_loss(x0, batch, rng, self._trained_frames(x0))
        if critic_moves:
            if not shared:
                with torch.no_grad():
                    x0 = self._generate(batch, rng, "critic")
            yield self.matching.critic_loss(x0.detach(), batch, rng)

    def _generate(self, batch: Batch, rng: Streams, turn: str) -> Latents:
        def draw(name: str | int) -> Latents:
            return rng.noise(f"{turn} {name}", batch.sample_ids, batch.latent_shape).to(self.student.device)

        frames = batch.latent_shape[1]
        first = frames - self.config.gradient_frames
        return predict_chunks(self.student, draw("noise"), batch, self.sampler, draw, self._exits(frames, rng), first)

    def _exits(self, frames: int, rng: Streams) -> list[int]:
        """At which call each chunk stops, the same on all ranks."""
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
