"""Matching the teacher's distribution: what DMD2 and self-forcing share (arXiv:2311.18828, arXiv:2405.14867)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn.functional import softplus

from unified_trainer.data.batch_plan import BatchPlan
from unified_trainer.methods.base import Loss
from unified_trainer.numerics.flow import (
    GuidanceScale,
    add_noise,
    per_sample,
    promote,
    shift_sigma,
    x0_from_velocity,
)
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.critic import Critic
from unified_trainer.roles.experts import Balance, ExpertLayout, check_balance, check_guidance, one_side
from unified_trainer.roles.role import Frozen
from unified_trainer.sampling import SamplerConfig
from unified_trainer.types import Batch, Latents, PerSample

TAU_LEVELS = 1000  # noise levels are drawn from this many, as the published implementations do


@dataclass(frozen=True)
class MatchingConfig:
    batch_size: int = 32  # samples per update, over all ranks
    micro_batch: int = 32  # samples per backward pass
    guidance_scale: GuidanceScale = 3.0  # of the teacher: uncond + w (cond - uncond); two numbers: of its two experts
    tau_shift: float = 5.0  # of the noise levels at which teacher and critic are compared, towards noise
    tau_range: tuple[float, float] = (0.02, 0.98)  # those noise levels are clipped to this
    expert_balance: Balance = "mixed"  # those noise levels where critic or teacher has two experts: of both in a batch,
    # or of one of them, drawn as often as it has them (natural) or each as often (equal, weighted back)
    student_every: int = 5  # the student moves in every so many training steps
    update_schedule: Literal["every_step", "exclusive"] = (
        "every_step"  # the critic moves in all steps, or in the others
    )
    critic_warmup_steps: int = 0  # training steps at the start in which the critic moves alone
    critic_samples: Literal["fresh", "shared"] = "fresh"  # after a student update: from the moved student, or its own
    gan_weight: float = 0.0  # of the discriminator in the student's loss, 3e-3 in DMD2; needs clips, as data has them
    gan_critic_weight: float = 1e-2  # of the discriminator's own loss in the critic's

    def check(self, sampler: SamplerConfig) -> None:
        low, high = self.tau_range
        if not 0 < low < high <= 1:
            raise ValueError(f"algorithm.tau_range must lie in (0, 1] and rise, not {self.tau_range}")
        if self.tau_shift <= 0:
            raise ValueError(f"algorithm.tau_shift must be above 0, not {self.tau_shift}")
        if min(self.gan_weight, self.gan_critic_weight) < 0:
            raise ValueError("algorithm.gan_weight and algorithm.gan_critic_weight must not be negative")
        if self.student_every < 1 or self.critic_warmup_steps < 0:
            raise ValueError("algorithm.student_every must be at least 1 and algorithm.critic_warmup_steps at least 0")
        if self.update_schedule == "exclusive" and self.student_every == 1:
            raise ValueError(
                "algorithm.update_schedule exclusive with student_every 1 never moves the critic: raise the latter"
            )
        sampler.check_distilled()

    def check_experts(self, sampler: SamplerConfig, layouts: Mapping[str, ExpertLayout]) -> None:
        check_guidance("algorithm.guidance_scale", self.guidance_scale, "teacher", layouts["teacher"])
        levels = sampler.sigmas()[:-1].tolist()
        layouts["student"].refuse_idle([levels], "the sampler", "Train the other expert, or change sampler.step_sigmas")
        boundary = layouts["critic"].boundary or layouts["teacher"].boundary
        check_balance(self.expert_balance, boundary and self.share_above(boundary), "critic and teacher")

    def share_above(self, boundary: float) -> float:
        """P(tau >= boundary)."""
        middles = (torch.arange(TAU_LEVELS, dtype=torch.float64) + 0.5) / TAU_LEVELS
        return float((noise_levels(middles, self.tau_shift, self.tau_range) >= boundary).double().mean())

    def plan(self) -> BatchPlan:
        return BatchPlan.one_update(self.batch_size, self.micro_batch)

    def updates_at(self, step: int) -> tuple[bool, bool]:
        """Whether the student and whether the critic moves in this training step."""
        student = step >= self.critic_warmup_steps and (step - self.critic_warmup_steps) % self.student_every == 0
        return student, self.update_schedule == "every_step" or not student


class DistributionMatching:
    """The losses that pull the student's samples towards the teacher, with the critic as the student's own score."""

    def __init__(self, config: MatchingConfig, teacher: Frozen, critic: Critic) -> None:
        self.config, self.teacher, self.critic = config, teacher, critic

    def student_loss(self, x0: Latents, batch: Batch, rng: Streams, mask: Tensor | None = None) -> Loss:
        """The student's step along fake - real at one noise level per sample; the graph is that of `x0` alone."""
        noise = rng.noise("student tau noise", batch.sample_ids, batch.latent_shape).to(x0)
        sigma, weight = self._levels("student tau", batch, rng)
        x = x0.detach().requires_grad_(self.config.gan_weight > 0)
        x_tau = add_noise(x, noise, sigma)
        with torch.no_grad():
            guided = self.teacher.guided_velocity(x_tau, sigma, batch.cond, batch.uncond, self.config.guidance_scale)
            real = x0_from_velocity(x_tau, guided, sigma)
        metrics = {}
        if self.config.gan_weight:
            velocity, logits = self.critic.velocity_and_logits(x_tau, sigma, batch.cond)
            gan = softplus(-logits)
            (gan_gradient,) = torch.autograd.grad(gan.mean(), x)  # to the samples only: the critic learns nothing here
            metrics["gan_loss"] = gan.detach()
        else:
            with torch.no_grad():
                velocity = self.critic.velocity(x_tau, sigma, batch.cond)
        fake = x0_from_velocity(x_tau, velocity, sigma).detach()
        gradient = distribution_matching_gradient(x.detach(), real, fake)
        loss = distribution_matching_loss(x0, gradient, mask)
        target = noise - x.detach()
        errors = [(seen - target).square().flatten(1).mean(1) for seen in (velocity.detach(), guided)]
        alarm = {"critic_to_teacher_error": errors[0] / errors[1]}
        metrics |= {"dmd_loss": loss.detach()} | alarm | _gaps(fake - real, sigma)
        if self.config.gan_weight:
            loss = loss + self.config.gan_weight * (x0 * gan_gradient).sum()
        return Loss("student", weight * loss, metrics=metrics)

    def critic_loss(self, x0: Latents, batch: Batch, rng: Streams) -> Loss:
        """Flow matching on the student's samples, and telling them from clips when the GAN term is on."""
        noise = rng.noise("critic tau noise", batch.sample_ids, batch.latent_shape).to(x0)
        sigma, weight = self._levels("critic tau", batch, rng)
        x_tau, cond = add_noise(x0, noise, sigma), batch.cond
        metrics = {}
        if self.config.gan_weight:
            real_noise = rng.noise("real tau noise", batch.sample_ids, batch.latent_shape).to(x0)
            x_both = torch.cat([x_tau, add_noise(batch.latents, real_noise, sigma)])
            both, logits = self.critic.velocity_and_logits(x_both, torch.cat([sigma, sigma]), cond.cat(cond))
            velocity, (fake_logits, real_logits) = both.chunk(2)[0], logits.chunk(2)
            gan = softplus(fake_logits) + softplus(-real_logits)
            metrics["gan_critic_loss"] = gan.detach()
        else:
            velocity = self.critic.velocity(x_tau, sigma, cond)
        flow = (velocity - (noise - x0)).square().flatten(1).mean(1)
        loss = flow.mean() + (self.config.gan_critic_weight * gan.mean() if self.config.gan_weight else 0.0)
        metrics |= {"critic_loss": flow.detach(), "sample_power": x0.square().flatten(1).mean(1)}
        return Loss("critic", weight * loss, metrics=metrics)

    def _levels(self, name: str, batch: Batch, rng: Streams) -> tuple[PerSample, float]:
        """One noise level for each sample, and the weight of the loss at them."""
        config = self.config
        u, weight = rng.uniform(name, batch.sample_ids), 1.0
        if config.expert_balance != "mixed":
            share = config.share_above(self.critic.boundary or self.teacher.boundary)
            u, weight = one_side(u, share, config.expert_balance, rng.shared)
        return noise_levels(u, config.tau_shift, config.tau_range), weight


