"""DanceGRPO: the student as a stochastic policy, improved by group-relative rewards (arXiv:2505.07818)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.advantages import Estimator, below_threshold, group_advantages
from unified_trainer.batching import BatchPlan
from unified_trainer.methods.base import Loss
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.policy import Kernel, log_prob, transition
from unified_trainer.roles.reward import Reward
from unified_trainer.roles.role import Trainable
from unified_trainer.sampling import SamplerConfig, policy_velocity, rollout
from unified_trainer.surrogates import Mode, outside_clip, surrogate
from unified_trainer.types import Batch, PerSample, Rollout


@dataclass(frozen=True)
class DanceGRPOConfig:
    num_prompts: int = 8  # prompts per training step, over all ranks
    num_samples: int = 8  # samples of each prompt: the group an advantage is relative to
    prompts_per_update: int = 8  # prompts of one optimizer update; num_prompts / this updates per rollout
    rollout_batch: int = 32  # samples generated, decoded and scored at a time
    update_batch: int = 32  # samples per backward pass
    kernel: Kernel = "dance"  # transition of the policy; "ode" has no density and cannot be trained
    eta: float = 0.3  # level of the policy's noise
    timestep_fraction: float = 0.6  # share of the stochastic transitions trained, drawn anew each training step
    init_same_noise: bool = False  # one initial noise per prompt and step instead of one per sample
    objective: Mode = "clip"  # policy objective
    clip_low: float = 1e-4  # the ratio is clipped at 1 - clip_low; it stays near 1, being a mean over elements
    clip_high: float = 1e-4  # and at 1 + clip_high
    advantage: Estimator = "grpo"  # estimator of a group
    advantage_clip: float = 5.0  # largest absolute advantage
    reward_threshold: float = float("-inf")  # a group whose mean reward is below it teaches nothing

    @property
    def learns_from_data(self) -> bool:
        return False

    def check(self, sampler: SamplerConfig) -> None:
        if self.num_samples < 2:
            raise ValueError("algorithm.num_samples must be at least 2: a group of one has no advantage")
        if sampler.num_steps < 2:
            raise ValueError("sampler.num_steps must be at least 2: the last transition is not trained")
        if self.rollout_batch < 1:
            raise ValueError(f"algorithm.rollout_batch must be at least 1, not {self.rollout_batch}")
        if self.kernel == "ode" or self.eta <= 0:
            raise ValueError("algorithm.kernel must be stochastic and algorithm.eta above 0: else there is no policy")
        if sampler.chunks.causal and sampler.chunks.context_noise:
            raise ValueError("sampler.chunks.context_noise must be 0: the replay looks back on clean chunks")
        if not 0 < self.timestep_fraction <= 1:
            raise ValueError(f"algorithm.timestep_fraction must be in (0, 1], not {self.timestep_fraction}")

    def plan(self) -> BatchPlan:
        names = ("num_prompts", "num_samples", "prompts_per_update", "update_batch")
        keys = tuple(f"algorithm.{name}" for name in names)
        return BatchPlan(self.num_prompts, self.num_samples, self.prompts_per_update, self.update_batch, keys)


class DanceGRPO:
    """Roll out, score, compare within the group, and raise the density of what was better."""

    trains_sampler: ClassVar[bool] = True

    def __init__(self, config: DanceGRPOConfig, sampler: SamplerConfig, *, student: Trainable, reward: Reward) -> None:
        self.config = config
        self.sampler = sampler
        self.sigmas = sampler.sigmas()
        self.student = student
        self.reward = reward
        self._checked = False

    def generators(self, batch: Batch) -> list[Batch]:
        return [batch]  # the whole rank: groups are compared before anything is learnt

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        trained = self._trained_steps(rng)
        sampled, rewards = self._collect(batch, rng)
        advantages, metrics = self._advantages(rewards, batch, mesh)
        updates = self.config.num_prompts // self.config.prompts_per_update
        size, micro = len(batch) // updates, self.config.update_batch
        for update in range(0, len(batch), size):
            parts = [slice(i, i + micro) for i in range(update, update + size, micro)]
            for s in trained:
                for part in parts:
                    log_ratio = self._log_ratio(sampled, batch[part], part, s)
                    self._check_replay(log_ratio, update=update)
                    objective = surrogate(
                        self.config.objective,
                        log_ratio,
                        advantages[part],
                        clip_low=self.config.clip_low,
                        clip_high=self.config.clip_high,
                    )
                    yield Loss(
                        "student",
                        -objective.mean() / (len(trained) * len(parts)),
                        moves=s == trained[-1] and part == parts[-1],
                        metrics=metrics | self._ratio_metrics(log_ratio),
                    )
            self._checked = True

    def _trained_steps(self, rng: Streams) -> list[int]:
        """The transitions trained in this step, the same on all ranks; never the last, which has no density."""
        stochastic = self.sampler.num_steps - 1
        count = max(1, round(self.config.timestep_fraction * stochastic))
        return sorted(rng.shared.permutation(stochastic)[:count].tolist())

    def _collect(self, batch: Batch, rng: Streams) -> tuple[Rollout, PerSample]:
        """Trajectories and their rewards, `rollout_batch` samples at a time."""
        rollouts, rewards = [], []
        for part in batch.split(self.config.rollout_batch):
            keys = part.prompt_ids if self.config.init_same_noise else part.sample_ids
            noise = rng.noise("initial", keys, part.latent_shape).to(self.student.device)
            done = rollout(
                self.student,
                noise,
                part,
                self.sampler,
                self.config.kernel,
                self.config.eta,
                lambda s, part=part: rng.noise(f"transition {s}", part.sample_ids, part.latent_shape),
            )
            rollouts.append(done)
            rewards.append(self.reward.score(done.x0, part.prompts))
        return Rollout.cat(rollouts), torch.cat(rewards)

    def _advantages(self, rewards: PerSample, batch: Batch, mesh: Mesh) -> tuple[PerSample, dict[str, float]]:
        """Advantages within the groups of all ranks, and what the rewards were."""
        mine = torch.stack([rewards.double(), torch.tensor(batch.prompt_ids).to(rewards).double()], 1)
        everyone = mesh.gather(mine)
        all_rewards, all_ids = everyone[:, 0], everyone[:, 1].long()
        advantages = group_advantages(all_rewards, all_ids, self.config.advantage)
        advantages[below_threshold(all_rewards, all_ids, self.config.reward_threshold)] = 0.0
        metrics = {
            "reward": all_rewards.mean().item(),
            "reward_std": all_rewards.std().item(),
            "advantage_zero": (advantages == 0).double().mean().item(),
        }
        bound = self.config.advantage_clip
        start = mesh.data_rank * len(rewards)
        return advantages[start : start + len(rewards)].clamp(-bound, bound).to(rewards.dtype), metrics

    def _log_ratio(self, sampled: Rollout, batch: Batch, part: slice, s: int) -> Float[Tensor, " b"]:
        """log pi(x_next | x_t) now, minus what it was when it was sampled."""
        x_t, x_next = sampled.states[part, s], sampled.states[part, s + 1]
        velocity = policy_velocity(self.student, x_t, self.sigmas[s], batch, self.sampler, sampled.x0[part])
        mean, std = transition(self.config.kernel, x_t, velocity, self.sigmas[s], self.sigmas[s + 1], self.config.eta)
        return log_prob(x_next, mean, std) - sampled.log_probs[part, s]

    def _check_replay(self, log_ratio: Tensor, *, update: int) -> None:
        """Refuse to train on a replay that differs from the rollout before any weight has moved."""
        if self._checked or update:
            return
        worst = log_ratio.detach().abs().max().item()
        if not worst <= min(self.config.clip_low, self.config.clip_high):
            raise RuntimeError(
                f"the first update's log-ratio is {worst:.3g} with unchanged weights, above the clip range "
                f"{self.config.clip_low:g}/{self.config.clip_high:g}: rollout and replay differ. Set "
                "algorithm.update_batch equal to algorithm.rollout_batch, student.precision to fp32, or widen the range"
            )

    def _ratio_metrics(self, log_ratio: Tensor) -> dict[str, Tensor]:
        log_ratio = log_ratio.detach()
        outside = outside_clip(log_ratio, clip_low=self.config.clip_low, clip_high=self.config.clip_high)
        return {
            "log_ratio": log_ratio.mean(),
            "log_ratio_abs_max": log_ratio.abs().max(),
            "outside": outside.float().mean(),
        }
