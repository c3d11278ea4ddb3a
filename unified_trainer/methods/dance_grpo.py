"""DanceGRPO: the student as a stochastic policy, improved by group-relative rewards (arXiv:2505.07818)."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.data.loader import Loader
from unified_trainer.errors import UserError
from unified_trainer.methods.base import Loss, Method, MethodSetup, initial_copy, trained
from unified_trainer.numerics.kernels import Kernel, Policy
from unified_trainer.numerics.kl import KL, gaussian_kl
from unified_trainer.numerics.objectives import (
    Mode,
    ObjectiveParameters,
    calibrated_clip,
    diagnostics,
    guarded_log_ratio,
    leaves_trust_region,
    surrogate,
)
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.rl.dynamic_sampling import collect_samples
from unified_trainer.rl.groups import GroupConfig, compute_advantages
from unified_trainer.rl.minibatches import Minibatch
from unified_trainer.rl.reference_kl import KLSettings, ReferenceKL
from unified_trainer.rl.replay import Replay, ReplayCollector, ReplayStats, Trajectories, transition_noise
from unified_trainer.rl.rollouts import Rollouts
from unified_trainer.rl.sde_windows import WindowConfig
from unified_trainer.rl.updates import LossAt, MinibatchLoss, update_losses
from unified_trainer.roles.reward import RewardSum
from unified_trainer.roles.role import Frozen, Role, Trainable
from unified_trainer.sampling import SamplerConfig, policy_velocity, rollout
from unified_trainer.types import Batch, PerSample, Rollout


class ReplayError(UserError, RuntimeError):
    """The replay of a rollout differs from the rollout before any weight has changed."""


@dataclass(frozen=True)
class DanceGRPOConfig(GroupConfig):
    kernel: Kernel | Literal["auto"] = "auto"
    """Transition kernel of the policy; auto takes dance, or for an sde sampler its own renoising."""
    eta: float = 0.3
    """Noise level of the policy; flow_wan has none, and renoising is cps at level 1."""
    normalised: bool = True
    """Use the policy's normalised density; without, -(x_next - mean)^2 as published for cps (experimental)."""
    window: WindowConfig = field(default_factory=WindowConfig)
    timestep_fraction: float = 0.6
    """Fraction of the stochastic transitions trained, drawn anew in each training step. It has no effect with
    algorithm.window.size: a window is trained whole."""
    objective: Mode = "clip"
    """Policy objective; clip is measured, the others are experimental."""
    clip_low: float = 1e-4
    """The ratio is clipped at 1 - clip_low; it stays near 1 because log-densities are means over elements."""
    clip_high: float = 1e-4
    """The ratio is clipped at 1 + clip_high."""
    clip_velocity: float = 0.0
    """Change of the velocity, rms per element, at which the ratio reaches the clip range: calibrates the range of each
    transition from its noise and the latent size. 0 takes clip_low and clip_high (experimental)."""
    objective_parameters: ObjectiveParameters = field(default_factory=ObjectiveParameters)
    guard: bool = False
    """Centre the log-ratio on 0 with one spread at all steps, as GRPO-Guard does (experimental)."""
    trust_region: float = 0.0
    """KL per element from which samples that moved with their advantage are dropped; 0 is none (experimental)."""
    step_weight: Literal["none", "inverse_dt", "equal"] = "none"
    """Weight of transitions: none, 1 / (sigma - sigma'), or equal gradient per velocity (experimental)."""
    kl: KL = "exact"
    """KL to the reference per element: exact per transition, its estimates k1, k2 or k3, or of the velocities. In the
    loss the gradient of k1 has expectation zero."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the KL to the loss of each trained transition, or subtract it from a sample's reward."""
    kl_coefficient: float = 0.0
    """Coefficient of the KL to the reference, the student as the run started; 0 needs no reference."""
    kl_target: float = 0.0
    """KL to which the coefficient is adapted, from the one given; 0 keeps it fixed."""
    kl_horizon: float = 1e4
    """Samples over which an adapted coefficient may change by its own size."""

    def policy(self, sampler: SamplerConfig) -> Policy:
        """Return the policy of these settings and the sampler."""
        kernel, level = self.kernel, self.eta
        if kernel == "auto":
            kernel, level = sampler.kernel if sampler.solver == "sde" else ("dance", self.eta)
        return Policy(kernel, level, sampler.sigmas(), self.normalised, self.window.tail)

    @property
    def kl_settings(self) -> KLSettings:
        where = self.kl_in
        return KLSettings(self.kl, where, self.kl_coefficient, self.kl_target, self.kl_horizon, self.update_batch)

    def check(self, setup: MethodSetup) -> None:
        super().check(setup)
        sampler = setup.sampler
        if sampler.num_steps < 2:
            raise UserError("sampler.num_steps must be at least 2: the last transition is not trained")
        if not 0 < self.timestep_fraction <= 1:
            raise UserError(f"algorithm.timestep_fraction must be in (0, 1], not {self.timestep_fraction}")
        self._check_policy(sampler)
        self._check_objective()
        setup.check_guidance("student", "sampler.guidance_scale", sampler.guidance_scale)
        sigmas = sampler.sigmas().tolist()
        windows = [[sigmas[s] for s in window] for window in self.window.all(sampler.num_steps - 1)]
        setup.require_trained("student", windows, "algorithm.window")

    def _check_policy(self, sampler: SamplerConfig) -> None:
        if self.kernel == "ode" or self.eta <= 0:
            raise UserError("algorithm.kernel must be stochastic and algorithm.eta above 0: else there is no policy")
        if self.kernel == "cps" and self.eta > 1:
            raise UserError(f"algorithm.eta must be at most 1 for cps, not {self.eta}: 1 draws all noise anew")
        policy = self.policy(sampler)
        for s in range(sampler.num_steps - 1):
            if not policy.std(s) > 0:
                raise UserError(
                    f"algorithm.kernel {policy.kernel} at level {policy.level:g} has no density at transition {s}, "
                    f"from noise level {policy.sigmas[s]:.4g} to {policy.sigmas[s + 1]:.4g}"
                )
        if not self.normalised and policy.kernel != "cps":
            raise UserError("--algorithm.no-normalised needs algorithm.kernel cps")
        self.window.check(sampler.num_steps - 1)
        if self.window.size and sampler.solver == "sde":
            raise UserError("algorithm.window.size must be 0 for sampler.solver sde, which has no deterministic steps")
        if sampler.chunks.causal and sampler.chunks.context_noise:
            raise UserError("sampler.chunks.context_noise must be 0: the replay attends to clean chunks")

    def _check_objective(self) -> None:
        self.objective_parameters.check()
        if not 0 <= self.clip_low <= 1 or self.clip_high < 0:
            raise UserError("algorithm.clip_low must be in [0, 1] and algorithm.clip_high not negative")
        if self.trust_region < 0 or self.kl_coefficient < 0:
            raise UserError("algorithm.trust_region and algorithm.kl_coefficient must not be negative")
        if self.kl_target < 0 or self.kl_horizon <= 0:
            raise UserError("algorithm.kl_target must not be negative, and algorithm.kl_horizon must be above 0")
        if self.kl_in == "reward" and self.advantage == "gdpo":
            raise UserError(
                "algorithm.kl_in must be loss for algorithm.advantage gdpo, which compares each reward alone"
            )
        if not self.kl_coefficient and (self.kl_target or self.kl_in == "reward"):
            raise UserError("algorithm.kl_target and algorithm.kl_in reward need algorithm.kl_coefficient above 0")
        if self.clip_velocity < 0 or (self.clip_velocity and self.objective == "gspo"):
            raise UserError(
                "algorithm.clip_velocity must not be negative, and 0 for gspo, which has one ratio for all transitions"
            )
        if self.objective == "gspo" and self.step_weight != "none":
            raise UserError("algorithm.step_weight must be none for gspo, which has one ratio for all transitions")
        if not self.normalised and (self.guard or self.step_weight == "equal" or self.clip_velocity):
            raise UserError(
                "algorithm.guard, algorithm.step_weight equal and algorithm.clip_velocity need the normalised density: "
                "set --algorithm.normalised"
            )


