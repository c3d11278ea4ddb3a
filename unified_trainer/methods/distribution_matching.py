"""Distribution matching, shared by several methods (DMD, arXiv:2311.18828; DMD2, arXiv:2405.14867)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn.functional import softplus

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import NonNegative, Period, PeriodOrZero, PositiveFraction, Shift
from unified_trainer.basics.types import Batch, Latents, PerSample, take_rows
from unified_trainer.methods.base import Loss, Method, MethodSetup, SingleUpdateConfig
from unified_trainer.numerics.flow import (
    GuidanceScale,
    ShiftedGrid,
    add_noise,
    per_sample,
    promote,
    x0_from_velocity,
)
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.critic import Critic
from unified_trainer.roles.role import Frozen, Trainable
from unified_trainer.sampling.solver import SamplerConfig, predict_at, trainable_steps

Sample = Callable[[Batch, Streams, str], Latents]  # the student's samples; the text names what they are for


@dataclass(frozen=True)
class ScoreConfig:
    """Settings of the comparison of teacher and critic."""

    guidance_scale: GuidanceScale = 3.0
    """Guidance scale w of the teacher, uncond + w (cond - uncond); two numbers for two experts."""
    tau_shift: Shift = 5.0
    """Shift towards noise of the noise levels tau at which teacher and critic are compared."""
    tau_range: tuple[PositiveFraction, PositiveFraction] = (0.02, 0.98)
    """Range to which tau is clipped."""

    def check_scores(self, setup: MethodSetup, key: str) -> None:
        """Raise UserError for settings that cannot work; `key` is where they stand, such as algorithm."""
        low, high = self.tau_range
        if low >= high:
            raise UserError(f"{key}.tau_range must rise, not {self.tau_range}")
        setup.sampler.check_unguided()
        setup.check_guidance("teacher", f"{key}.guidance_scale", self.guidance_scale)
        setup.check_noise_levels("critic", self.tau_law, partner="teacher")

    @property
    def tau_law(self) -> ShiftedGrid:
        """Law of tau: clip(shift(k / 1000)) with k uniform in 0..999."""
        return ShiftedGrid(self.tau_shift, self.tau_range)


@dataclass(frozen=True)
class MatchingConfig(ScoreConfig, SingleUpdateConfig):
    """Settings of the methods whose training step is an update by matching alone."""

    student_every: Period = 5
    """Training steps between two updates of the student."""
    update_schedule: Literal["every_step", "exclusive"] = "every_step"
    """The critic is updated in every step, or only in those without a student update (exclusive)."""
    critic_warmup_steps: PeriodOrZero = 0
    """Training steps at the start in which only the critic is updated."""
    critic_samples: Literal["fresh", "shared"] = "fresh"
    """Critic's samples after a student update: fresh ones of the updated student, or the student's own (shared)."""
    gan_weight: NonNegative = 0.0
    """Weight of the discriminator in the student's loss, 3e-3 in DMD2; needs clips (experimental)."""
    gan_critic_weight: NonNegative = 1e-2
    """Weight of the discriminator's own loss in the critic's (experimental)."""
    direction: Literal["dmd", "sid", "decoupled"] = "dmd"
    """Where samples move: along fake - real (dmd), down the score identity loss through teacher and critic (sid), or
    along guidance and fake - real at noise levels apart (decoupled). sid and decoupled are experimental."""
    sid_alpha: NonNegative = 1.0
    """For sid: weight alpha of the squared difference of teacher and critic."""
    regulariser_weight: NonNegative = 1.0
    """For decoupled: weight of fake - real, both without guidance; guidance has the weight guidance_scale - 1."""
    guidance_tau_shift: Shift = 5.0
    """For decoupled: shift towards noise of the noise levels at which guidance is taken."""
    guidance_tau_range: tuple[PositiveFraction, PositiveFraction] = (0.02, 0.98)
    """For decoupled: range to which they are clipped."""
    runs_untrained: ClassVar[tuple[str, ...]] = ("before",)

    def check(self, setup: MethodSetup) -> None:
        if self.direction != "dmd" and self.gan_weight:
            raise UserError(f"algorithm.gan_weight must be 0 with algorithm.direction {self.direction}")
        if self.direction == "decoupled" and self.guidance_scale in (1, (1, 1)):
            raise UserError(
                "algorithm.guidance_scale must not be 1 with algorithm.direction decoupled: there is no guidance to "
                "follow apart. Set it, or algorithm.direction dmd"
            )
        if self.guidance_tau_range[0] >= self.guidance_tau_range[1]:
            raise UserError(f"algorithm.guidance_tau_range must rise, not {self.guidance_tau_range}")
        if self.update_schedule == "exclusive" and self.student_every == 1:
            raise UserError(
                "algorithm.update_schedule exclusive never updates the critic with algorithm.student_every 1: raise it"
            )
        self.check_scores(setup, "algorithm")
        if self.direction == "decoupled":
            setup.check_noise_levels("critic", self.guidance_tau_law, partner="teacher")
        setup.require_trained("student", [setup.sampler.sigmas()[:-1].tolist()], "sampler.step_sigmas")

    @property
    def teacher_guidance(self) -> GuidanceScale | None:
        return self.guidance_scale

    @property
    def guidance_tau_law(self) -> ShiftedGrid:
        """Law of the noise levels at which the decoupled direction takes guidance."""
        return ShiftedGrid(self.guidance_tau_shift, self.guidance_tau_range)

    def updates_at(self, step: int) -> tuple[bool, bool]:
        """Return whether the student and whether the critic is updated in a training step."""
        student = step >= self.critic_warmup_steps and (step - self.critic_warmup_steps) % self.student_every == 0
        return student, self.update_schedule == "every_step" or not student

    def updates(self, role: str, steps: int, sampler: SamplerConfig) -> int:
        student = -(-max(0, steps - self.critic_warmup_steps) // self.student_every)
        if role == "student":
            return student
        return steps if self.update_schedule == "every_step" else steps - student


@dataclass(frozen=True)
class Direction:
    """Where matching moves samples, without gradient, and how teacher and critic compare there."""

    gradient: Latents  # g of `distribution_matching_gradient`
    weight: float  # of the loss, from the law that the noise levels were drawn from
    metrics: dict[str, Tensor]
    tau: PerSample  # noise levels
    compared: dict[str, Latents]  # x_tau, and the x0 that teacher (real) and critic (fake) predict from it
    gan_loss: PerSample | None = None  # of a discriminator
    gan_gradient: Latents | None = None  # of its mean with respect to the samples
    is_distance: bool = True  # whether 1/2 mean g^2 is a distance of teacher and critic, logged as dmd_loss


FindDirection = Callable[[Latents, Batch, Streams], Direction]  # of the student's samples


class DistributionMatching:
    """The losses that move the student's samples towards the teacher, with the critic as the student's own score."""

    def __init__(
        self,
        config: ScoreConfig,
        teacher: Frozen,
        critic: Critic,
        *,
        gan_weight: float = 0.0,
        gan_critic_weight: float = 0.0,
    ) -> None:
        """The weights are those of the discriminator in the student's and in the critic's loss; 0 has none.

        `direction` may be replaced by another one.
        """
        self.config, self.teacher, self.critic = config, teacher, critic
        self.gan_weight, self.gan_critic_weight = gan_weight, gan_critic_weight
        self.direction: FindDirection = self.score_difference

    def student_loss(self, x0: Latents, batch: Batch, rng: Streams, mask: Tensor | None = None) -> Loss:
        """Return the loss that moves `x0` along its direction; `x0` keeps its graph."""
        loss, gan, level_weight, metrics = self.student_terms(x0, batch, rng, mask)
        if gan is not None:
            loss = loss + self.gan_weight * gan
        return Loss("student", level_weight * loss, metrics=metrics)

    def student_terms(
        self, x0: Latents, batch: Batch, rng: Streams, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, float, dict[str, Tensor]]:
        """Return the losses of matching and of a discriminator apart, the weight of both, and metrics.

        The weight is that of the law of the noise levels. The discriminator's loss has the gradient of the mean of
        softplus(-D) with respect to the samples, and another value.
        """
        direction = self.direction(x0, batch, rng)
        loss = distribution_matching_loss(x0, direction.gradient, mask)
        metrics = {} if direction.gan_loss is None else {"gan_loss": direction.gan_loss}
        metrics |= direction.metrics | ({"dmd_loss": loss.detach()} if direction.is_distance else {})
        gan = None if direction.gan_gradient is None else (x0 * direction.gan_gradient).sum()
        return loss, gan, direction.weight, metrics

    def score_difference(self, x0: Latents, batch: Batch, rng: Streams) -> Direction:
        """Return fake - real, normalised, at one noise level per sample; networks and samples get no gradient."""
        noise = rng.noise("student tau noise", batch.sample_ids, batch.latent_shape).to(x0)
        sigma, weight = self._noise_levels("student tau", batch, rng)
        x = x0.detach().requires_grad_(self.gan_weight > 0)
        x_tau = add_noise(x, noise, sigma)
        with torch.no_grad():
            scale = self.config.guidance_scale
            guided = self.teacher.guided_velocity(x_tau, sigma, batch.cond, batch.uncond, scale)
            real = x0_from_velocity(x_tau, guided, sigma)
        gan_loss = gan_gradient = None
        if self.gan_weight:
            velocity, logits = self.critic.velocity_and_logits(x_tau, sigma, batch.cond)
            gan = softplus(-logits)
            (gan_gradient,) = torch.autograd.grad(gan.mean(), x)  # with respect to the samples; the critic gets none
            gan_loss = gan.detach()
        else:
            with torch.no_grad():
                velocity = self.critic.velocity(x_tau, sigma, batch.cond)
        fake = x0_from_velocity(x_tau, velocity, sigma).detach()
        gradient = distribution_matching_gradient(x.detach(), real, fake)
        metrics = score_metrics(velocity.detach(), guided, noise - x.detach(), fake - real, sigma)
        compared = {"x_tau": x_tau.detach(), "real": real, "fake": fake}
        return Direction(gradient, weight, metrics, sigma, compared, gan_loss, gan_gradient)

    def critic_loss(self, x0: Latents, batch: Batch, rng: Streams, weights: PerSample | None = None) -> Loss:
        """Return flow matching on the student's samples, plus the discriminator's loss when the GAN term is on.

        With weights it is the mean of weight x error: weights of mean 1 make the critic learn the reweighted samples.
        """
        noise = rng.noise("critic tau noise", batch.sample_ids, batch.latent_shape).to(x0)
        sigma, weight = self._noise_levels("critic tau", batch, rng)
        x_tau, cond = add_noise(x0, noise, sigma), batch.cond
        metrics = {}
        if self.gan_weight:
            real_noise = rng.noise("real tau noise", batch.sample_ids, batch.latent_shape).to(x0)
            x_both = torch.cat([x_tau, add_noise(batch.latents, real_noise, sigma)])
            both, logits = self.critic.velocity_and_logits(x_both, torch.cat([sigma, sigma]), cond.cat(cond))
            velocity, (fake_logits, real_logits) = both.chunk(2)[0], logits.chunk(2)
            gan = softplus(fake_logits) + softplus(-real_logits)
            metrics["gan_critic_loss"] = gan.detach()
        else:
            velocity = self.critic.velocity(x_tau, sigma, cond)
        flow = (velocity - (noise - x0)).square().flatten(1).mean(1)
        error = flow if weights is None else weights.to(flow, non_blocking=True) * flow
        loss = error.mean() + (self.gan_critic_weight * gan.mean() if self.gan_weight else 0.0)
        metrics |= {"critic_loss": flow.detach(), "sample_power": x0.square().flatten(1).mean(1)}
        return Loss("critic", weight * loss, metrics=metrics)

    def _noise_levels(self, name: str, batch: Batch, rng: Streams) -> tuple[Tensor, float]:
        return self.critic.draw_noise_levels(name, batch.sample_ids, rng, self.config.tau_law, self.teacher)


class MatchingMethod(Method, shared=True):
    """A method whose student's samples follow the direction of `matching`; `tracking.rollouts_every` shows it."""

    student: Trainable
    teacher: Frozen
    critic: Critic
    matching: DistributionMatching


def simulated(student: Trainable, sampler: SamplerConfig, batch: Batch, rng: Streams, purpose: str) -> Latents:
    """Return the x0 of samples from noise at a step of the sampler, drawn equal on all ranks; its call has a graph."""

    def draw(name: str | int) -> Latents:
        return rng.noise(f"{purpose} {name}", batch.sample_ids, batch.latent_shape).to(student.device)

    exits = trainable_steps(student, sampler)
    last = exits[int(rng.shared.integers(len(exits)))]
    return predict_at(student, draw("noise"), batch, sampler, draw, last)


def matching_losses(
    config: MatchingConfig,
    matching: DistributionMatching,
    step: int,
    batch: Batch,
    rng: Streams,
    sample: Sample,
    mask_of: Callable[[Latents], Tensor | None] = lambda x0: None,
    seen_as: Callable[[Batch, Latents], Batch] = lambda batch, x0: batch,
) -> Iterator[Loss]:
    """Yield the losses of a training step by the update schedule: the student's first, then the critic's.

    `seen_as` returns the batch with the conditions under which teacher and critic see the samples.
    """
    student, critic = config.updates_at(step)
    if student:
        x0 = sample(batch, rng, "student")
        yield matching.student_loss(x0, seen_as(batch, x0), rng, mask_of(x0))
    if critic:
        if not (student and config.critic_samples == "shared"):
            with torch.no_grad():
                x0 = sample(batch, rng, "critic")
        yield matching.critic_loss(x0.detach(), seen_as(batch, x0), rng)


def distribution_matching_gradient(
    x0: Float[Tensor, "b ..."], real: Float[Tensor, "b ..."], fake: Float[Tensor, "b ..."]
) -> Float[Tensor, "b ..."]:
    """Return g = (fake - real) / mean|x0 - real|, the mean over each sample's elements (DMD, arXiv:2311.18828, eq. 7,
    8).

    `real` and `fake` are the x0 that teacher and critic predict, without gradient. 0 / 0 is 0; NaN stays NaN.
    """
    x0, real, fake = promote(x0), promote(real), promote(fake)
    normaliser = (x0 - real).abs().flatten(1).mean(1)
    gradient = (fake - real) / per_sample(normaliser, x0)
    return torch.where(fake == real, 0.0, gradient).detach()


def distribution_matching_loss(
    x0: Float[Tensor, "b ..."], gradient: Float[Tensor, "b ..."], mask: Shaped[Tensor, "..."] | None = None
) -> Float[Tensor, ""]:
    """Return 1/2 mean (x0 - sg(x0 - g))^2, whose gradient is g / numel; with a mask, the mean over its elements.

    The value is 1/2 mean g^2: the distance between teacher and critic, not the quality of the samples.
    """
    x0, gradient = promote(x0), promote(gradient)
    error = 0.5 * (x0 - (x0 - gradient).detach()).square()
    if mask is None:
        return error.mean()
    selected = torch.broadcast_to(mask.to(error, non_blocking=True), error.shape)
    return (error * selected).sum() / selected.sum()


def score_metrics(
    critic: Latents, teacher: Latents, target: Latents, difference: Latents, sigma: PerSample
) -> dict[str, Tensor]:
    """Return how the velocities of critic and teacher compare with the target, and where fake and real differ."""
    errors = [(seen - target).square().flatten(1).mean(1) for seen in (critic, teacher)]
    return {"critic_to_teacher_error": errors[0] / errors[1], **_gaps(difference, sigma)}


def _gaps(difference: Tensor, sigma: Tensor) -> dict[str, Tensor]:
    """Return mean |fake - real| of the samples at low, middle and high noise levels."""
    gap = difference.abs().flatten(1).mean(1)
    third = (sigma * 3).floor().clamp(max=2).tolist()  # the noise levels are on the CPU
    rows = {name: [j for j, of in enumerate(third) if of == i] for i, name in enumerate(("low", "mid", "high"))}
    return {f"gap_{name}": take_rows(gap, index) for name, index in rows.items()}
