"""Flow matching on clips: the student learns the velocity of real data (arXiv:2210.02747)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Fraction, Shift
from unified_trainer.basics.types import Batch, PerFrame, PerSample, of_kind
from unified_trainer.methods.base import Loss, Method, MethodSetup, SingleUpdateConfig, trained
from unified_trainer.numerics.flow import ShiftedUniform, add_noise
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.causal import Causal, by_chunk
from unified_trainer.roles.role import Trainable, TrainableConfig

Forcing = Literal["none", "diffusion", "teacher"]  # diffusion forcing: arXiv:2407.01392


@dataclass(frozen=True)
class FinetuneConfig(SingleUpdateConfig):
    shift: Shift = 3.0
    """Shift of the uniform noise levels towards noise; 1 is none."""
    forcing: Forcing = "none"
    """Chunks that a causal student attends to: noisy (diffusion forcing) or clean ones (teacher forcing); else none."""
    caption_dropout: Fraction = 0.1
    """Fraction of clips trained on the negative prompt, for guidance."""
    needs_clips: ClassVar[bool] = True
    runs_untrained = ()

    def check(self, setup: MethodSetup) -> None:
        chunks = setup.sampler.chunks
        if chunks.causal != (self.forcing != "none"):
            raise UserError(
                "algorithm.forcing must be diffusion or teacher for a causal student, and none for a bidirectional "
                f"one: it is {self.forcing}, and sampler.chunks.chunk_frames is {chunks.chunk_frames}"
            )
        if chunks.context_noise:
            raise UserError("sampler.chunks.context_noise must be 0 for finetune: its chunks attend to clean chunks")
        student = of_kind(TrainableConfig, setup.roles["student"])
        if self.forcing != "none" and student.expert_balance != "mixed":
            raise UserError(
                "student.expert_balance must be mixed for a causal student: its chunks differ in noise level"
            )
        setup.check_guidance("student", "sampler.guidance_scale", setup.sampler.guidance_scale)
        setup.check_noise_levels("student", self.sigma_law)

    @property
    def sigma_law(self) -> ShiftedUniform:
        """Law of the noise levels of clips and of chunks."""
        return ShiftedUniform(self.shift)


class Finetune(Method):
    """loss = mean |velocity(x_sigma) - (noise - x0)|^2, with one shifted-uniform noise level per clip."""

    config_class = FinetuneConfig
    roles = {"student": trained()}
    student: Trainable

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        x0 = batch.latents
        noise = rng.noise("noise", batch.sample_ids, batch.latent_shape).to(x0)
        sigma, weight = self._noise_levels(batch, rng)
        dropped = rng.uniform("caption dropout", batch.sample_ids) < self.config.caption_dropout
        both = batch.cond.cat(batch.uncond)
        rows = torch.arange(len(batch)) + len(batch) * dropped
        x_t, cond = add_noise(x0, noise, sigma), both.take(rows.tolist())
        if self.config.forcing == "none":
            velocity = self.student.velocity(x_t, sigma, cond)
        else:
            clean = x0 if self.config.forcing == "teacher" else None
            velocity = of_kind(Causal, self.student).masked_velocity(x_t, sigma, cond, self.sampler.chunks, clean)
        loss = (velocity - (noise - x0)).square().mean()
        yield Loss("student", weight * loss, metrics={"loss": loss.detach()})

    def _noise_levels(self, batch: Batch, rng: Streams) -> tuple[PerSample | PerFrame, float]:
        """One noise level for each clip, or for each chunk of a causal student, and the weight of the loss."""
        law = self.config.sigma_law
        if self.config.forcing == "none":
            return self.student.draw_noise_levels("sigma", batch.sample_ids, rng, law)
        return self.student.trained_levels(law, by_chunk("sigma", batch, rng, self.sampler.chunks)), 1.0
