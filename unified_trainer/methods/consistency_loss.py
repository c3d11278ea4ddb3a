"""The loss of a student that is consistent along the teacher's ODE, and its settings (arXiv:2303.01469)."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unified_trainer.basics.ranges import Positive, Shift, at_least
from unified_trainer.basics.types import Batch, PerFrame, PerSample
from unified_trainer.numerics.flow import GuidanceScale, add_noise, per_sample, sigma_table, x0_from_velocity
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.causal import TeacherForced
from unified_trainer.roles.role import Role, Trainable


@dataclass(frozen=True)
class AlongTeacherConfig:
    """Settings of the teacher's ODE and of the distance along it."""

    teacher_steps: Annotated[int, at_least(2, 1000)] = 30
    """Steps of the teacher's ODE; the student is consistent across each."""
    teacher_shift: Shift = 5.0
    """Shift of the teacher's noise levels towards noise."""
    huber: Positive = 0.01
    """Constant c of the distance sqrt(d^2 + c^2) - c; a large c gives squared error."""
    distance: Literal["element", "vector"] = "element"
    """Error d: that of each element, or the root mean square over a sample (a frame, if causal). vector is weighted
    by the inverse length of the teacher's step (arXiv:2310.14189, where c is 5.4e-4)."""

    @property
    def table(self) -> Float[Tensor, " steps_and_0"]:
        """The noise levels of the teacher's ODE."""
        return sigma_table(self.teacher_steps, self.teacher_shift)

    def steps_at(self, uniform: PerSample | PerFrame, student: Trainable) -> Int[Tensor, "..."]:
        """Return a step of the teacher for each number in [0, 1), any that begins in a trained expert alike."""
        steps = torch.tensor([i for i, sigma in enumerate(self.table[:-1]) if student.trains(sigma)])
        return steps[(uniform * len(steps)).long()]


def consistency_loss(
    config: AlongTeacherConfig,
    guidance_scale: GuidanceScale,
    student: Role | TeacherForced,
    teacher: Role | TeacherForced,
    batch: Batch,
    steps: Int[Tensor, "..."],
    rng: Streams,
) -> Float[Tensor, ""]:
    """Return d(x0(x_sigma), sg x0(x_next)) of noised clips, where x_next is one Euler step of the guided teacher.

    `steps` are the teacher's steps at which each clip is, or each of its frames: see `steps_at`.
    """
    table = config.table
    sigma, sigma_next = table[steps], table[steps + 1]
    noise = rng.noise("noise", batch.sample_ids, batch.latent_shape).to(batch.latents)
    x_t = add_noise(batch.latents, noise, sigma)
    with torch.no_grad():
        velocity = teacher.guided_velocity(x_t, sigma, batch.cond, batch.uncond, guidance_scale)
        x_next = x_t + per_sample(sigma_next - sigma, x_t) * velocity
        # At sigma 0 the prediction is x_next itself: the boundary condition.
        target = x0_from_velocity(x_next, student.velocity(x_next, sigma_next, batch.cond), sigma_next)
    x0 = x0_from_velocity(x_t, student.velocity(x_t, sigma, batch.cond), sigma)
    d2, c = (x0 - target).square(), config.huber
    if config.distance == "element":
        return ((d2 + c * c).sqrt() - c).mean()
    d2 = d2.mean((1, 3, 4)) if sigma.ndim == 2 else d2.flatten(1).mean(1)
    weight = 1 / (config.teacher_steps * (sigma - sigma_next))  # 1 for steps of equal length
    return (weight.to(d2, non_blocking=True) * ((d2 + c * c).sqrt() - c)).mean()
