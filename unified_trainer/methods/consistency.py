"""Consistency distillation: one prediction along each step of the teacher's ODE (arXiv:2303.01469).

A causal student has a causal teacher: chunks attend to the clean chunks of the clip (arXiv:2605.15141).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Positive, Shift, at_least
from unified_trainer.basics.types import Batch, PerFrame, PerSample, of_kind
from unified_trainer.methods.base import Loss, Method, MethodSetup, SingleUpdateConfig, frozen, trained
from unified_trainer.numerics.flow import GuidanceScale, add_noise, per_sample, sigma_table, x0_from_velocity
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.causal import Causal, TeacherForced, by_chunk
from unified_trainer.roles.role import Frozen, Role, Trainable
from unified_trainer.sampling.solver import SamplerConfig


@dataclass(frozen=True)
class ConsistencyConfig(SingleUpdateConfig):
    guidance_scale: GuidanceScale = 3.0
    """Guidance scale w of the teacher, uncond + w (cond - uncond); two numbers for two experts."""
    teacher_steps: Annotated[int, at_least(2, 1000)] = 30
    """Steps of the teacher's ODE; the student is consistent across each."""
    teacher_shift: Shift = 5.0
    """Shift of the teacher's noise levels towards noise."""
    huber: Positive = 0.01
    """Constant c of the loss sqrt(d^2 + c^2) - c per element (arXiv:2310.14189); a large c gives squared error."""
    needs_clips: ClassVar[bool] = True

    def check(self, setup: MethodSetup) -> None:
        if setup.sampler.chunks.context_noise:
            raise UserError("sampler.chunks.context_noise must be 0 for consistency: its chunks attend to clean chunks")
        setup.sampler.check_unguided()
        setup.check_guidance("teacher", "algorithm.guidance_scale", self.guidance_scale)


class Consistency(Method):
    """loss = d(x0(x_sigma), sg x0(x_next)), where x_next is one Euler step of the guided teacher below x_sigma."""

    config_class = ConsistencyConfig
    roles = {"student": trained(), "teacher": frozen(in_chunks=lambda config: True)}
    trained_for_sampler = True

    def __init__(
        self, config: ConsistencyConfig, sampler: SamplerConfig, *, student: Trainable, teacher: Frozen
    ) -> None:
        self.config, self.student, self.teacher, self.chunks = config, student, teacher, sampler.chunks
        self.table = sigma_table(config.teacher_steps, config.teacher_shift)

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        rows = (self._uniform(batch, rng) * self.config.teacher_steps).long()
        student, teacher = self._given(self.student, batch), self._given(self.teacher, batch)
        sigma, sigma_next = self.table[rows], self.table[rows + 1]
        noise = rng.noise("noise", batch.sample_ids, batch.latent_shape).to(batch.latents)
        x_t = add_noise(batch.latents, noise, sigma)
        with torch.no_grad():
            velocity = teacher.guided_velocity(x_t, sigma, batch.cond, batch.uncond, self.config.guidance_scale)
            x_next = x_t + per_sample(sigma_next - sigma, x_t) * velocity
            # At sigma 0 the prediction is x_next itself: the boundary condition.
            target = x0_from_velocity(x_next, student.velocity(x_next, sigma_next, batch.cond), sigma_next)
        x0 = x0_from_velocity(x_t, student.velocity(x_t, sigma, batch.cond), sigma)
        c = self.config.huber
        loss = (((x0 - target).square() + c * c).sqrt() - c).mean()
        yield Loss("student", loss, metrics={"loss": loss.detach()})

    def _uniform(self, batch: Batch, rng: Streams) -> PerSample | PerFrame:
        """Draw a number in [0, 1) for each clip, or for each chunk of a causal student."""
        if self.chunks.causal:
            return by_chunk("level", batch, rng, self.chunks)
        return rng.uniform("level", batch.sample_ids)

    def _given(self, role: Role, batch: Batch) -> Role | TeacherForced:
        """The role; a causal one with the clean chunks that its chunks attend to."""
        if not self.chunks.causal:
            return role
        return of_kind(Causal, role).attending_to(of_kind(Tensor, batch.latents), self.chunks)
