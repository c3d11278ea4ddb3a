"""Consistency along the teacher's ODE, with the student's samples matched to the teacher's (rCM, arXiv:2510.08431)."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Positive
from unified_trainer.basics.types import Batch
from unified_trainer.methods.base import Loss, MethodSetup
from unified_trainer.methods.consistency_loss import AlongTeacherConfig, consistency_loss
from unified_trainer.methods.distribution_matching import MatchingConfig, matching_losses, simulated
from unified_trainer.methods.score_directions import DirectedMethod
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams


@dataclass(frozen=True)
class RCMConfig(AlongTeacherConfig, MatchingConfig):
    consistency_weight: Positive = 1.0
    """Weight of the consistency in the student's loss, beside the matching of its samples."""
    needs_clips: ClassVar[bool] = True
    runs_untrained = ("before", "below")

    def check(self, setup: MethodSetup) -> None:
        super().check(setup)
        if setup.sampler.chunks.causal:
            raise UserError("sampler.chunks.chunk_frames must be 0 for rcm; self_forcing trains causal students")
        setup.require_trained("student", [self.table[:-1].tolist()], "algorithm.teacher_steps")


class RCM(DirectedMethod):
    """Train the student on clips by consistency and on its own samples by matching, and the critic on its samples."""

    config_class = RCMConfig

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        config = self.config
        if config.updates_at(step)[0]:
            steps = config.steps_at(rng.uniform("level", batch.sample_ids), self.student)
            loss = consistency_loss(config, config.guidance_scale, self.student, self.teacher, batch, steps, rng)
            yield Loss("student", config.consistency_weight * loss, False, {"consistency_loss": loss.detach()})
        sample = partial(simulated, self.student, self.sampler)
        yield from matching_losses(config, self.matching, step, batch, rng, sample)