class DanceGRPO(Method):
    """Roll out, score, compare within the group, and raise the density of the better samples."""

    config_class = DanceGRPOConfig
    roles = {
        "student": trained(),
        "reference": initial_copy("student", when=lambda config: config.kl_coefficient > 0),
    }
    uses_reward = True
    sampled_by = "student"
    trained_for_sampler = True

    def __init__(
        self,
        config: DanceGRPOConfig,
        sampler: SamplerConfig,
        *,
        student: Trainable,
        reward: RewardSum,
        loader: Loader,
        rollouts: Rollouts,
        reference: Frozen | None = None,
    ) -> None:
        self.config, self.sampler, self.policy = config, sampler, config.policy(sampler)
        self.student, self.reward, self.loader, self.rollouts = student, reward, loader, rollouts
        self.kl = ReferenceKL(config.kl_settings, sampler, self.policy, reference)
        self._checked, self._replay_error = False, 0.0  # the error is a fraction of the clip range, before any update

    @staticmethod
    def sample(
        config: DanceGRPOConfig, sampler: SamplerConfig, role: Role, batch: Batch, step: int, rng: Streams
    ) -> Rollout:
        window = config.window.at(step, sampler.num_steps - 1, rng.shared)
        keys = batch.prompt_ids if config.init_same_noise else batch.sample_ids
        noise = rng.noise("initial", keys, batch.latent_shape).to(role.device)
        draw = partial(transition_noise, rng, batch)
        return rollout(role, noise, batch, sampler, config.policy(sampler), window, draw)

    def micro_batches(self, batch: Batch) -> list[Batch]:
        return [batch]  # all samples of the rank: groups are compared before the first update

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        window = self.config.window.at(step, self.sampler.num_steps - 1, rng.shared)
        trained = self._trained_transitions(window, rng)
        samples, collected = collect_samples(
            self.config, self.rollouts, self.reward, self.loader, batch, step, rng, mesh
        )
        if "lag" in collected:
            self._checked = True  # a replay with newer weights than the rollout's differs
        trajectories = Trajectories(samples.batch, samples.rollout, window, rng)
        penalty, kl_metrics = self.kl.penalty(trajectories, mesh)
        advantages = compute_advantages(
            self.config, self.reward, samples.scores, penalty, samples.batch, self.loader, mesh
        )
        metrics = advantages.metrics | collected | kl_metrics
        if self.config.window.size:
            metrics["window_first"] = float(window.start)
        metrics |= self.student.transition_counts(self.policy.sigmas[trained])
        start_update = partial(self._start_update, trajectories, advantages.values, trained, mesh)
        yield from update_losses(advantages, trained, start_update, metrics)

    def _trained_transitions(self, window: range, rng: Streams) -> list[int]:
        """Return the transitions trained in this step, equal on all ranks; never the last, which has no density.

        They are those of the window that trained experts make; without a window size, a drawn fraction of them.
        """
        trainable = [s for s in window if self.student.trains(self.policy.sigmas[s])]
        if self.config.window.size:
            return trainable
        count = max(1, round(self.config.timestep_fraction * len(trainable)))
        return sorted(trainable[i] for i in rng.shared.permutation(len(trainable))[:count])

    def _start_update(
        self,
        trajectories: Trajectories,
        advantages: PerSample,
        trained: list[int],
        mesh: Mesh,
        minibatches: list[Minibatch],
    ) -> LossAt:
        """Return the function that computes the losses of one update and, with the last one, its metrics."""
        collector = ReplayCollector()
        sequences = {id(part): self._sequence(trajectories, part, trained) for part in minibatches}

        def loss_at(minibatch: Minibatch, s: int, last: bool) -> MinibatchLoss:
            replay, advantage = self._replay(trajectories, minibatch, s), advantages[minibatch.rows]
            self._check_replay(replay)
            collector.add(replay, advantage, minibatch)
            value = self._loss(replay, advantage, minibatch, s, sequences[id(minibatch)])
            if not last:
                return MinibatchLoss(value)
            metrics = self._metrics(collector.gathered(mesh, len(trained)), trained, trajectories.batch)
            messages = () if self._checked else (self._replay_message(),)
            self._checked = True
            return MinibatchLoss(value, metrics, messages)

        return loss_at

    def _replay(self, trajectories: Trajectories, minibatch: Minibatch, s: int) -> Replay:
        """Compare transition s under the present weights with the rollout and with the reference."""
        batch, x_t, x_next, log_prob_old, x0 = trajectories.transition(s, minibatch.rows)
        sigma = self.policy.sigmas[s]
        velocity = policy_velocity(self.student, x_t, sigma, batch, self.sampler, x0)
        mean, std = self.policy.step(s, x_t, velocity)
        log_prob = self.policy.log_prob(x_next, mean, std)
        log_ratio = log_prob - log_prob_old
        mean_old = x_next - std * trajectories.noise(batch, s).to(std)
        ratio = guarded_log_ratio(log_ratio, mean, mean_old, std) if self.config.guard else log_ratio
        kl_old = gaussian_kl(mean.detach(), mean_old, std)
        kl = self.kl.of_transition(s, x_t, x_next, mean, batch, x0) if self.kl.in_loss else None
        return Replay(log_ratio, ratio, kl_old, kl, self._clip(s, math.prod(batch.latent_shape)))

    @torch.no_grad()
    def _sequence(self, trajectories: Trajectories, minibatch: Minibatch, trained: list[int]) -> dict[int, PerSample]:
        """For gspo, the log-ratios of all trained transitions, from a first pass without gradient."""
        if self.config.objective != "gspo":
            return {}
        return {s: self._replay(trajectories, minibatch, s).ratio for s in trained}

    def _loss(
        self, replay: Replay, advantage: PerSample, minibatch: Minibatch, s: int, sequence: dict[int, PerSample]
    ) -> Float[Tensor, ""]:
        """-objective + coefficient KL of one transition, weighted over the samples of the minibatch."""
        config = self.config
        if sequence:
            # One ratio for all n transitions, each of which adds its part of the gradient in a pass of its own; the
            # factor n cancels the mean over transitions in `update_losses`.
            steps = [replay.ratio if other == s else ratio for other, ratio in sequence.items()]
            objective = len(steps) * self._surrogate(torch.stack(steps, 1), advantage, replay.clip)
        else:
            objective = self._surrogate(replay.ratio, advantage, replay.clip)
        if config.trust_region:
            leaves = leaves_trust_region(replay.ratio, advantage, replay.kl_old, config.trust_region)
            objective = objective.masked_fill(leaves, 0.0)
        loss = -self._step_weight(s) * objective
        if replay.kl_reference is not None:
            loss = loss + self.kl.coefficient * replay.kl_reference
        return (minibatch.weights.to(loss) * loss).sum()

    def state_dict(self) -> dict[str, Tensor]:
        return self.kl.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.kl.load_state_dict(state)

    def _surrogate(self, ratio: Tensor, advantage: PerSample, clip: tuple[float, float]) -> PerSample:
        parameters = dataclasses.asdict(self.config.objective_parameters)
        return surrogate(self.config.objective, ratio, advantage, clip_low=clip[0], clip_high=clip[1], **parameters)

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

    def _check_replay(self, replay: Replay) -> None:
        """Raise ReplayError if a replay differs from its rollout by more than the clip range before any update."""
        if self._checked:
            return
        worst, (low, high) = replay.ratio.detach().abs().max().item(), replay.clip
        if not worst <= min(low, high):
            raise ReplayError(
                f"the first update's log-ratio is {worst:.3g} with unchanged weights, above the clip range "
                f"{low:g}/{high:g}: rollout and replay differ. Set "
                "algorithm.update_batch equal to algorithm.rollout_batch, student.precision to fp32, or widen the range"
            )
        self._replay_error = max(self._replay_error, worst / min(low, high))

    def _replay_message(self) -> str:
        percent = 100 * self._replay_error
        return f"on-policy check: largest log-ratio before the first update is {percent:.2g}% of the clip range"

    def _metrics(self, stats: ReplayStats, trained: list[int], batch: Batch) -> dict[str, float]:
        """Metrics of one update over all ranks."""
        config, elements = self.config, math.prod(batch.latent_shape)
        parameters = dataclasses.asdict(config.objective_parameters)
        metrics = stats.metrics(trained, elements)
        clips = [self._clip(s, elements) for s in trained]
        low, high = torch.tensor(clips, dtype=torch.float64).to(stats.ratio.device).T
        if config.clip_velocity:
            metrics |= {"clip_low": float(low.mean()), "clip_high": float(high.mean())}
        if config.objective == "gspo":
            ratio, advantage, low, high = stats.ratio, stats.advantage[:, 0], low[0], high[0]
        else:
            ratio, advantage = stats.ratio.flatten(), stats.advantage.flatten()
            low, high = (bound.expand(stats.ratio.shape).flatten() for bound in (low, high))
        metrics |= diagnostics(config.objective, ratio, advantage, clip_low=low, clip_high=high, **parameters)
        if config.trust_region:
            columns = (column.flatten() for column in (stats.ratio, stats.advantage, stats.kl_old))
            left = leaves_trust_region(*columns, config.trust_region)
            metrics["trust_region_left"] = float(left.float().mean())
        if self.kl.in_loss:
            metrics |= self.kl.adapt(stats.kl_reference.mean(1))
        return metrics
