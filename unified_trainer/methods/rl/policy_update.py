"""The clipped update of a stochastic policy, from the replayed transitions of its samples."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.types import Batch, Latents, PerSample, take_rows, widest
from unified_trainer.methods.base import Loss, Metrics
from unified_trainer.methods.rl.groups import Advantages
from unified_trainer.methods.rl.minibatches import Minibatch
from unified_trainer.methods.rl.on_policy_check import OnPolicyCheck
from unified_trainer.methods.rl.policy import PolicyConfig
from unified_trainer.methods.rl.reference_kl import ReferenceKL
from unified_trainer.methods.rl.replay import Replay, ReplayCollector, ReplayStats, Trajectories, Transition
from unified_trainer.methods.rl.rollouts import Rollouts, ScoredSamples
from unified_trainer.methods.rl.sample_ratio import Compare, of_samples
from unified_trainer.methods.rl.updates import LossAt, MinibatchLoss, update_losses
from unified_trainer.numerics.kl import gaussian_kl
from unified_trainer.numerics.objectives import calibrated_clip, clips_ratios, diagnostics, guarded_log_ratio
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.role import Frozen, Trainable
from unified_trainer.sampling.equal_rows import EqualRows
from unified_trainer.sampling.solver import SamplerConfig, policy_velocity


class PolicyUpdate:
    """Raises the density of transitions with a positive advantage, within a clip range of the ratio to the rollout."""

    def __init__(
        self,
        config: PolicyConfig,
        sampler: SamplerConfig,
        student: Trainable,
        reference: Frozen | None,
        *,
        update_batch: int,
        same_noise: bool,
    ) -> None:
        """`update_batch` is the number of samples per pass of a KL of whole rollouts, and of a check.
        With `same_noise` the samples of a prompt have one initial noise: the call of the window's first transition is
        replayed once for all of them, as the rollout made it, unless the student is causal and each attends to chunks
        of its own.
        """
        self.config, self.sampler, self.student, self.policy = config, sampler, student, config.policy(sampler)
        self.objective, self.correction = config.objective, config.correction_value()
        self.kl = ReferenceKL(config.kl_settings(update_batch), sampler, self.policy, reference)
        self._same_noise = same_noise and not sampler.chunks.causal
        self.on_policy, self._update_batch = OnPolicyCheck(student.config.precision, self.policy), update_batch
        self._candidates = set(config.candidates(sampler, sampler.num_steps))  # windows leave out the last one
        self._now = range(0), list[int]()  # the window of this training step, and its trained transitions
        self._unchanged = False  # whether the next update replays samples with the weights that made them
        self._ess_unread = False  # whether ess of this training step is still to be compared with its floor

    def attach(self, rollouts: Rollouts) -> None:
        """Check the samples of workers of these rollouts, and make them less ahead where they lag too far."""
        self._rollouts, rollouts.check = rollouts, self.check_worker

    def transitions(self, step: int, rng: Streams, metrics: Metrics) -> tuple[range, list[int]]:
        """Return the stochastic transitions of a training step and those trained, equal on all ranks; note them.

        The last transition of the sampler has no density and is never trained. Trained are the transitions of the
        window that trained experts make; without a window size, a drawn fraction of those that may be trained.
        """
        window = self.config.window_at(step, self.sampler, rng.shared)
        trained = [s for s in window if s in self._candidates and self.student.trains(self.policy.sigmas[s])]
        if self.config.window.size:
            metrics["window_first"] = float(window.start)
        else:
            count = max(1, round(self.config.timestep_fraction * len(trained)))
            trained = sorted(trained[i] for i in rng.shared.permutation(len(trained))[:count])
        metrics |= self.student.transition_counts(self.policy.sigmas[trained])
        self._now = window, trained
        return window, trained

    def trajectories(self, samples: ScoredSamples, step: int, window: range, rng: Streams) -> Trajectories:
        """Return samples of training step `step`, to be replayed."""
        kept = self.config.kept(self.sampler, window)
        same_noise = self._same_noise and kept.start == window.start
        return Trajectories.of(samples, step, kept, rng, same_noise=same_noise)

    @torch.no_grad()
    def check_worker(self, samples: ScoredSamples, rng: Streams, maker: str) -> None:
        """Replay samples of a worker with the weights that made them, which the student has during this call."""
        version, (window, trained) = int(samples.versions[0]), self._now
        trajectories = self.trajectories(samples, version, window, rng)
        for rows in torch.arange(len(samples.batch)).split(self._update_batch):
            for s in trained:
                replay = self._replay(trajectories, rows, s, with_kl=False)
                self.on_policy.worker(replay, s, maker, version)

    def losses(
        self,
        trajectories: Trajectories,
        advantages: Advantages,
        trained: list[int],
        mesh: Mesh,
        metrics: Metrics,
    ) -> Iterator[Loss]:
        """Yield the losses of a training step whose samples have one advantage each."""
        values = advantages.values[:, None].expand(-1, len(trained))
        start_update = self.begin(trajectories, values, trained, advantages.minibatches, mesh)
        return update_losses(advantages, trained, start_update, metrics)

    def begin(
        self,
        trajectories: Trajectories,
        advantages: Float[Tensor, "b trained"],
        trained: list[int],
        updates: list[list[Minibatch]],
        mesh: Mesh,
    ) -> Callable[[list[Minibatch]], LossAt]:
        """Begin a training step; return what starts each of its updates, for `update_losses`.

        The advantages are of each sample at each trained transition. Call it before any weight of the step changes.
        """
        lagging = self._ess_unread = mesh.any(bool(trajectories.lags.any()))
        self._unchanged = not lagging
        if lagging:
            self.on_policy.over = True  # a replay with newer weights than the rollout's differs
            if self.correction.needs_start:
                trajectories = self._with_start(trajectories, trained, updates)
        return partial(self._start_update, trajectories, advantages, trained, mesh)

    @torch.no_grad()
    def _with_start(
        self, trajectories: Trajectories, trained: list[int], updates: list[list[Minibatch]]
    ) -> Trajectories:
        """Compute the log-densities of the trained transitions under the present weights, before any update."""
        log_probs = trajectories.rollout.log_probs.clone()
        for minibatch in itertools.chain.from_iterable(updates):
            for s in trained:
                at, real = trajectories.index(s), minibatch.real
                log_prob, *_ = self.density(trajectories, minibatch.rows, s)
                rows, own = minibatch.rows[real], real.nonzero().flatten().tolist()
                log_probs[:, at].index_copy_(0, rows.to(log_prob.device, non_blocking=True), take_rows(log_prob, own))
        return dataclasses.replace(trajectories, start_log_probs=log_probs)

    def _start_update(
        self,
        trajectories: Trajectories,
        advantages: Float[Tensor, "b trained"],
        trained: list[int],
        mesh: Mesh,
        minibatches: list[Minibatch],
    ) -> LossAt:
        """Return the function that computes the losses of one update and, with the last one, its metrics."""
        collector = ReplayCollector()
        compare: Compare = partial(self._replay, with_kl=True)
        if self.objective.of_sample:
            ratios = partial(self._replay, with_kl=False)
            compare = of_samples(ratios, compare, trajectories, minibatches, trained)

        def loss_at(minibatch: Minibatch, s: int, last: bool) -> MinibatchLoss:
            replay = compare(trajectories, minibatch.rows, s)
            advantage = advantages[minibatch.rows, trained.index(s)].to(widest(self.student.device))
            advantage = advantage.to(self.student.device, non_blocking=True)
            weight = self.correction.weight(replay, advantage)
            self.on_policy.update(replay, s)
            collector.add(replay, advantage, weight, minibatch)
            value = self._loss(replay, advantage, weight, minibatch, s)
            if not last:
                return MinibatchLoss(value)
            metrics = self._metrics(collector.gathered(mesh, len(trained)), trained, trajectories.batch)
            messages = (*self.on_policy.messages(), *self._ess_messages(metrics["ess"]))
            return MinibatchLoss(value, metrics, messages)

        return loss_at

    def state_dict(self) -> dict[str, Tensor]:
        return self.kl.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.kl.load_state_dict(state)

    def density(self, trajectories: Trajectories, rows: Tensor, s: int) -> tuple[PerSample, Latents, Tensor]:
        """Return log-density, mean and standard deviation of transition s under the present weights."""
        return self._density(trajectories.transition(s, rows), trajectories.equal_rows(rows, s), s)

    def _density(self, made: Transition, equal: EqualRows | None, s: int) -> tuple[PerSample, Latents, Tensor]:
        sigma = self.policy.sigmas[s]
        velocity = policy_velocity(self.student, made.x_t, sigma, made.batch, self.sampler, made.x0, equal)
        mean, std = self.policy.step(s, made.x_t, velocity)
        return self.policy.log_prob(made.x_next, mean, std), mean, std

    def _replay(self, trajectories: Trajectories, rows: Tensor, s: int, *, with_kl: bool) -> Replay:
        """Compare transition s under the present weights with the rollout, the proximal policy and the reference."""
        config = self.config
        made, equal = trajectories.transition(s, rows), trajectories.equal_rows(rows, s)
        log_prob, mean, std = self._density(made, equal, s)
        elements = math.prod(made.batch.latent_shape)
        lag = trajectories.lags[rows].to(log_prob.device, non_blocking=True)
        log_ratio = log_prob - made.log_prob
        mean_old = made.x_next - std * trajectories.noise(made.batch, s)
        ratio = guarded_log_ratio(log_ratio, mean, mean_old, std) if config.guard else log_ratio
        start = take_rows(trajectories.start_log_probs[:, trajectories.index(s)], rows.tolist()) - made.log_prob
        proximal = self.correction.proximal(log_ratio, start, lag)
        kl_old = gaussian_kl(mean.detach(), mean_old, std)
        kl = None
        if with_kl and self.kl.in_loss:
            kl = self.kl.of_transition(s, made, mean, equal)
        return Replay(log_ratio, ratio - proximal, kl_old, kl, self._clip(s, elements), lag, proximal, elements)

    def _loss(
        self,
        replay: Replay,
        advantage: PerSample,
        weight: PerSample,
        minibatch: Minibatch,
        s: int,
    ) -> Float[Tensor, ""]:
        """-weight objective + coefficient KL of one transition, weighted over the samples of the minibatch."""
        low, high = replay.clip
        loss = -self._step_weight(s) * weight * self.objective(replay.ratio, advantage, low, high)
        if replay.kl_reference is not None:
            loss = loss + self.kl.coefficient * replay.kl_reference
        return (minibatch.weights.to(loss, non_blocking=True) * loss).sum()

    def _clip(self, s: int, elements: int) -> tuple[float, float]:
        """The clip range of transition s, below and above 1."""
        config, std = self.config, self.policy.std(s)
        if not config.clip_velocity:
            return config.clip_low, config.clip_high
        change = self.policy.mean_gain(s) * config.clip_velocity / std
        return calibrated_clip(change, elements, std if config.guard else None)

    def _step_weight(self, s: int) -> float:
        """Weight of transition s; `equal` gives every velocity the gradient A noise / D at ratio 1."""
        if self.config.step_weight == "none":
            return 1.0
        if self.config.step_weight == "inverse_dt":
            return 1 / float(self.policy.sigmas[s] - self.policy.sigmas[s + 1])
        return (1 if self.config.guard else self.policy.std(s)) / self.policy.mean_gain(s)

    def _ess_messages(self, ess: float) -> tuple[str, ...]:
        """Compare ess of the step's first update, which is over all ranks, with its floor if samples lag."""
        unread, self._ess_unread = self._ess_unread, False
        if not unread or ess >= self.config.ess_floor:
            return ()
        self._rollouts.lower_ahead()
        floor = f"algorithm.ess_floor {self.config.ess_floor:g}"
        return (f"ess is {ess:.2g}, below {floor}: samples lag too far behind the student; later ones lag less",)

    def _metrics(self, stats: ReplayStats, trained: list[int], batch: Batch) -> dict[str, float]:
        """Metrics of one update over all ranks."""
        config, elements = self.config, math.prod(batch.latent_shape)
        clips = torch.tensor([self._clip(s, elements) for s in trained], dtype=torch.float64)
        metrics = stats.metrics(trained, elements)
        metrics |= self._rounding(metrics, trained, clips)
        if config.clip_velocity:
            metrics |= {"clip_low": float(clips[:, 0].mean()), "clip_high": float(clips[:, 1].mean())}
        metrics |= {**self._diagnostics(stats, clips), **self.correction.metrics(stats)}
        if bool(stats.lag.any()):
            metrics |= self._lag_metrics(stats, clips)
        if self.kl.in_loss:
            metrics |= self.kl.adapt(stats.kl_reference.mean(1))
        return metrics

    def _rounding(self, metrics: dict[str, float], trained: list[int], clips: Float[Tensor, "s 2"]) -> dict[str, float]:
        """Return the floor of approx_kl in bf16: what a step's first update measures before any weight has changed.

        Raise UserError for a KL to keep, or a clip range, that is below what rounding makes.
        """
        unchanged, self._unchanged = self._unchanged, False
        if not unchanged:
            return {}
        config, precision, kl = self.config, self.student.config.precision, metrics["approx_kl"]
        first = not self.on_policy.over  # update of the run
        if first:
            config.check_above(kl, precision)
        for s, (low, high) in zip(trained, clips.tolist(), strict=True) if first else ():
            floor = metrics[f"log_ratio_noise_floor/{s}"] * (float(self.policy.std(s)) if config.guard else 1.0)
            if min(low, high) <= floor and clips_ratios(self.objective):
                key = "clip_velocity" if config.clip_velocity else "clip_low" if low <= floor else "clip_high"
                raise UserError(
                    f"algorithm.{key} {vars(config)[key]:g} is below the log-ratio noise floor: rounding moves "
                    f"ratios of unchanged weights by {floor:.2g}, and the range is {min(low, high):.2g}; raise it"
                )
        return {"approx_kl_floor": kl} if precision == "bf16" else {}

    def _lag_metrics(self, stats: ReplayStats, clips: Float[Tensor, "s 2"]) -> dict[str, float]:
        """Return what shows how far the samples of each lag are from the present policy."""
        metrics = {}
        for lag in stats.lag[:, 0].unique().tolist():
            part = stats.of_lag(lag)
            values = self._diagnostics(part, clips) | {"approx_kl": float(part.kl_old.mean())}
            names = ("approx_kl", "clip_fraction", "zero_gradient_fraction", "ess")
            metrics |= {f"{name}/lag_{lag:.0f}": values[name] for name in names}
        return metrics

    def _diagnostics(self, stats: ReplayStats, clips: Float[Tensor, "s 2"]) -> dict[str, float]:
        """Return the objective's diagnostics; `clips` are the clip ranges of the trained transitions."""
        low, high = clips.T
        ratio, advantage, weight = stats.ratio.flatten(), stats.advantage.flatten(), stats.weight.flatten()
        low, high = (bound.expand(stats.ratio.shape).flatten() for bound in (low, high))
        return diagnostics(self.objective, ratio, advantage, clip_low=low, clip_high=high, weight=weight)
