"""Consistency distillation: one prediction along each step of the teacher's ODE (arXiv:2303.01469).

A causal student has a causal teacher: chunks attend to the clean chunks of the clip (arXiv:2605.15141).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.types import Batch, PerFrame, PerSample, of_kind
from unified_trainer.methods.base import Loss, Method, MethodSetup, SingleUpdateConfig, frozen, trained
from unified_trainer.methods.consistency_loss import AlongTeacherConfig, consistency_loss
from unified_trainer.numerics.flow import GuidanceScale
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.causal import Causal, TeacherForced, by_chunk
from unified_trainer.roles.role import Frozen, Role, Trainable
from unified_trainer.sampling.solver import SamplerConfig


@dataclass(frozen=True)
class ConsistencyConfig(AlongTeacherConfig, SingleUpdateConfig):
    guidance_scale: GuidanceScale = 3.0
    """Guidance scale w of the teacher, uncond + w (cond - uncond); two numbers for two experts."""
    needs_clips: ClassVar[bool] = True
    runs_untrained = ("below",)

    def check(self, setup: MethodSetup) -> None:
        if setup.sampler.chunks.context_noise:
            raise UserError("sampler.chunks.context_noise must be 0 for consistency: its chunks attend to clean chunks")
        setup.sampler.check_unguided()
        setup.check_guidance("teacher", "algorithm.guidance_scale", self.guidance_scale)
        setup.require_trained("student", [self.table[:-1].tolist()], "algorithm.teacher_steps")


class Consistency(Method):
    """loss = d(x0(x_sigma), sg x0(x_next)), where x_next is one Euler step of the guided teacher below x_sigma."""

    config_class = ConsistencyConfig
    roles = {"student": trained(), "teacher": frozen(in_chunks=lambda config: True)}
    trained_for_sampler = True

    def __init__(
        self, config: ConsistencyConfig, sampler: SamplerConfig, *, student: Trainable, teacher: Frozen
    ) -> None:
        self.config, self.student, self.teacher, self.chunks = config, student, teacher, sampler.chunks

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        student, teacher = self._given(self.student, batch), self._given(self.teacher, batch)
        scale, steps = self.config.guidance_scale, self.config.steps_at(self._uniform(batch, rng), self.student)
        loss = consistency_loss(self.config, scale, student, teacher, batch, steps, rng)
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
