"""DanceGRPO: the student as a stochastic policy, improved by group-relative rewards (arXiv:2505.07818)."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.advantages import below_threshold, best_of_n, group_advantages, spread, zero_variance
from unified_trainer.kl import gaussian_kl, kl_estimate, velocity_kl
from unified_trainer.methods.base import Loss
from unified_trainer.methods.dance_grpo_config import DanceGRPOConfig
from unified_trainer.methods.lessons import Lesson, plan_lessons
from unified_trainer.methods.replay import Record, Replay
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.reward import Reward, Scores
from unified_trainer.roles.role import Frozen, Trainable
from unified_trainer.sampling import SamplerConfig, policy_velocity, rollout
from unified_trainer.surrogates import diagnostics, guarded_log_ratio, leaves_trust_region, surrogate
from unified_trainer.types import Batch, Latents, PerSample, Rollout

__all__ = ["DanceGRPO", "DanceGRPOConfig"]


@dataclass(frozen=True)
class Lived:
    """What this rank's samples went through in one training step."""

    batch: Batch
    rollout: Rollout
    window: range  # the stochastic transitions, which the rollout holds
    rng: Streams

    def transition(self, s: int, rows: Tensor) -> tuple[Batch, Latents, Latents, PerSample, Latents]:
        """Some samples, their x_t and x_next of transition s with its log-density, and what they became."""
        states, at = self.rollout.states, s - self.window.start
        log_prob, x0 = self.rollout.log_probs[rows, at], self.rollout.x0[rows]
        return self.batch.take(rows.tolist()), states[rows, at], states[rows, at + 1], log_prob, x0


