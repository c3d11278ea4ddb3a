"""DiffusionNFT: better samples pull the velocity and worse ones push it, on the forward process (arXiv:2509.16117)."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unified_trainer.data.loader import Loader
from unified_trainer.methods.base import Loss
from unified_trainer.numerics.flow import Sigma, add_noise, x0_from_velocity
from unified_trainer.numerics.kl import velocity_kl
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.rl.dynamic_sampling import resample_groups
from unified_trainer.rl.groups import GroupConfig, compute_advantages
from unified_trainer.rl.minibatches import Minibatch
from unified_trainer.roles.experts import ExpertLayout
from unified_trainer.roles.reward import Reward, Scores
from unified_trainer.roles.role import Frozen, Trainable
from unified_trainer.roles.weight_copy import WeightCopy
from unified_trainer.sampling import SamplerConfig, generate, policy_velocity, trainable_steps
from unified_trainer.types import Batch, Latents, PerSample, Rollout

LEAST_ERROR = 1e-5  # that a loss is divided by


@dataclass(frozen=True)
class DiffusionNFTConfig(GroupConfig):
    beta: float = 1.0  # how far the two implicit policies lie from the old one, in units of the student's own distance
    timestep_fraction: float = 1.0  # share of the sampler's noise levels learnt at, drawn anew each training step
    old_decay: float = 0.5  # largest decay of the old policy, which samples: an average of the student, once a step
    old_decay_rise: float = 0.001  # what that decay grows by in each training step, from 0
    kl_coefficient: float = 0.0  # of mean (v - v_ref)^2 to the student as the run started; 0 needs no reference

    @property
    def optional_roles(self) -> tuple[str, ...]:
        return ("reference",) if self.kl_coefficient else ()

    def check(self, sampler: SamplerConfig) -> None:
        self.check_groups()
        if self.beta <= 0:
            raise ValueError(f"algorithm.beta must be above 0, not {self.beta}")
        if not 0 < self.timestep_fraction <= 1:
            raise ValueError(f"algorithm.timestep_fraction must be in (0, 1], not {self.timestep_fraction}")
        if not 0 <= self.old_decay < 1 or self.old_decay_rise < 0:
            raise ValueError("algorithm.old_decay must be in [0, 1) and algorithm.old_decay_rise not negative")
        if self.kl_coefficient < 0:
            raise ValueError(f"algorithm.kl_coefficient must not be negative, but is {self.kl_coefficient}")
        if sampler.guidance_scale != 1:
            raise ValueError(
                f"sampler.guidance_scale must be 1, not {sampler.guidance_scale}: diffusion_nft trains the velocity "
                "that it samples with"
            )
        if sampler.chunks.causal:
            raise ValueError(
                "sampler.chunks.chunk_frames must be 0 for diffusion_nft; dance_grpo trains causal students"
            )

    def check_experts(self, sampler: SamplerConfig, layouts: Mapping[str, ExpertLayout]) -> None:
        levels = [sampler.sigmas()[:-1].tolist()]
        layouts["student"].refuse_idle(levels, "sampler.num_steps", "Train the other expert, or change the sampler")


class DiffusionNFT:
    """The old policy samples, groups are compared, and noised samples say where the student's velocity goes."""

    trained_for_sampler: ClassVar[bool] = True

    def __init__(
        self,
        config: DiffusionNFTConfig,
        sampler: SamplerConfig,
        *,
        student: Trainable,
        old: WeightCopy,
        reward: Reward,
        loader: Loader,
        reference: Frozen | None = None,
    ) -> None:
        if config.kl_coefficient and reference is None:
            raise ValueError("algorithm.kl_coefficient needs the role reference. Set it to 0")
        self.config, self.sampler, self.loader = config, sampler, loader
        self.student, self.old, self.reward, self.reference = student, old, reward, reference

    def micro_batches(self, batch: Batch) -> list[Batch]:
        return [batch]  # the whole rank: groups are compared before anything is learnt

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        calls = trainable_steps(self.student, self.sampler)
        count = max(1, round(self.config.timestep_fraction * len(calls)))
        levels = sorted(calls[i] for i in rng.shared.permutation(len(calls))[:count])
        collect = functools.partial(self._collect, rng=rng)
        samples, counted = resample_groups(collect(batch), self.config, collect, self.reward, self.loader, step, mesh)
        judged = compute_advantages(self.config, self.reward, samples.scores, None, samples.batch, self.loader, mesh)
        decay = min(self.config.old_decay, self.config.old_decay_rise * step)
        metrics = judged.metrics | counted | {"old_decay": decay}
        if not any(judged.minibatches):
            yield Loss(
                "student",
                torch.zeros((), requires_grad=True),
                step_after=False,
                metrics=metrics,
                messages=judged.messages,
            )
        for parts in judged.minibatches:
            for s in levels:
                for part in parts:
                    loss, seen = self._loss(samples, judged.advantages, part, s, rng)
                    moves = s == levels[-1] and part is parts[-1]
                    yield Loss("student", loss / len(levels), moves, metrics | seen, judged.messages)
        self.old.update_from(self.student, decay)

    def _collect(self, batch: Batch, rng: Streams) -> Samples:
        """What the old policy makes, and what it is worth, `rollout_batch` samples at a time."""
        rollouts, scores = [], []
        for part in batch.split(self.config.rollout_batch):

            def draw(name: str | int, part: Batch = part) -> Latents:
                return rng.noise(f"transition {name}", part.sample_ids, part.latent_shape).to(self.old.device)

            keys = part.prompt_ids if self.config.init_same_noise else part.sample_ids
            noise = rng.noise("initial", keys, part.latent_shape).to(self.old.device)
            x0 = generate(self.old, noise, part, self.sampler, draw)
            rollouts.append(Rollout.from_x0(x0))
            scores.append(self.reward.score(x0, part.prompts))
        return Samples(batch, Rollout.cat(rollouts), Scores.cat(scores))

    def _loss(
        self, samples: Samples, advantages: PerSample, part: Minibatch, s: int, rng: Streams
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """advantage_clip x the loss of one noise level, and the KL, weighted over the samples of the minibatch."""
        config = self.config
        batch, x0 = samples.batch.take(part.rows.tolist()), samples.rollout.x0[part.rows]
        sigma = self.sampler.sigmas()[s]
        x_t = add_noise(x0, rng.noise(f"forward {s}", batch.sample_ids, batch.latent_shape).to(x0), sigma)
        velocity = policy_velocity(self.student, x_t, sigma, batch, self.sampler)
        velocity_old = policy_velocity(self.old, x_t, sigma, batch, self.sampler)
        optimality = (advantages[part.rows] / (2 * config.advantage_clip) + 0.5).clamp(0, 1)
        loss = config.advantage_clip * contrast(x0, x_t, sigma, velocity, velocity_old, optimality, config.beta)
        seen = {"loss": loss, "policy_gap": velocity_kl(velocity, velocity_old)}
        if config.kl_coefficient:
            kl = velocity_kl(velocity, policy_velocity(self.reference, x_t, sigma, batch, self.sampler))
            loss, seen["kl"] = loss + config.kl_coefficient * kl, kl
        real = part.real.to(loss.device)
        return (part.weights.to(loss) * loss).sum(), {name: value.detach()[real] for name, value in seen.items()}


def contrast(
    x0: Latents,
    x_t: Latents,
    sigma: Sigma,
    velocity: Latents,
    velocity_old: Latents,
    optimality: PerSample,
    beta: float,
) -> PerSample:
    """(r |x0+ - x0|^2 / w+ + (1 - r) |x0- - x0|^2 / w-) / beta, mean over elements (DiffusionNFT, arXiv:2509.16117).

    v+ = beta v + (1 - beta) v_old, v- = (1 + beta) v_old - beta v, x0+- = x_t - sigma v+-, w+- = mean |x0+- - x0| of
    the sample in float64 without gradient, r the optimality in [0, 1].
    """
    positive = x0_from_velocity(x_t, beta * velocity + (1 - beta) * velocity_old, sigma)
    negative = x0_from_velocity(x_t, (1 + beta) * velocity_old - beta * velocity, sigma)
    return (optimality * _relative_error(positive, x0) + (1 - optimality) * _relative_error(negative, x0)) / beta


def _relative_error(x0_hat: Latents, x0: Latents) -> PerSample:
    error = (x0_hat - x0).flatten(1)
    return error.square().mean(1) / error.detach().double().abs().mean(1).clamp(min=LEAST_ERROR).to(error)
