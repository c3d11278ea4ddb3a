"""The ODE of a teacher, whose states a few-step student is trained on; it is solved in training or before it."""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.types import Batch, Latents, Trajectory, of_kind
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.numerics.flow import GuidanceScale
from unified_trainer.numerics.kernels import transition
from unified_trainer.roles.causal import Causal
from unified_trainer.roles.role import Role
from unified_trainer.sampling.shared_calls import Velocity


@dataclass(frozen=True)
class TeacherODE:
    """Euler steps of a guided teacher from noise, and which of their states are trained on."""

    role: str  # the teacher's name in the method
    sigmas: Float[Tensor, " s"]  # noise levels of all steps, float64, falling; the last is 0
    levels: Float[Tensor, " l"]  # those of `sigmas` whose states are trained on, without 0; the first is sigmas[0]
    guidance_scale: GuidanceScale

    @property
    def made_in(self) -> ChunkConfig | None:
        """The chunks in which it is solved; None: all frames at once."""
        return None

    def solve(self, teacher: Role, noise: Latents, batch: Batch) -> Trajectory:
        """Return the states at `levels` and the end, of x + (sigma' - sigma) (u + w (c - u)) from noise at sigmas[0].

        u and c are the teacher's velocities with and without the negative prompt, w the guidance scale.
        """
        return self._walk(partial(_guided, teacher, batch, self.guidance_scale), noise)

    def _walk(self, velocity: Velocity, noise: Latents) -> Trajectory:
        x_t, states = noise, []
        for sigma, sigma_next in pairwise(self.sigmas):
            if sigma in self.levels:
                states.append(x_t)
            x_t, _ = transition("ode", x_t, velocity(x_t, sigma), sigma, sigma_next, 0.0)
        return Trajectory(self.levels, torch.stack(states, 1), x_t)


@dataclass(frozen=True)
class CausalTeacherODE(TeacherODE):
    """The ODE of a causal teacher, solved chunk by chunk (Causal Forcing, arXiv:2602.02214).

    Each chunk attends to the ends of the chunks before it, which are clean. Given those, its own end is a function of
    its own noise alone, so that a causal student can learn it.
    """

    chunks: ChunkConfig

    @property
    def made_in(self) -> ChunkConfig:
        return self.chunks

    def solve(self, teacher: Role, noise: Latents, batch: Batch) -> Trajectory:
        """Return the states and the end as `TeacherODE.solve` does, those of all chunks joined."""
        causal, parts = of_kind(Causal, teacher), list[Trajectory]()
        cache = causal.open_cache(batch.cond, batch.uncond, self.chunks, self.guidance_scale, self.sigmas[:-1])
        for start, stop in self.chunks.ranges(noise.shape[2]):
            parts.append(self._walk(cache.velocity, noise[:, :, start:stop]))
            if stop < noise.shape[2]:
                cache.append(parts[-1].end)
        states = torch.cat([part.states for part in parts], 3)
        return Trajectory(self.levels, states, torch.cat([part.end for part in parts], 2))


def _guided(teacher: Role, batch: Batch, guidance_scale: GuidanceScale, x_t: Latents, sigma: Tensor) -> Latents:
    return teacher.guided_velocity(x_t, sigma.expand(len(batch)), batch.cond, batch.uncond, guidance_scale)
