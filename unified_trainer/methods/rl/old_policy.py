"""The base of methods that train the velocity on noised samples of an old policy: the forward process, no densities."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
from unified_trainer.numerics.flow import GuidanceScale, Sigma, add_noise
from unified_trainer.numerics.kl import velocity_kl
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.role import Role
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
    kl_guidance_scale: GuidanceScale = 1.0
    """Guidance scale of v_ref; 1 is none. It has no effect without algorithm.kl_coefficient."""

    def check(self, setup: MethodSetup) -> None:
        super().check(setup)
        setup.check_guidance("student", "sampler.guidance_scale", setup.sampler.guidance_scale)
        setup.check_guidance("student", "algorithm.kl_guidance_scale", self.kl_guidance_scale)


class Update(NamedTuple):
    """The samples of an update, and where and how they are trained on."""

    samples: ScoredSamples
    advantages: PerSample  # of this rank's samples, clipped at advantage_clip
    minibatches: list[Minibatch]
    levels: list[int]  # steps of the sampler at whose noise levels is trained
    rng: Streams
    mesh: Mesh


class NoisedSamples(NamedTuple):
    """Samples of one pass at one noise level."""

    batch: Batch
    x0: Latents
    noise: Latents
    x_t: Latents
    sigma: Sigma
    advantages: PerSample  # clipped at advantage_clip


class OldPolicyMethod(RolloutMethod, shared=True):
    """Sample with the old policy, compare groups, and train the student's velocity on noised samples.

    Samples are guided by sampler.guidance_scale; the velocities that are trained and compared are not.

    A method declares the roles student, old and reference, sets `sampled_by` to old, and defines `objective`.
    """

    old: WeightCopy
    sample = staticmethod(generate_samples)

    def __init__(self, config: OldPolicyConfig, sampler: SamplerConfig, **parts: Any) -> None:
        super().__init__(config, sampler, **parts)
        check_reference(config.kl_coefficient, self.reference)
        self.unguided = replace(sampler, guidance_scale=1.0)
        self.guided = replace(sampler, guidance_scale=config.kl_guidance_scale)  # that of the reference
        self.groups = Groups(config, self.reward, self.loader)
        self.rollouts = with_replacement(self.rollouts, config, self.reward, self.loader)

    def objective(
        self, samples: NoisedSamples, velocity: Latents, velocity_old: Latents
    ) -> tuple[PerSample, dict[str, PerSample]]:
        """Return the loss of each sample without the KL to the reference, and metrics of each sample."""
        raise NotImplementedError

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        levels = self.config.levels(self.student, self.sampler, rng)
        decay = min(self.config.old_decay, self.config.old_decay_rise * step)
        metrics: Metrics = {"old_decay": decay}
        samples = self.roll_out(batch, step, rng, mesh, metrics)
        advantages = self.groups.advantages(samples, None, metrics)

        def start_update(minibatches: list[Minibatch]) -> LossAt:
            return self.start_update(Update(samples, advantages.values, minibatches, levels, rng, mesh))

        yield from update_losses(advantages, levels, start_update, metrics)
        self.old.update_from(self.student, decay)

    def start_update(self, update: Update) -> LossAt:
        """Return the function that computes the losses of an update."""

        def loss_at(minibatch: Minibatch, s: int, last: bool) -> MinibatchLoss:
            samples = self.noised(update, minibatch, s)
            velocity, velocity_old = (self.velocity(role, samples) for role in (self.student, self.old))
            loss, seen = self.objective(samples, velocity, velocity_old)
            seen["policy_gap"] = velocity_kl(velocity, velocity_old)
            return self.weighted(minibatch, samples, velocity, loss, seen)

        return loss_at

    def noised(self, update: Update, minibatch: Minibatch, s: int) -> NoisedSamples:
        """Noise the samples of a minibatch to the noise level of a step of the sampler."""
        rows = minibatch.rows.tolist()
        batch, x0 = update.samples.batch.take(rows), update.samples.rollout.end(rows)
        sigma = self.sampler.sigmas()[s]
        noise = update.rng.noise(f"forward {s}", batch.sample_ids, batch.latent_shape).to(x0)
        own = update.advantages[minibatch.rows].to(x0.device, non_blocking=True)
        return NoisedSamples(batch, x0, noise, add_noise(x0, noise, sigma), sigma, own)

    def velocity(self, role: Role, samples: NoisedSamples, sampler: SamplerConfig | None = None) -> Latents:
        """Return a role's velocity of noised samples; chunks of a causal one attend to the clean chunks."""
        return policy_velocity(role, samples.x_t, samples.sigma, samples.batch, sampler or self.unguided, samples.x0)

    def kl_coefficient(self, samples: NoisedSamples) -> float | PerSample:
        """Return the coefficient of the KL, or one for each sample."""
        return self.config.kl_coefficient

    def weighted(
        self,
        minibatch: Minibatch,
        samples: NoisedSamples,
        velocity: Latents,
        loss: PerSample,
        seen: dict[str, PerSample],
    ) -> MinibatchLoss:
        """Add the KL, and weight the losses of samples over the minibatch."""
        seen["loss"] = loss
        if self.config.kl_coefficient:
            assert self.reference is not None  # `check_reference`
            seen["kl"] = velocity_kl(velocity, self.velocity(self.reference, samples, self.guided))
            loss = loss + self.kl_coefficient(samples) * seen["kl"]
        real = minibatch.real.nonzero().flatten().tolist()
        metrics = {name: take_rows(value.detach(), real) for name, value in seen.items()}
        return MinibatchLoss((minibatch.weights.to(loss, non_blocking=True) * loss).sum(), metrics)
