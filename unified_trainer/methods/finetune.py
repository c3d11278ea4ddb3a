"""Flow matching on clips: the student learns the velocity of real data (arXiv:2210.02747)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from unified_trainer.batching import BatchPlan
from unified_trainer.flow import add_noise, shift_sigma
from unified_trainer.methods.base import Loss
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.role import Trainable
from unified_trainer.sampling import SamplerConfig
from unified_trainer.types import Batch


@dataclass(frozen=True)
class FinetuneConfig:
    batch_size: int = 32  # clips per update, over all ranks
    micro_batch: int = 32  # clips per backward pass
    shift: float = 3.0  # of the uniform noise levels towards noise; 1 is none
    caption_dropout: float = 0.1  # share of clips trained on the negative prompt, for guidance

    @property
    def learns_from_data(self) -> bool:
        return True

    def check(self, sampler: SamplerConfig) -> None:
        if not 0 <= self.caption_dropout <= 1:
            raise ValueError(f"algorithm.caption_dropout must be in [0, 1], not {self.caption_dropout}")

    def plan(self) -> BatchPlan:
        keys = ("algorithm.batch_size", "1", "algorithm.batch_size", "algorithm.micro_batch")
        return BatchPlan(self.batch_size, 1, self.batch_size, self.micro_batch, keys)


class Finetune:
    """loss = mean |velocity(x_sigma) - (noise - x0)|^2, one shifted-uniform noise level per clip."""

    trains_sampler: ClassVar[bool] = False

    def __init__(self, config: FinetuneConfig, *, student: Trainable) -> None:
        self.config = config
        self.student = student

    def generators(self, batch: Batch) -> list[Batch]:
        return batch.split(self.config.micro_batch)

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        x0 = batch.latents
        noise = rng.noise("noise", batch.sample_ids, batch.latent_shape).to(x0)
        sigma = shift_sigma(rng.uniform("sigma", batch.sample_ids), self.config.shift)
        dropped = rng.uniform("caption dropout", batch.sample_ids) < self.config.caption_dropout
        both = batch.cond.cat(batch.uncond)
        rows = torch.arange(len(batch)) + len(batch) * dropped
        velocity = self.student.velocity(add_noise(x0, noise, sigma), sigma, both.map(lambda x: x[rows.to(x.device)]))
        loss = (velocity - (noise - x0)).square().mean()
        yield Loss("student", loss, metrics={"loss": loss.detach()})
