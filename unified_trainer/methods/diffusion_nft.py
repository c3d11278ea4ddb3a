"""DiffusionNFT: reinforcement learning on the forward process, from better and worse samples (arXiv:2509.16117)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Decay, Fraction, NonNegative, Positive, PositiveFraction
from unified_trainer.basics.types import Batch, Latents, PerSample, Rollout, take_rows
from unified_trainer.methods.base import Loss, MethodSetup, Metrics, initial_copy, trained, updated_copy
from unified_trainer.methods.rl.dynamic_sampling import with_replacement
from unified_trainer.methods.rl.groups import GroupConfig, Groups
from unified_trainer.methods.rl.minibatches import Minibatch
from unified_trainer.methods.rl.policy import initial_noise
from unified_trainer.methods.rl.reference_kl import check_reference
from unified_trainer.methods.rl.replay import transition_noise
from unified_trainer.methods.rl.rollout_method import RolloutMethod
from unified_trainer.methods.rl.rollouts import ScoredSamples
from unified_trainer.methods.rl.updates import LossAt, MinibatchLoss, update_losses
from unified_trainer.numerics.flow import Sigma, add_noise, sample_mean, x0_from_velocity
from unified_trainer.numerics.kl import velocity_kl
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.role import Role
from unified_trainer.roles.weight_copy import WeightCopy
from unified_trainer.sampling.solver import SamplerConfig, generate, policy_velocity, trainable_steps

LEAST_ERROR = 1e-5  # smallest divisor of a loss


@dataclass(frozen=True)
class DiffusionNFTConfig(GroupConfig):
    beta: Positive = 1.0
    """Distance of the two implicit policies from the old policy, in units of the student's own distance."""
    timestep_fraction: PositiveFraction = 1.0
    """Fraction of the sampler's noise levels trained at, drawn anew in each training step."""
    old_decay: Decay = 0.5
    """Largest decay of the old policy, which samples: an average of the student, updated once a training step."""
    old_decay_rise: Fraction = 0.001
    """Increase of that decay in each training step, from 0."""
    kl_coefficient: NonNegative = 0.0
    """Coefficient of mean (v - v_ref)^2 to the student as the run started; 0 needs no reference."""

    def check(self, setup: MethodSetup) -> None:
        super().check(setup)
        sampler = setup.sampler
        if sampler.guidance_scale != 1:
            raise UserError(
                f"sampler.guidance_scale must be 1, not {sampler.guidance_scale}: diffusion_nft trains the velocity "
                "that it samples with"
            )
        if sampler.chunks.causal:
            raise UserError(
                "sampler.chunks.chunk_frames must be 0 for diffusion_nft; dance_grpo trains causal students"
            )
        if self.init_same_noise and (sampler.solver == "ode" or sampler.num_steps == 1):
            raise UserError(
                "algorithm.init_same_noise must be false for diffusion_nft with sampler.solver ode or one network "
                "call: no other noise tells the samples of a prompt apart, so that all of a group would be equal, and "
                "no advantage would be left. Set --algorithm.no-init-same-noise, or sampler.solver sde"
            )
        setup.require_trained("student", [sampler.sigmas()[:-1].tolist()], "sampler.num_steps")