def distribution_matching_gradient(
    x0: Float[Tensor, "b ..."], real: Float[Tensor, "b ..."], fake: Float[Tensor, "b ..."]
) -> Float[Tensor, "b ..."]:
    """g = (fake - real) / mean|x0 - real|, the mean over each sample's elements (DMD, arXiv:2311.18828, eq. 7 and 8).

    `real` and `fake` are the x0 that teacher and critic predict. 0 / 0 is 0; a prediction that is NaN stays one.
    """
    x0, real, fake = promote(x0), promote(real), promote(fake)
    normaliser = (x0 - real).abs().flatten(1).mean(1)
    gradient = (fake - real) / per_sample(normaliser, x0)
    return torch.where(fake == real, 0.0, gradient).detach()


def distribution_matching_loss(
    x0: Float[Tensor, "b ..."], gradient: Float[Tensor, "b ..."], mask: Shaped[Tensor, "..."] | None = None
) -> Float[Tensor, ""]:
    """1/2 mean (x0 - sg(x0 - g))^2, whose gradient is g / numel; with a mask the mean is over what it selects.

    The value is 1/2 mean g^2: it says how far teacher and critic are apart, not how good the samples are.
    """
    x0, gradient = promote(x0), promote(gradient)
    error = 0.5 * (x0 - (x0 - gradient).detach()).square()
    if mask is None:
        return error.mean()
    selected = torch.broadcast_to(mask.to(error), error.shape)
    return (error * selected).sum() / selected.sum()


def noise_levels(u: PerSample, shift: float, clip: tuple[float, float]) -> PerSample:
    """tau = clip(shift(k / 1000)) with k = floor(1000 u): the law under which teacher and critic are compared."""
    return shift_sigma((u * TAU_LEVELS).floor() / TAU_LEVELS, shift).clamp(*clip)


def _gaps(difference: Tensor, sigma: PerSample) -> dict[str, Tensor]:
    """Mean |fake - real| of the samples at low, middle and high noise levels."""
    gap = difference.abs().flatten(1).mean(1).cpu()
    third = (sigma * 3).floor().clamp(max=2)
    return {f"gap_{name}": gap[third == i] for i, name in enumerate(("low", "mid", "high"))}
