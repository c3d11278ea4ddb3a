"""ODE regression: a few-step student learns to predict where the teacher's ODE ends (CausVid, arXiv:2412.07772)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Count, NetworkCalls, Shift
from unified_trainer.basics.types import Batch, Latents, PerFrame, Trajectory, of_kind
from unified_trainer.methods.base import Loss, Method, MethodSetup, SingleUpdateConfig, frozen, trained
from unified_trainer.numerics.flow import GuidanceScale, sigma_table, x0_from_velocity
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.causal import Causal
from unified_trainer.roles.role import Frozen, Trainable
from unified_trainer.sampling.solver import SamplerConfig
from unified_trainer.sampling.teacher_ode import CausalTeacherODE, TeacherODE

ROUNDING = 1e-9  # noise levels that are no further apart are one: they were computed in different ways


@dataclass(frozen=True)
class ODEInitConfig(SingleUpdateConfig):
    guidance_scale: GuidanceScale = 3.0
    """Guidance scale w of the teacher, uncond + w (cond - uncond); two numbers for two experts."""
    teacher_steps: NetworkCalls = 30
    """Euler steps of the teacher; the student's noise levels are added to them."""
    teacher_shift: Shift = 3.0
    """Shift of the teacher's noise levels towards noise."""
    causal_teacher: bool = False
    """The teacher of a causal student is causal too: it solves its ODE chunk by chunk, after its own finished chunks
    (arXiv:2602.02214)."""
    passes: Count = 1
    """Times each trajectory is trained on; the student takes one optimizer step per noise level and pass."""
    runs_untrained = ()

    def check(self, setup: MethodSetup) -> None:
        if setup.sampler.chunks.context_noise:
            raise UserError("sampler.chunks.context_noise must be 0 for ode_init: its chunks attend to clean chunks")
        if self.causal_teacher and not setup.sampler.chunks.causal:
            raise UserError(
                "algorithm.causal_teacher needs a causal student: set sampler.chunks.chunk_frames, or leave it out"
            )
        setup.sampler.check_unguided()
        if "teacher" in setup.layouts:  # its trajectories are not stored
            setup.check_guidance("teacher", "algorithm.guidance_scale", self.guidance_scale)
        setup.require_trained("student", [setup.sampler.sigmas()[:-1].tolist()], "sampler.step_sigmas")

    def updates(self, role: str, steps: int, sampler: SamplerConfig) -> int:
        return super().updates(role, steps, sampler) * self.passes * (len(sampler.sigmas()) - 1)

    def teacher_ode(self, sampler: SamplerConfig) -> TeacherODE:
        """Return the ODE from the student's first noise level: the teacher's levels below it, and the student's."""
        levels, table = sampler.sigmas()[:-1], sigma_table(self.teacher_steps, self.teacher_shift)
        further = (table[:, None] - levels).abs().amin(1) > ROUNDING
        sigmas = torch.cat([table[further & (table < levels[0])], levels]).sort().values.flip(0)
        if self.causal_teacher:
            return CausalTeacherODE("teacher", sigmas, levels, self.guidance_scale, sampler.chunks)
        return TeacherODE("teacher", sigmas, levels, self.guidance_scale)


class ODEInit(Method):
    """loss = 1/2 mean |x0(x_sigma) - x_end|^2 over the states of the teacher's ODE at the student's noise levels.

    Batches bring the states, or the teacher makes them.
    """

    config_class = ODEInitConfig
    roles = {"student": trained(), "teacher": frozen(in_chunks=lambda config: config.causal_teacher)}
    trained_for_sampler = True

    def __init__(
        self, config: ODEInitConfig, sampler: SamplerConfig, *, student: Trainable, teacher: Frozen | None = None
    ) -> None:
        self.config, self.student, self.teacher, self.chunks = config, student, teacher, sampler.chunks
        self.ode = config.teacher_ode(sampler)

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        trajectory = batch.trajectory or self._trajectory(batch, rng)
        rows = [i for i, level in enumerate(trajectory.sigmas) if self.student.trains(level)]
        end, trained = trajectory.end, Trajectory(trajectory.sigmas[rows], trajectory.states[:, rows], trajectory.end)
        for _ in range(self.config.passes):
            for i, (level, x_t) in enumerate(zip(trained.sigmas, trained.states.unbind(1), strict=True)):
                sigma = level.expand(len(batch))
                if self.chunks.causal:
                    x_t, sigma = self._by_chunk(trained, i)
                    velocity = of_kind(Causal, self.student).masked_velocity(x_t, sigma, batch.cond, self.chunks, end)
                else:
                    velocity = self.student.velocity(x_t, sigma, batch.cond)
                x0 = x0_from_velocity(x_t, velocity, sigma)
                loss = 0.5 * (x0 - end).square().mean()
                yield Loss("student", loss, metrics={"loss": loss.detach()})

    def _by_chunk(self, trajectory: Trajectory, offset: int) -> tuple[Latents, PerFrame]:
        """Give adjacent chunks different noise levels; over all offsets each chunk has been at every level."""
        states, levels = trajectory.states, trajectory.sigmas
        ranges = self.chunks.ranges(states.shape[3])
        rows = [(offset + c) % len(levels) for c, (start, stop) in enumerate(ranges) for _ in range(start, stop)]
        x_t = torch.stack([states[:, row, :, frame] for frame, row in enumerate(rows)], 2)
        return x_t, levels[rows].expand(len(x_t), -1)

    def _trajectory(self, batch: Batch, rng: Streams) -> Trajectory:
        """The guided teacher's states at the student's noise levels and its end, from noise at the first level."""
        noise = rng.noise("noise", batch.sample_ids, batch.latent_shape).to(self.student.device)
        return self.ode.solve(of_kind(Frozen, self.teacher), noise, batch)
