"""The ODE of a teacher, whose states a few-step student is trained on; it is solved in training or before it."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.types import Batch, Latents, Trajectory
from unified_trainer.numerics.flow import GuidanceScale
from unified_trainer.numerics.kernels import transition
from unified_trainer.roles.role import Role


@dataclass(frozen=True)
class TeacherODE:
    """Euler steps of a guided teacher from noise, and which of their states are trained on."""

    role: str  # the teacher's name in the method
    sigmas: Float[Tensor, " s"]  # noise levels of all steps, float64, falling; the last is 0
    levels: Float[Tensor, " l"]  # those of `sigmas` whose states are trained on, without 0; the first is sigmas[0]
    guidance_scale: GuidanceScale

    def solve(self, teacher: Role, noise: Latents, batch: Batch) -> Trajectory:
        """Return the states at `levels` and the end, of x + (sigma' - sigma) (u + w (c - u)) from noise at sigmas[0].

        u and c are the teacher's velocities with and without the negative prompt, w the guidance scale.
        """
        x_t, states = noise, []
        for sigma, sigma_next in pairwise(self.sigmas):
            if sigma in self.levels:
                states.append(x_t)
            level = sigma.expand(len(batch))
            velocity = teacher.guided_velocity(x_t, level, batch.cond, batch.uncond, self.guidance_scale)
            x_t, _ = transition("ode", x_t, velocity, sigma, sigma_next, 0.0)
        return Trajectory(self.levels, torch.stack(states, 1), x_t)
