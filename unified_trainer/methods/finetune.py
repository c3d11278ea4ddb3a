"""Flow matching on clips: the student learns the velocity of real data (arXiv:2210.02747)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from unified_trainer.data.batch_plan import BatchPlan
from unified_trainer.methods.base import Loss
from unified_trainer.numerics.flow import add_noise, high_share, shift_sigma
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.experts import Balance, ExpertLayout, check_balance, check_guidance, one_side
from unified_trainer.roles.role import Trainable
from unified_trainer.sampling import SamplerConfig
from unified_trainer.types import Batch, PerFrame, PerSample

Forcing = Literal["none", "diffusion", "teacher"]  # diffusion forcing: arXiv:2407.01392


@dataclass(frozen=True)
class FinetuneConfig:
    batch_size: int = 32  # clips per update, over all ranks
    micro_batch: int = 32  # clips per backward pass
    shift: float = 3.0  # of the uniform noise levels towards noise; 1 is none
    forcing: Forcing = "none"  # what the chunks of a causal student look back on: noisy (diffusion) or clean ones
    expert_balance: Balance = "mixed"  # noise levels with two experts: of both in every batch, or of one of them, drawn
    # as often as it has them (natural) or each as often (equal, weighted back); one is faster on several ranks
    caption_dropout: float = 0.1  # share of clips trained on the negative prompt, for guidance

    @property
    def needs_clips(self) -> bool:
        return True

    def check(self, sampler: SamplerConfig) -> None:
        if sampler.chunks.causal != (self.forcing != "none"):
            raise ValueError(
                "algorithm.forcing must be diffusion or teacher for a causal student, none for another: "
                f"it is {self.forcing}, and sampler.chunks.chunk_frames is {sampler.chunks.chunk_frames}"
            )
        if sampler.chunks.context_noise:
            raise ValueError("sampler.chunks.context_noise must be 0 for finetune, which looks back on clean chunks")
        if not 0 <= self.caption_dropout <= 1:
            raise ValueError(f"algorithm.caption_dropout must be in [0, 1], not {self.caption_dropout}")

        if self.expert_balance != "mixed" and self.forcing != "none":
            raise ValueError("algorithm.expert_balance must be mixed for a causal student: its chunks differ in noise")

    def check_experts(self, sampler: SamplerConfig, layouts: Mapping[str, ExpertLayout]) -> None:
        check_guidance("sampler.guidance_scale", sampler.guidance_scale, "student", layouts["student"])
        boundary = layouts["student"].boundary
        check_balance(self.expert_balance, boundary and high_share(boundary, self.shift), "student")

    def plan(self) -> BatchPlan:
        return BatchPlan.one_update(self.batch_size, self.micro_batch)


class Finetune:
    """loss = mean |velocity(x_sigma) - (noise - x0)|^2, one shifted-uniform noise level per clip."""

    trained_for_sampler: ClassVar[bool] = False

    def __init__(self, config: FinetuneConfig, sampler: SamplerConfig, *, student: Trainable) -> None:
        self.config, self.chunks = config, sampler.chunks
        self.student = student

    def micro_batches(self, batch: Batch) -> list[Batch]:
        return batch.split(self.config.micro_batch)

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        x0 = batch.latents
        noise = rng.noise("noise", batch.sample_ids, batch.latent_shape).to(x0)
        sigma, weight = self._levels(batch, rng)
        dropped = rng.uniform("caption dropout", batch.sample_ids) < self.config.caption_dropout
        both = batch.cond.cat(batch.uncond)
        rows = torch.arange(len(batch)) + len(batch) * dropped
        x_t, cond = add_noise(x0, noise, sigma), both.map(lambda x: x[rows.to(x.device)])
        if self.config.forcing == "none":
            velocity = self.student.velocity(x_t, sigma, cond)
        else:
            clean = x0 if self.config.forcing == "teacher" else None
            velocity = self.student.masked_velocity(x_t, sigma, cond, self.chunks, clean)
        loss = (velocity - (noise - x0)).square().mean()
        yield Loss("student", weight * loss, metrics={"loss": loss.detach()})

    def _levels(self, batch: Batch, rng: Streams) -> tuple[PerSample | PerFrame, float]:
        """One noise level for each clip, or for each chunk of it, and the weight of the loss at them."""
        if self.config.forcing == "none":
            u, weight = rng.uniform("sigma", batch.sample_ids), 1.0
            if self.config.expert_balance != "mixed":
                share = high_share(self.student.boundary, self.config.shift)
                u, weight = one_side(u, share, self.config.expert_balance, rng.shared)
            return shift_sigma(u, self.config.shift), weight
        ranges = self.chunks.ranges(batch.latent_shape[1])
        levels = [rng.uniform(f"sigma {i}", batch.sample_ids) for i in range(len(ranges))]
        frames = [level for level, (start, stop) in zip(levels, ranges, strict=True) for _ in range(start, stop)]
        return shift_sigma(torch.stack(frames, 1), self.config.shift), 1.0