class DanceGRPO:
    """Roll out, score, compare within the group, and raise the density of what was better."""

    trains_sampler: ClassVar[bool] = True

    def __init__(
        self,
        config: DanceGRPOConfig,
        sampler: SamplerConfig,
        *,
        student: Trainable,
        reward: Reward,
        reference: Frozen | None = None,
    ) -> None:
        if config.kl_coefficient and reference is None:
            raise ValueError("algorithm.kl_coefficient needs the role reference: a KL is to something. Set it to 0")
        self.config, self.sampler, self.policy = config, sampler, config.policy(sampler)
        self.student, self.reward, self.reference = student, reward, reference
        self._checked = False

    def generators(self, batch: Batch) -> list[Batch]:
        return [batch]  # the whole rank: groups are compared before anything is learnt

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        window = self.config.window.at(step, self.sampler.num_steps - 1, rng.shared)
        trained = self._trained_steps(window, rng)
        lived, scores = self._collect(batch, window, rng)
        advantages, lessons, metrics = self._judge(scores, batch, mesh)
        if self.config.window.size:
            metrics["window_first"] = float(window.start)
        metrics |= {f"transitions_{side}": n for side, n in self.student.count(self.policy.sigmas[trained]).items()}
        if not any(lessons):  # nothing moves, and the metrics say why
            yield Loss("student", torch.zeros((), requires_grad=True), moves=False, metrics=metrics)
        for parts in lessons:
            record = Record()
            sequences = [self._sequence(lived, part, trained) for part in parts]
            for s in trained:
                for part, sequence in zip(parts, sequences, strict=True):
                    replay, advantage = self._replay(lived, part, s), advantages[part.rows]
                    self._check_replay(replay.log_ratio)
                    record.add(replay, advantage, part)
                    moves = s == trained[-1] and part is parts[-1]
                    seen = self._seen(record, trained, batch, mesh) if moves else {}
                    loss = self._loss(replay, advantage, part, s, sequence) / len(trained)
                    yield Loss("student", loss, moves, metrics | seen)
            self._checked = self._checked or bool(parts)

    def _trained_steps(self, window: range, rng: Streams) -> list[int]:
        """The transitions trained in this step, the same on all ranks; never the last, which has no density.

        Where an expert that is not trained makes the transition, there is nothing to train.
        """
        learnt = [s for s in window if self.student.learns(self.policy.sigmas[s])]
        count = max(1, round(self.config.timestep_fraction * len(learnt)))
        return sorted(learnt[i] for i in rng.shared.permutation(len(learnt))[:count])

    def _collect(self, batch: Batch, window: range, rng: Streams) -> tuple[Lived, Scores]:
        """Trajectories and what they are worth, `rollout_batch` samples at a time."""
        rollouts, scores = [], []
        for part in batch.split(self.config.rollout_batch):
            keys = part.prompt_ids if self.config.init_same_noise else part.sample_ids
            noise = rng.noise("initial", keys, part.latent_shape).to(self.student.device)
            draw = functools.partial(transition_noise, rng, part)
            done = rollout(self.student, noise, part, self.sampler, self.policy, window, draw)
            rollouts.append(done)
            scores.append(self.reward.judge(done.x0, part.prompts))
        return Lived(batch, Rollout.cat(rollouts), window, rng), Scores.cat(scores)

    def _judge(
        self, scores: Scores, batch: Batch, mesh: Mesh
    ) -> tuple[PerSample, list[list[Lesson]], dict[str, float]]:
        """Advantages within the groups of all ranks, who is learnt from in each update, and what the rewards were."""
        config = self.config
        ids = mesh.gather(torch.tensor(batch.prompt_ids, device=scores.parts.device))
        everyone = scores.everywhere(mesh)
        all_rewards = self.reward.total(everyone.parts)
        below, equal = below_threshold(all_rewards, ids, config.reward_threshold), zero_variance(all_rewards, ids)
        if config.advantage == "gdpo":  # each part against its group, before they are weighted
            weights = list(self.reward.weights.values())
            advantages = group_advantages(everyone.parts, ids, "gdpo", weights=weights)
            equal = torch.stack([zero_variance(part, ids) for part in everyone.parts.unbind(1)]).all(0)
        else:
            advantages = group_advantages(all_rewards, ids, config.advantage)
        advantages[below | equal] = 0.0
        useful = ~equal
        if config.keep_samples:
            useful &= best_of_n(advantages, ids, config.keep_samples)
        updates = config.num_prompts // config.prompts_per_update
        lessons = plan_lessons(useful, advantages, mesh.data_rank, mesh.data_size, updates, config.update_batch)
        in_groups, between_groups = spread(all_rewards, ids)
        metrics = {
            "reward": all_rewards.mean().item(),
            "reward_std": all_rewards.std().item(),
            "reward_std_in_groups": in_groups,
            "reward_std_between_groups": between_groups,
            "advantage_zero": (advantages == 0).double().mean().item(),
            "filtered_groups": len(ids[below | equal].unique()) / len(ids.unique()),
            "skipped_updates": float(sum(not parts for parts in lessons)),
        }
        start = mesh.data_rank * len(batch)
        mine = advantages[start : start + len(batch)].clamp(-config.advantage_clip, config.advantage_clip)
        return mine.float(), lessons, metrics | self.reward.metrics(everyone, ids)

    def _replay(self, lived: Lived, part: Lesson, s: int) -> Replay:
        """Transition s as the student makes it now, against how it was sampled and how the reference makes it."""
        batch, x_t, x_next, log_prob_old, x0 = lived.transition(s, part.rows)
        sigma = self.policy.sigmas[s]
        velocity = policy_velocity(self.student, x_t, sigma, batch, self.sampler, x0)
        mean, std = self.policy.step(s, x_t, velocity)
        log_prob = self.policy.log_prob(x_next, mean, std)
        log_ratio = log_prob - log_prob_old
        mean_old = x_next - std * transition_noise(lived.rng, batch, s).to(std)  # drawn again instead of stored
        ratio = guarded_log_ratio(log_ratio, mean, mean_old, std) if self.config.guard else log_ratio
        k = gaussian_kl(mean.detach(), mean_old, std)
        if not self.config.kl_coefficient:
            return Replay(log_ratio, ratio, k, None)
        velocity_ref = policy_velocity(self.reference, x_t, sigma, batch, self.sampler)
        mean_ref, _ = self.policy.step(s, x_t, velocity_ref)
        if self.config.kl == "velocity":
            kl = velocity_kl(velocity, velocity_ref)
        elif self.config.kl == "exact":
            kl = gaussian_kl(mean, mean_ref, std)
        else:
            kl = kl_estimate(self.config.kl, log_prob, self.policy.log_prob(x_next, mean_ref, std))
        return Replay(log_ratio, ratio, k, kl)

    @torch.no_grad()
    def _sequence(self, lived: Lived, part: Lesson, trained: list[int]) -> dict[int, PerSample]:
        """For gspo, the log-ratios of all trained transitions before any has its graph: a second call of each."""
        return {s: self._replay(lived, part, s).ratio for s in trained} if self.config.objective == "gspo" else {}

    def _loss(
        self, replay: Replay, advantage: PerSample, part: Lesson, s: int, sequence: dict[int, PerSample]
    ) -> Float[Tensor, ""]:
        """-objective + coefficient KL of one transition, weighted over the samples of the lesson."""
        config = self.config
        if sequence:  # the gradient of the sequence's ratio through this transition: 1 / s of it, undone by the mean
            steps = [replay.ratio if other == s else ratio for other, ratio in sequence.items()]
            objective = len(steps) * self._surrogate(torch.stack(steps, 1), advantage)
        else:
            objective = self._surrogate(replay.ratio, advantage)
        if config.trust_region:
            leaves = leaves_trust_region(replay.ratio, advantage, replay.k, config.trust_region)
            objective = objective.masked_fill(leaves, 0.0)
        loss = -self._step_weight(s) * objective
        if replay.kl is not None:
            loss = loss + config.kl_coefficient * replay.kl
        return (part.weights.to(loss) * loss).sum()

    def _surrogate(self, ratio: Tensor, advantage: PerSample) -> PerSample:
        return surrogate(self.config.objective, ratio, advantage, **self._bounds())

    def _bounds(self) -> dict[str, float]:
        """What surrogates read, the clip range and the shape."""
        return {
            "clip_low": self.config.clip_low,
            "clip_high": self.config.clip_high,
            **dataclasses.asdict(self.config.shape),
        }

    def _step_weight(self, s: int) -> float:
        """Of transition s in the objective; `equal` gives every velocity the gradient A noise / D at ratio 1."""
        if self.config.step_weight == "none":
            return 1.0
        if self.config.step_weight == "inverse_dt":
            return 1 / float(self.policy.sigmas[s] - self.policy.sigmas[s + 1])
        return (1 if self.config.guard else self.policy.std(s)) / self.policy.pull(s)

    def _check_replay(self, log_ratio: Tensor) -> None:
        """Refuse to train on a replay that differs from the rollout before any weight has moved."""
        if self._checked:
            return
        worst = log_ratio.detach().abs().max().item()
        if not worst <= min(self.config.clip_low, self.config.clip_high):
            raise RuntimeError(
                f"the first update's log-ratio is {worst:.3g} with unchanged weights, above the clip range "
                f"{self.config.clip_low:g}/{self.config.clip_high:g}: rollout and replay differ. Set "
                "algorithm.update_batch equal to algorithm.rollout_batch, student.precision to fp32, or widen the range"
            )

    def _seen(self, record: Record, trained: list[int], batch: Batch, mesh: Mesh) -> dict[str, float]:
        """What one update saw on all ranks."""
        config, seen = self.config, record.everywhere(mesh, len(trained))
        metrics = seen.metrics(trained, math.prod(batch.latent_shape))
        if config.objective == "gspo":
            metrics |= diagnostics(config.objective, seen.ratio, seen.advantage[:, 0], **self._bounds())
        else:
            metrics |= diagnostics(config.objective, seen.ratio.flatten(), seen.advantage.flatten(), **self._bounds())
        if config.trust_region:
            columns = (column.flatten() for column in (seen.ratio, seen.advantage, seen.k))
            metrics["trust_region_left"] = float(leaves_trust_region(*columns, config.trust_region).float().mean())
        if config.kl_coefficient:
            metrics["kl"] = float(seen.kl.mean())
        return metrics


def transition_noise(rng: Streams, batch: Batch, s: int) -> Latents:
    """What transition s draws for these samples."""
    return rng.noise(f"transition {s}", batch.sample_ids, batch.latent_shape)
