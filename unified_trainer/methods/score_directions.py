"""Other directions of distribution matching: score identity distillation, and DMD in two parts with laws of their own.

SiD, arXiv:2404.04057; Decoupled DMD, arXiv:2511.22677. `algorithm.direction` names the one of a run.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.types import Batch, Latents, PerSample
from unified_trainer.methods.base import frozen, trained
from unified_trainer.methods.distribution_matching import (
    Direction,
    DistributionMatching,
    MatchingConfig,
    MatchingMethod,
    distribution_matching_gradient,
    score_metrics,
)
from unified_trainer.numerics.flow import add_noise, per_sample, promote, sample_mean, x0_from_velocity
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.critic import Critic
from unified_trainer.roles.role import Frozen
from unified_trainer.sampling.solver import SamplerConfig


def matching_of(config: MatchingConfig, teacher: Frozen, critic: Critic) -> DistributionMatching:
    """Return the losses of a run, with the direction that its settings name."""
    matching = DistributionMatching(
        config, teacher, critic, gan_weight=config.gan_weight, gan_critic_weight=config.gan_critic_weight
    )
    if config.direction == "sid":
        matching.direction = ScoreIdentity(config, teacher, critic)
    elif config.direction == "decoupled":
        matching.direction = Decoupled(config, teacher, critic)
    return matching


class DirectedMethod(MatchingMethod, shared=True):
    """A matching method whose settings name the direction; the critic starts from the teacher."""

    roles = {"student": trained(), "teacher": frozen(), "critic": trained(Critic, starts_from="teacher")}
    trained_for_sampler = True

    def __init__(self, config: MatchingConfig, sampler: SamplerConfig, **parts: Any) -> None:
        super().__init__(config, sampler, **parts)
        self.matching = matching_of(config, self.teacher, self.critic)


class ScoreIdentity:
    """g = numel dL/dx, so that the samples' gradient g / numel is that of L = `score_identity_loss`(x, r, f, alpha).

    r and f are the x0 of teacher and critic at x_tau. 1/2 mean g^2 measures nothing, and L is logged as sid_loss.
    """

    def __init__(self, config: MatchingConfig, teacher: Frozen, critic: Critic) -> None:
        self.config, self.teacher, self.critic = config, teacher, critic
        teacher.keeps_graph = True  # its weights stay frozen; the samples before it get a gradient

    def __call__(self, x0: Latents, batch: Batch, rng: Streams) -> Direction:
        config = self.config
        noise = rng.noise("student tau noise", batch.sample_ids, batch.latent_shape).to(x0)
        tau, weight = self.critic.draw_noise_levels("student tau", batch.sample_ids, rng, config.tau_law, self.teacher)
        with torch.enable_grad():
            x = x0.detach().requires_grad_()
            x_tau = add_noise(x, noise, tau)
            v_r = self.teacher.guided_velocity(x_tau, tau, batch.cond, batch.uncond, config.guidance_scale)
            v_f = self.critic.velocity(x_tau, tau, batch.cond)
            r, f = (x0_from_velocity(x_tau, v, tau) for v in (v_r, v_f))
            loss = score_identity_loss(x, r, f, config.sid_alpha)
            (slope,) = torch.autograd.grad(loss.sum(), x)  # the weights of teacher and critic get none
        metrics = score_metrics(v_f.detach(), v_r.detach(), noise - x0.detach(), (f - r).detach(), tau)
        metrics["sid_loss"] = loss.detach()
        compared = {"x_tau": x_tau.detach(), "real": r.detach(), "fake": f.detach()}
        return Direction(x[0].numel() * slope, weight, metrics, tau, compared, is_distance=False)


class Decoupled:
    """The difference of critic and teacher without guidance, and the teacher's guidance at a noise level of its own."""

    def __init__(self, config: MatchingConfig, teacher: Frozen, critic: Critic) -> None:
        self.config, self.teacher, self.critic = config, teacher, critic

    @torch.no_grad()
    def __call__(self, x0: Latents, batch: Batch, rng: Streams) -> Direction:
        config, teacher = self.config, self.teacher
        noise = rng.noise("student tau noise", batch.sample_ids, batch.latent_shape).to(x0)
        sigma, weight = self.critic.draw_noise_levels("student tau", batch.sample_ids, rng, config.tau_law, teacher)
        x, x_tau = x0.detach(), add_noise(x0.detach(), noise, sigma)
        velocities = teacher.velocity(x_tau, sigma, batch.cond), self.critic.velocity(x_tau, sigma, batch.cond)
        cond, fake = (x0_from_velocity(x_tau, v, sigma) for v in velocities)
        level, guide_weight = self.critic.draw_noise_levels(
            "guidance tau", batch.sample_ids, rng, config.guidance_tau_law, teacher
        )
        guided, plain = self._guided(x, batch, rng, level)
        parts = (
            config.regulariser_weight * weight * distribution_matching_gradient(x, cond, fake),
            guide_weight * distribution_matching_gradient(x, plain, 2 * plain - guided),
        )
        metrics = score_metrics(velocities[1], velocities[0], noise - x, fake - cond, sigma)
        sizes = [part.abs().flatten(1).mean(1) for part in parts]
        metrics |= {"direction_matching": sizes[0], "direction_guidance": sizes[1]}
        compared = {"x_tau": x_tau, "real": cond, "fake": fake, "guided": guided}
        return Direction(parts[0] + parts[1], 1.0, metrics, sigma, compared)

    def _guided(self, x: Latents, batch: Batch, rng: Streams, sigma: PerSample) -> tuple[Latents, Latents]:
        """The teacher's x0 with guidance and without, from one pass."""
        noise = rng.noise("guidance tau noise", batch.sample_ids, batch.latent_shape).to(x)
        x_tau = add_noise(x, noise, sigma)
        both = self.teacher.velocity(torch.cat([x_tau, x_tau]), torch.cat([sigma, sigma]), batch.cond.cat(batch.uncond))
        cond, uncond = both.chunk(2)
        guided = self.teacher.guide(cond, uncond, self.teacher.scale(sigma, self.config.guidance_scale))
        return x0_from_velocity(x_tau, guided, sigma), x0_from_velocity(x_tau, cond, sigma)


def score_identity_loss(
    x: Float[Tensor, "b ..."], r: Float[Tensor, "b ..."], f: Float[Tensor, "b ..."], alpha: float
) -> Float[Tensor, " b"]:
    """Return mean (r - f) ((r - x) - alpha (r - f)) / mean |x - r| of each sample (SiD, arXiv:2404.04057).

    x, r and f carry a gradient, the divisor does not. The numerator is (1 - alpha) |r - f|^2 + (r - f) (f - x).
    """
    x, r, f = promote(x), promote(r), promote(f)
    width = sample_mean((x - r).detach().abs()).to(x)
    return ((r - f) * ((r - x) - alpha * (r - f)) / per_sample(width, x)).flatten(1).mean(1)