class DiffusionNFT(RolloutMethod):
    """Sample with the old policy, compare groups, and train the student's velocity on noised samples."""

    config_class = DiffusionNFTConfig
    roles = {
        "student": trained(),
        "old": updated_copy("student"),
        "reference": initial_copy("student", when=lambda config: config.kl_coefficient > 0),
    }
    sampled_by = "old"
    old: WeightCopy

    def __init__(self, config: DiffusionNFTConfig, sampler: SamplerConfig, **parts: Any) -> None:
        super().__init__(config, sampler, **parts)
        check_reference(config.kl_coefficient, self.reference)
        self.groups = Groups(config, self.reward, self.loader)
        self.rollouts = with_replacement(self.rollouts, config, self.reward, self.loader)

    @staticmethod
    def sample(
        config: DiffusionNFTConfig, sampler: SamplerConfig, role: Role, batch: Batch, step: int, rng: Streams
    ) -> Rollout:
        def draw(s: int) -> Latents:
            return transition_noise(rng, batch, s).to(role.device)

        noise, equal = initial_noise(rng, batch, same=config.init_same_noise)
        return Rollout.from_x0(generate(role, noise.to(role.device), batch, sampler, draw, equal))

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        calls = trainable_steps(self.student, self.sampler)
        count = max(1, round(self.config.timestep_fraction * len(calls)))
        levels = sorted(calls[i] for i in rng.shared.permutation(len(calls))[:count])
        decay = min(self.config.old_decay, self.config.old_decay_rise * step)
        metrics: Metrics = {"old_decay": decay}
        samples = self.roll_out(batch, step, rng, mesh, metrics)
        advantages = self.groups.advantages(samples, None, metrics)

        def start_update(minibatches: list[Minibatch]) -> LossAt:
            return lambda minibatch, s, last: self._loss(samples, advantages.values, minibatch, s, rng)

        yield from update_losses(advantages, levels, start_update, metrics)
        self.old.update_from(self.student, decay)

    def _loss(
        self, samples: ScoredSamples, advantages: PerSample, minibatch: Minibatch, s: int, rng: Streams
    ) -> MinibatchLoss:
        """advantage_clip times the loss at one noise level, plus the KL, weighted over the minibatch."""
        config = self.config
        rows = minibatch.rows.tolist()
        batch, x0 = samples.batch.take(rows), samples.rollout.end(rows)
        sigma = self.sampler.sigmas()[s]
        x_t = add_noise(x0, rng.noise(f"forward {s}", batch.sample_ids, batch.latent_shape).to(x0), sigma)
        velocity = policy_velocity(self.student, x_t, sigma, batch, self.sampler)
        velocity_old = policy_velocity(self.old, x_t, sigma, batch, self.sampler)
        optimality = (advantages[minibatch.rows] / (2 * config.advantage_clip) + 0.5).clamp(0, 1)
        optimality = optimality.to(x0.device, non_blocking=True)
        loss = config.advantage_clip * contrast(x0, x_t, sigma, velocity, velocity_old, optimality, config.beta)
        seen = {"loss": loss, "policy_gap": velocity_kl(velocity, velocity_old)}
        if config.kl_coefficient:
            assert self.reference is not None  # `check_reference`
            kl = velocity_kl(velocity, policy_velocity(self.reference, x_t, sigma, batch, self.sampler))
            loss, seen["kl"] = loss + config.kl_coefficient * kl, kl
        real = minibatch.real.nonzero().flatten().tolist()
        metrics = {name: take_rows(value.detach(), real) for name, value in seen.items()}
        return MinibatchLoss((minibatch.weights.to(loss, non_blocking=True) * loss).sum(), metrics)


def contrast(
    x0: Latents,
    x_t: Latents,
    sigma: Sigma,
    velocity: Latents,
    velocity_old: Latents,
    optimality: PerSample,
    beta: float,
) -> PerSample:
    """Return (r |x0+ - x0|^2 / w+ + (1 - r) |x0- - x0|^2 / w-) / beta, means over elements (arXiv:2509.16117).

    v+ = beta v + (1 - beta) v_old, v- = (1 + beta) v_old - beta v, x0+- = x_t - sigma v+-, and w+- = mean |x0+- - x0|
    of the sample (`sample_mean`) without gradient; r is the optimality in [0, 1].
    """
    positive = x0_from_velocity(x_t, beta * velocity + (1 - beta) * velocity_old, sigma)
    negative = x0_from_velocity(x_t, (1 + beta) * velocity_old - beta * velocity, sigma)
    return (optimality * _relative_error(positive, x0) + (1 - optimality) * _relative_error(negative, x0)) / beta


def _relative_error(x0_hat: Latents, x0: Latents) -> PerSample:
    error = (x0_hat - x0).flatten(1)
    return error.square().mean(1) / sample_mean(error.detach().abs()).clamp(min=LEAST_ERROR).to(error)
