"""Flow map distillation: a student that predicts the mean velocity of a step (MeanFlow, arXiv:2505.13447)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Fraction, NonNegative, Positive, Shift, at_least
from unified_trainer.basics.types import Batch, Latents, PerSample
from unified_trainer.methods.base import Loss, Method, MethodSetup, SingleUpdateConfig, frozen, trained
from unified_trainer.models.flow_map import ending_at
from unified_trainer.numerics.flow import (
    GuidanceScale,
    ShiftedUniform,
    add_noise,
    per_sample,
    sample_mean,
    shift_sigma,
    unshift_sigma,
)
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.role import Frozen, Trainable
from unified_trainer.sampling.solver import SamplerConfig


@dataclass(frozen=True)
class FlowMapConfig(SingleUpdateConfig):
    guidance_scale: GuidanceScale = 3.0
    """Guidance scale w of the teacher, uncond + w (cond - uncond); two numbers for two experts."""
    teacher_steps: Annotated[int, at_least(2, 1000)] = 30
    """Steps of the teacher's ODE between noise level 1 and 0. The student learns where that ODE leads."""
    shift: Shift = 5.0
    """Shift of the noise levels towards noise: of those that are drawn, and of the teacher's steps."""
    level_draws: Annotated[int, at_least(1, 100)] = 1
    """Uniform numbers of which the largest, shifted, is t; AnyFlow takes 2, which draws more levels near noise."""
    equal_share: Fraction = 0.5
    """Share of samples whose step has no length, r = t: they learn the teacher's velocity."""
    clean_share: Fraction = 0.25
    """Share of samples whose step ends at clean latents, r = 0. The others end anywhere below t."""
    power: NonNegative = 1.0
    """Power p of the weight 1 / (mean error^2 + c)^p of each sample; 0 is no weight."""
    offset: Positive = 1e-3
    """Constant c of the weight."""
    needs_clips: ClassVar[bool] = True
    runs_untrained = ()

    def check(self, setup: MethodSetup) -> None:
        if not setup.roles["student"].is_flow_map:
            raise UserError("student.flow_map must be True: flow_map trains a network with a second noise level")
        if self.equal_share + self.clean_share > 1:
            raise UserError("algorithm.equal_share and algorithm.clean_share must sum to at most 1")
        layout = setup.layouts["student"]
        if layout.trains_one_of_two and "high" in layout.trained:
            raise UserError(
                "student.low.trained must be True: steps of the high-noise expert end at levels of the other, where "
                "one that is not trained predicts the velocity of no step"
            )
        setup.sampler.check_unguided()
        setup.check_guidance("teacher", "algorithm.guidance_scale", self.guidance_scale)
        setup.check_noise_levels("student", self.law, "teacher")

    @property
    def law(self) -> ShiftedUniform:
        """Law of the noise levels t."""
        return ShiftedUniform(self.shift, self.level_draws)


class FlowMap(Method):
    """loss = mean w |u - sg y|^2, w = sg 1 / (mean |u - y|^2 + c)^p for each sample, u = u(x_t, t, r).

    y = v - (t' - r) (u - u') / (t - t') is the target of MeanFlow along one Euler step of the guided teacher, from x_t
    with velocity v to x' = x_t - (t - t') v; u' = u(x', t', r).
    """

    config_class = FlowMapConfig
    roles = {"student": trained(), "teacher": frozen()}
    trains_flow_maps = True
    trained_for_sampler = True

    def __init__(self, config: FlowMapConfig, sampler: SamplerConfig, *, student: Trainable, teacher: Frozen) -> None:
        self.config, self.student, self.teacher = config, student, teacher

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        config, ids = self.config, batch.sample_ids
        t, weight = self.student.draw_noise_levels("level", ids, rng, config.law, self.teacher)
        r = self._ends(t, rng.uniform("end", ids), rng.uniform("kind of step", ids))
        below = (unshift_sigma(t, config.shift) - 1 / config.teacher_steps).clamp(min=0)
        t_next = torch.maximum(shift_sigma(below, config.shift), r)
        noise = rng.noise("noise", ids, batch.latent_shape).to(batch.latents)
        x_t, cond = add_noise(batch.latents, noise, t), ending_at(batch.cond, r[:, None])
        with torch.no_grad():
            v = self.teacher.guided_velocity(x_t, t, batch.cond, batch.uncond, config.guidance_scale)
            x_next = x_t - per_sample(t - t_next, x_t) * v
            u_next = self.student.velocity(x_next, t_next, cond)
        u = self.student.velocity(x_t, t, cond)
        y = mean_flow_target(u.detach(), u_next, v, t, t_next, r)
        error = sample_mean((u - y).square())
        loss = (error / (error.detach() + config.offset) ** config.power).mean()
        yield Loss("student", weight * loss, metrics={"loss": error.detach().mean()})

    def _ends(self, t: PerSample, u: PerSample, kind: PerSample) -> PerSample:
        """Return r for each sample: t, 0, or below t, evenly before the shift."""
        config = self.config
        r = torch.minimum(shift_sigma(u * unshift_sigma(t, config.shift), config.shift), t)
        r = torch.where(kind < config.equal_share + config.clean_share, 0.0, r)
        return torch.where(kind < config.equal_share, t, r)


def mean_flow_target(u: Latents, u_next: Latents, v: Latents, t: PerSample, t_next: PerSample, r: PerSample) -> Latents:
    """Return y = v - k (u - u'), k = (t' - r) / (t - t'): v - (t - r) du/dt of MeanFlow with a backward difference.

    The error is u - y = (t - r) / (t - t') (u - m) with m = ((t - t') v + (t' - r) u') / (t - r), the mean velocity of
    the step to t' = t_next in [r, t] and of u' after it: it is 0 where u = m. At t = r, y = v.
    """
    k = per_sample(torch.where(t_next > r, (t_next - r) / (t - t_next), 0.0), u)
    return v - k * torch.where(k > 0, u - u_next, 0.0)  # where k = 0, u' of a known frame is no number
