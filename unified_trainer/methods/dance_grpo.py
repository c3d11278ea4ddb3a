"""DanceGRPO: the student as a stochastic policy, improved by group-relative rewards (arXiv:2505.07818)."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.data.loader import Loader
from unified_trainer.methods.base import Loss
from unified_trainer.methods.dance_grpo_config import DanceGRPOConfig
from unified_trainer.numerics.kl import gaussian_kl
from unified_trainer.numerics.objectives import (
    calibrated_clip,
    diagnostics,
    guarded_log_ratio,
    leaves_trust_region,
    surrogate,
)
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.rl.dynamic_sampling import resample_groups
from unified_trainer.rl.groups import compute_advantages
from unified_trainer.rl.minibatches import Minibatch
from unified_trainer.rl.reference_kl import ReferenceKL
from unified_trainer.rl.replay import Replay, ReplayCollector, ReplayStats, Trajectories, transition_noise
from unified_trainer.roles.reward import Reward, Scores
from unified_trainer.roles.role import Frozen, Trainable
from unified_trainer.sampling import SamplerConfig, policy_velocity, rollout
from unified_trainer.types import Batch, PerSample, Rollout

__all__ = ["DanceGRPO", "DanceGRPOConfig"]


class DanceGRPO:
    """Roll out, score, compare within the group, and raise the density of what was better."""

    trained_for_sampler: ClassVar[bool] = True

    def __init__(
        self,
        config: DanceGRPOConfig,
        sampler: SamplerConfig,
        *,
        student: Trainable,
        reward: Reward,
        loader: Loader,
        reference: Frozen | None = None,
    ) -> None:
        self.config, self.sampler, self.policy = config, sampler, config.policy(sampler)
        self.student, self.reward, self.loader = student, reward, loader
        self.kl = ReferenceKL(config, sampler, self.policy, reference)
        self._checked, self._replay_error = False, 0.0  # the latter as a share of the clip range, until a weight moves

    def micro_batches(self, batch: Batch) -> list[Batch]:
        return [batch]  # the whole rank: groups are compared before anything is learnt

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        window = self.config.window.at(step, self.sampler.num_steps - 1, rng.shared)
        trained = self._trained_steps(window, rng)
        collect = functools.partial(self._collect, window=window, rng=rng)
        samples, counted = resample_groups(collect(batch), self.config, collect, self.reward, self.loader, step, mesh)
        batch, trajectories = samples.batch, Trajectories(samples.batch, samples.rollout, window, rng)
        penalty, kl_metrics = self.kl.penalty(trajectories, mesh)
        judged = compute_advantages(self.config, self.reward, samples.scores, penalty, batch, self.loader, mesh)
        advantages, minibatches, metrics = judged.advantages, judged.minibatches, judged.metrics | counted | kl_metrics
        if self.config.window.size:
            metrics["window_first"] = float(window.start)
        metrics |= {f"transitions_{side}": n for side, n in self.student.count(self.policy.sigmas[trained]).items()}
        if not any(minibatches):  # nothing moves, and the metrics say why
            yield Loss(
                "student",
                torch.zeros((), requires_grad=True),
                step_after=False,
                metrics=metrics,
                messages=judged.messages,
            )
        for parts in minibatches:
            record = ReplayCollector()
            sequences = [self._sequence(trajectories, part, trained) for part in parts]
            for s in trained:
                for part, sequence in zip(parts, sequences, strict=True):
                    replay, advantage = self._replay(trajectories, part, s), advantages[part.rows]
                    self._check_replay(replay)
                    record.add(replay, advantage, part)
                    moves = s == trained[-1] and part is parts[-1]
                    loss = self._loss(replay, advantage, part, s, sequence) / len(trained)
                    seen = self._seen(record.gathered(mesh, len(trained)), trained, batch) if moves else {}
                    words = self._replay_words() if moves and not self._checked else ()
                    yield Loss("student", loss, moves, metrics | seen, (*judged.messages, *words))
            self._checked = self._checked or bool(parts)

    def _trained_steps(self, window: range, rng: Streams) -> list[int]:
        """The transitions trained in this step, the same on all ranks; never the last, which has no density.

        Where an expert that is not trained makes the transition, there is nothing to train.
        """
        learnt = [s for s in window if self.student.learns(self.policy.sigmas[s])]
        count = max(1, round(self.config.timestep_fraction * len(learnt)))
        return sorted(learnt[i] for i in rng.shared.permutation(len(learnt))[:count])

    def _collect(self, batch: Batch, window: range, rng: Streams) -> Samples:
        """Trajectories and what they are worth, `rollout_batch` samples at a time."""
        rollouts, scores = [], []
        for part in batch.split(self.config.rollout_batch):
            keys = part.prompt_ids if self.config.init_same_noise else part.sample_ids
            noise = rng.noise("initial", keys, part.latent_shape).to(self.student.device)
            draw = functools.partial(transition_noise, rng, part)
            done = rollout(self.student, noise, part, self.sampler, self.policy, window, draw)
            rollouts.append(done)
            scores.append(self.reward.score(done.x0, part.prompts))
        return Samples(batch, Rollout.cat(rollouts), Scores.cat(scores))

    def _replay(self, trajectories: Trajectories, part: Minibatch, s: int) -> Replay:
        """Transition s as the student makes it now, against how it was sampled and how the reference makes it."""
        batch, x_t, x_next, log_prob_old, x0 = trajectories.transition(s, part.rows)
        sigma = self.policy.sigmas[s]
        velocity = policy_velocity(self.student, x_t, sigma, batch, self.sampler, x0)
        mean, std = self.policy.step(s, x_t, velocity)
        log_prob = self.policy.log_prob(x_next, mean, std)
        log_ratio = log_prob - log_prob_old
        mean_old = x_next - std * trajectories.noise(batch, s).to(std)
        ratio = guarded_log_ratio(log_ratio, mean, mean_old, std) if self.config.guard else log_ratio
        k = gaussian_kl(mean.detach(), mean_old, std)
        kl = self.kl.of_transition(s, x_t, x_next, mean, log_prob, batch, x0) if self.kl.in_loss else None
        return Replay(log_ratio, ratio, k, kl, self._clip(s, math.prod(batch.latent_shape)))

    @torch.no_grad()
    def _sequence(self, trajectories: Trajectories, part: Minibatch, trained: list[int]) -> dict[int, PerSample]:
        """For gspo, the log-ratios of all trained transitions before any has its graph: a second call of each."""
        return (
            {s: self._replay(trajectories, part, s).ratio for s in trained} if self.config.objective == "gspo" else {}
        )

    def _loss(
        self, replay: Replay, advantage: PerSample, part: Minibatch, s: int, sequence: dict[int, PerSample]
    ) -> Float[Tensor, ""]:
        """-objective + coefficient KL of one transition, weighted over the samples of the minibatch."""
        config = self.config
        if sequence:  # the gradient of the sequence's ratio through this transition: 1 / s of it, undone by the mean
            steps = [replay.ratio if other == s else ratio for other, ratio in sequence.items()]
            objective = len(steps) * self._surrogate(torch.stack(steps, 1), advantage, replay.clip)
        else:
            objective = self._surrogate(replay.ratio, advantage, replay.clip)
        if config.trust_region:
            leaves = leaves_trust_region(replay.ratio, advantage, replay.k, config.trust_region)
            objective = objective.masked_fill(leaves, 0.0)
        loss = -self._step_weight(s) * objective
        if replay.kl is not None:
            loss = loss + self.kl.coefficient * replay.kl
        return (part.weights.to(loss) * loss).sum()

    def state_dict(self) -> dict[str, Tensor]:
        return self.kl.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.kl.load_state_dict(state)

    def _surrogate(self, ratio: Tensor, advantage: PerSample, clip: tuple[float, float]) -> PerSample:
        shape = dataclasses.asdict(self.config.objective_parameters)
        return surrogate(self.config.objective, ratio, advantage, clip_low=clip[0], clip_high=clip[1], **shape)

    def _clip(self, s: int, elements: int) -> tuple[float, float]:
        """The clip range of transition s, below and above 1."""
        config, std = self.config, self.policy.std(s)
        if not config.clip_velocity:
            return config.clip_low, config.clip_high
        return calibrated_clip(
            self.policy.mean_gain(s) * config.clip_velocity / std, elements, std if config.guard else None
        )

    def _step_weight(self, s: int) -> float:
        """Of transition s in the objective; `equal` gives every velocity the gradient A noise / D at ratio 1."""
        if self.config.step_weight == "none":
            return 1.0
        if self.config.step_weight == "inverse_dt":
            return 1 / float(self.policy.sigmas[s] - self.policy.sigmas[s + 1])
        return (1 if self.config.guard else self.policy.std(s)) / self.policy.mean_gain(s)

    def _check_replay(self, replay: Replay) -> None:
        """Refuse to train on a replay that differs from the rollout before any weight has moved."""
        if self._checked:
            return
        worst, (low, high) = replay.ratio.detach().abs().max().item(), replay.clip
        if not worst <= min(low, high):
            raise RuntimeError(
                f"the first update's log-ratio is {worst:.3g} with unchanged weights, above the clip range "
                f"{low:g}/{high:g}: rollout and replay differ. Set "
                "algorithm.update_batch equal to algorithm.rollout_batch, student.precision to fp32, or widen the range"
            )
        self._replay_error = max(self._replay_error, worst / min(low, high))

    def _replay_words(self) -> tuple[str]:
        return (f"the log-ratio at unchanged weights is at most {self._replay_error:.2g} of the clip range",)

    def _seen(self, seen: ReplayStats, trained: list[int], batch: Batch) -> dict[str, float]:
        """What one update saw on all ranks."""
        config, elements, shape = (
            self.config,
            math.prod(batch.latent_shape),
            dataclasses.asdict(self.config.objective_parameters),
        )
        metrics = seen.metrics(trained, elements)
        low, high = (
            torch.tensor([self._clip(s, elements) for s in trained], dtype=torch.float64).to(seen.ratio.device).T
        )
        if config.clip_velocity:
            metrics |= {"clip_low": float(low.mean()), "clip_high": float(high.mean())}
        if config.objective == "gspo":
            ratio, advantage, low, high = seen.ratio, seen.advantage[:, 0], low[0], high[0]
        else:
            ratio, advantage = seen.ratio.flatten(), seen.advantage.flatten()
            low, high = (bound.expand(seen.ratio.shape).flatten() for bound in (low, high))
        metrics |= diagnostics(config.objective, ratio, advantage, clip_low=low, clip_high=high, **shape)
        if config.trust_region:
            columns = (column.flatten() for column in (seen.ratio, seen.advantage, seen.k))
            metrics["trust_region_left"] = float(leaves_trust_region(*columns, config.trust_region).float().mean())
        if self.kl.in_loss:
            metrics |= self.kl.note(seen.kl.mean(1))
        return metrics
