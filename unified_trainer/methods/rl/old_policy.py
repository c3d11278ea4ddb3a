"""The base of methods that train the velocity on noised samples of an old policy: the forward process, no densities."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Decay, Fraction, NonNegative
from unified_trainer.basics.types import Batch, Latents, PerSample, take_rows
from unified_trainer.methods.base import Loss, MethodSetup, Metrics
from unified_trainer.methods.rl.dynamic_sampling import with_replacement
from unified_trainer.methods.rl.forward_process import ForwardConfig, generate_samples
from unified_trainer.methods.rl.groups import GroupConfig, Groups
from unified_trainer.methods.rl.minibatches import Minibatch
from unified_trainer.methods.rl.reference_kl import check_reference
from unified_trainer.methods.rl.rollout_method import RolloutMethod
from unified_trainer.methods.rl.rollouts import ScoredSamples
from unified_trainer.methods.rl.updates import LossAt, MinibatchLoss, update_losses
from unified_trainer.numerics.flow import Sigma, add_noise
from unified_trainer.numerics.kl import velocity_kl
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.weight_copy import WeightCopy
from unified_trainer.sampling.solver import SamplerConfig, policy_velocity


@dataclass(frozen=True)
class OldPolicyConfig(ForwardConfig, GroupConfig):
    """Settings of the groups, of the old policy and of the KL."""

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
                f"sampler.guidance_scale must be 1, not {sampler.guidance_scale}: the method trains the velocity that "
                "it samples with"
            )


class NoisedSamples(NamedTuple):
    """Samples of one pass at one noise level, and the velocities of student and old policy there."""

    x0: Latents
    noise: Latents
    x_t: Latents
    sigma: Sigma
    velocity: Latents
    velocity_old: Latents  # without gradient
    advantages: PerSample  # clipped at advantage_clip


class OldPolicyMethod(RolloutMethod, shared=True):
    """Sample with the old policy, compare groups, and train the student's velocity on noised samples.

    A method declares the roles student, old and reference, sets `sampled_by` to old, and defines `objective`.
    """

    old: WeightCopy
    sample = staticmethod(generate_samples)

    def __init__(self, config: OldPolicyConfig, sampler: SamplerConfig, **parts: Any) -> None:
        super().__init__(config, sampler, **parts)
        check_reference(config.kl_coefficient, self.reference)
        self.groups = Groups(config, self.reward, self.loader)
        self.rollouts = with_replacement(self.rollouts, config, self.reward, self.loader)

    def objective(self, samples: NoisedSamples) -> tuple[PerSample, dict[str, PerSample]]:
        """Return the loss of each sample without the KL to the reference, and metrics of each sample."""
        raise NotImplementedError

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        levels = self.config.levels(self.student, self.sampler, rng)
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
        """The objective at one noise level, plus the KL, weighted over the minibatch."""
        rows = minibatch.rows.tolist()
        batch, x0 = samples.batch.take(rows), samples.rollout.end(rows)
        sigma = self.sampler.sigmas()[s]
        noise = rng.noise(f"forward {s}", batch.sample_ids, batch.latent_shape).to(x0)
        x_t = add_noise(x0, noise, sigma)
        velocity = policy_velocity(self.student, x_t, sigma, batch, self.sampler, x0)
        velocity_old = policy_velocity(self.old, x_t, sigma, batch, self.sampler, x0)
        own = advantages[minibatch.rows].to(x0.device, non_blocking=True)
        loss, more = self.objective(NoisedSamples(x0, noise, x_t, sigma, velocity, velocity_old, own))
        seen = {"loss": loss, "policy_gap": velocity_kl(velocity, velocity_old), **more}
        if self.config.kl_coefficient:
            assert self.reference is not None  # `check_reference`
            kl = velocity_kl(velocity, policy_velocity(self.reference, x_t, sigma, batch, self.sampler, x0))
            loss, seen["kl"] = loss + self.config.kl_coefficient * kl, kl
        real = minibatch.real.nonzero().flatten().tolist()
        metrics = {name: take_rows(value.detach(), real) for name, value in seen.items()}
        return MinibatchLoss((minibatch.weights.to(loss, non_blocking=True) * loss).sum(), metrics)
