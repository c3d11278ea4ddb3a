"""PPO: the student as a stochastic policy, improved by rewards above a learned value function (arXiv:1707.06347)."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Count, Fraction, NonNegative, PeriodOrZero, Positive, PositiveFraction
from unified_trainer.basics.types import Batch, PerSample, take_rows, widest
from unified_trainer.data.batch_plan import largest_divisor
from unified_trainer.methods.base import Loss, MethodSetup, Metrics, initial_copy, trained
from unified_trainer.methods.rl.groups import reward_metrics
from unified_trainer.methods.rl.minibatches import Minibatch, plan_minibatches
from unified_trainer.methods.rl.policy import PolicyConfig
from unified_trainer.methods.rl.replay import Trajectories
from unified_trainer.methods.rl.rollout_method import PolicyMethod
from unified_trainer.methods.rl.scored_groups import ScoredGroups
from unified_trainer.methods.rl.updates import MinibatchLoss, role_losses
from unified_trainer.numerics.advantages import gae, standardized, vtrace
from unified_trainer.numerics.importance_weight import scaled_log_ratio
from unified_trainer.numerics.values import explained_variance, value_loss
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.role import TrainableConfig
from unified_trainer.roles.value import Value
from unified_trainer.sampling.solver import SamplerConfig

PerTransition = Float[Tensor, "b s"]  # of each sample at the state before each transition of the window


@dataclass(frozen=True)
class DancePPOConfig(PolicyConfig):
    """Settings of the policy, of its update and of the value function."""

    has_values: ClassVar[bool] = True
    num_prompts: Count = 64
    """Prompts per training step, over all ranks."""
    num_samples: Count = 1
    """Samples of each prompt; one is enough, because advantages are relative to predicted rewards."""
    prompts_per_update: Count = 32
    """Prompts of one optimizer update; a rollout has num_prompts / prompts_per_update updates."""
    discount: PositiveFraction = 1.0
    """Discount of the reward for each transition between a state and the end."""
    gae_lambda: Fraction = 1.0
    """Lambda of GAE: 1 compares the reward with the predicted one, lower values rely more on later predictions."""
    normalise_advantages: bool = True
    """Give the advantages of a training step, over all samples and trained transitions, mean 0 and std 1."""
    value_clip: NonNegative = 0.2
    """Change of a value in one training step, in standard deviations of the reward, above which it gets no further
    gradient; 0 is no clip."""
    value_warmup_steps: PeriodOrZero = 0
    """Training steps at the start in which only the value function is updated."""
    rho_bar: Positive = 1.0
    """For algorithm.correction vtrace: largest importance ratio with which a transition corrects the value before
    it."""
    c_bar: Positive = 1.0
    """For algorithm.correction vtrace: largest importance ratio with which a transition hands on the corrections of
    later ones."""

    def kept(self, sampler: SamplerConfig, window: range) -> range:
        return window  # every state has a value

    def updates(self, role: str, steps: int, sampler: SamplerConfig) -> int:
        return super().updates(role, max(0, steps - self.value_warmup_steps * (role == "student")), sampler)

    def check(self, setup: MethodSetup) -> None:
        super().check(setup)
        if self.num_prompts * self.num_samples < 2:
            raise UserError("algorithm.num_prompts x algorithm.num_samples must be at least 2, for a std of rewards")
        if (self.rho_bar, self.c_bar) != (1, 1) and self.correction != "vtrace":
            raise UserError("algorithm.rho_bar and algorithm.c_bar need algorithm.correction vtrace, which reads them")
        if self.c_bar > self.rho_bar:
            raise UserError(f"algorithm.c_bar must be at most algorithm.rho_bar ({self.rho_bar:g}), not {self.c_bar:g}")
        if setup.sampler.chunks.causal and (self.window.size or (self.discount, self.gae_lambda) != (1, 1)):
            raise UserError(
                "algorithm.window.size must be 0, algorithm.discount 1 and algorithm.gae_lambda 1 for a causal "
                "student: each of its samples has one value, that of the initial noise"
            )
        value = setup.roles["value"]
        if isinstance(value, TrainableConfig) and value.ema_decay:
            raise UserError("value.ema_decay must be 0: nothing reads an average of the value function")
        sigmas = setup.sampler.sigmas().tolist()
        states = {s for window in self.windows(setup.sampler) for s in valued(window, setup.sampler)}
        setup.require_trained("value", [[sigmas[s]] for s in sorted(states)], "algorithm.window")


class DancePPO(PolicyMethod):
    """Roll out, score, compare with predicted rewards, and raise the density of the better transitions."""

    config_class = DancePPOConfig
    roles = {
        "student": trained(),
        "value": trained(Value),
        "reference": initial_copy("student", when=lambda config: config.kl_coefficient > 0),
    }
    value: Value

    def __init__(self, config: DancePPOConfig, sampler: SamplerConfig, **parts: Any) -> None:
        super().__init__(config, sampler, **parts)
        self.scale = torch.zeros(2, dtype=torch.float64)  # mean and std of the first rewards, the unit of all values

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        metrics: Metrics = {}
        window, trained = self.update.transitions(step, rng, metrics)
        samples = self.roll_out(batch, step, rng, mesh, metrics)
        trajectories = self.update.trajectories(samples, step, window, rng)
        own = samples.batch.sample_ids  # advantages compare no groups: a sample is left out alone
        scored = ScoredGroups.of(samples, own, self.reward, mesh, metrics)
        returns = self._returns(scored, trajectories, mesh, metrics)
        values = self._values(trajectories)
        targets, advantages = self._compare(trajectories, _own(scored.everywhere(returns), mesh), values, mesh)
        advantages = self._normalised(advantages[:, [trajectories.index(s) for s in trained]], scored, mesh)
        self._note_values(mesh.gather(values)[scored.rows], returns, window, metrics)

        updates = self._minibatches(scored, mesh)
        value_at = partial(self._value_loss, trajectories, values, targets)
        start_update = self.update.begin(trajectories, advantages, trained, updates, mesh)
        for minibatches in updates:
            yield from role_losses(
                "value", minibatches, valued(window, self.sampler), value_at, metrics, scored.messages
            )
            if step >= self.config.value_warmup_steps:
                yield from role_losses("student", minibatches, trained, start_update(minibatches), metrics)

    def _returns(self, scored: ScoredGroups, trajectories: Trajectories, mesh: Mesh, metrics: Metrics) -> PerSample:
        """Return the rewards of all ranks' scored samples minus the KL's penalty, in the unit of the value function."""
        penalty, rewards = self.update.kl.penalty(trajectories, mesh, metrics), scored.rewards
        ids = scored.ids // self.config.num_samples
        metrics |= reward_metrics(rewards, ids) | self.reward.metrics(scored.scores, ids)
        kl = 0.0 if penalty is None else mesh.gather(penalty).cpu().double()[scored.rows]
        return self._standardised(rewards - kl)

    def _minibatches(self, scored: ScoredGroups, mesh: Mesh) -> list[list[Minibatch]]:
        """Return the minibatches of each update, which together hold all of this rank's scored samples."""
        updates = self.config.num_prompts // self.config.prompts_per_update
        every = scored.everywhere(torch.ones(len(scored.rows), dtype=torch.bool))
        size = largest_divisor(len(every) // mesh.data_size // updates, self.config.update_batch)
        return plan_minibatches(every, every.double(), mesh.data_rank, mesh.data_size, updates, size)

    def _standardised(self, rewards: PerSample) -> PerSample:
        """Return rewards in the unit of the value function: the mean and std of all samples of the first step."""
        if not self.scale[1]:
            self.scale.copy_(torch.stack([rewards.mean(), rewards.std()]))
        mean, std = self.scale.tolist()
        return (rewards - mean) / (std or 1.0)

    @torch.no_grad()
    def _values(self, trajectories: Trajectories) -> PerTransition:
        """Return the present values of all states before a transition of the window, float64 on the CPU."""
        states = valued(trajectories.window, self.sampler)
        values = self._of(states, trajectories, partial(self._value, trajectories))
        return values.expand(-1, len(trajectories.window))

    def _value(self, trajectories: Trajectories, rows: Tensor, s: int) -> PerSample:
        made = trajectories.transition(s, rows)
        value = self.value.value(made.x_t, self.update.policy.sigmas[s].expand(len(rows)), made.batch.cond)
        return value.to(widest(value.device))

    @torch.no_grad()
    def _log_ratios(self, trajectories: Trajectories) -> PerTransition:
        """Return the log importance ratios of the present policy to the one that drew the transitions; 0 at lag 0."""

        def log_ratio(rows: Tensor, s: int) -> PerSample:
            log_prob, mean, _ = self.update.density(trajectories, rows, s)
            moved = log_prob - take_rows(trajectories.rollout.log_probs[:, trajectories.index(s)], rows.tolist())
            return scaled_log_ratio(moved, mean[0].numel(), self.config.weight_density)

        return self._of(trajectories.window, trajectories, log_ratio) * (trajectories.lags > 0)[:, None]

    def _of(
        self, transitions: range, trajectories: Trajectories, number: Callable[[Tensor, int], PerSample]
    ) -> PerTransition:
        """Return a number of all samples at these transitions, computed for `update_batch` samples at a time."""
        parts = torch.arange(len(trajectories.batch)).split(self.config.update_batch)
        return torch.cat([torch.stack([number(rows, s) for s in transitions], 1) for rows in parts]).cpu().double()

    def _compare(
        self, trajectories: Trajectories, returns: PerSample, values: PerTransition, mesh: Mesh
    ) -> tuple[PerTransition, PerTransition]:
        """Return value targets and advantages: by GAE, or by V-trace if it is asked for and a sample of a rank lags."""
        rewards = torch.zeros_like(values)
        rewards[:, -1] = returns  # the steps after the window are deterministic
        discounts, end, config = torch.full_like(values, self.config.discount), 0.0, self.config
        if not (self.update.correction.of_values and mesh.any(bool(trajectories.lags.any()))):
            return gae(rewards, values, discounts, end, config.gae_lambda)
        log_rho = self._log_ratios(trajectories)
        return vtrace(log_rho, rewards, values, discounts, end, config.rho_bar, config.c_bar, config.gae_lambda)

    def _normalised(self, advantages: PerTransition, scored: ScoredGroups, mesh: Mesh) -> PerTransition:
        """Standardise the advantages over scored samples and trained transitions of all ranks, and clip them."""
        if self.config.normalise_advantages:
            everywhere = mesh.gather(advantages)
            found = everywhere[scored.rows]
            everywhere[scored.rows] = standardized(found.flatten()).view_as(found)
            advantages = _own(everywhere, mesh)
        return advantages.clamp(-self.config.advantage_clip, self.config.advantage_clip)

    def _value_loss(
        self,
        trajectories: Trajectories,
        values: PerTransition,
        targets: PerTransition,
        minibatch: Minibatch,
        s: int,
        last: bool,
    ) -> MinibatchLoss:
        """The value loss at the state before transition s, weighted over the samples of the minibatch."""
        rows, at = minibatch.rows, trajectories.index(s)
        value = self._value(trajectories, rows, s)
        value_old, target = (x[rows, at].to(value, non_blocking=True) for x in (values, targets))
        loss = value_loss(value, value_old, target, self.config.value_clip)
        seen = {"value_loss": take_rows(loss.detach(), minibatch.real.nonzero().flatten().tolist())}
        return MinibatchLoss((minibatch.weights.to(loss, non_blocking=True) * loss).sum(), seen)

    def _note_values(self, values: PerTransition, returns: PerSample, window: range, metrics: Metrics) -> None:
        """Note the mean prediction in the unit of the reward, and how much it explains of the discounted returns."""
        mean, std = self.scale.tolist()
        to_end = torch.arange(len(window) - 1, -1, -1).to(returns)
        discounted = returns[:, None] * self.config.discount**to_end
        metrics["value_mean"] = mean + std * float(values.mean())
        metrics["explained_variance"] = explained_variance(values, discounted)
        for s, value, target in zip(window, values.unbind(1), discounted.unbind(1), strict=True):
            metrics[f"explained_variance/{s}"] = explained_variance(value, target)

    def state_dict(self) -> dict[str, Tensor]:
        return super().state_dict() | {"reward_scale": self.scale}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        self.scale.copy_(state["reward_scale"])


def valued(window: range, sampler: SamplerConfig) -> range:
    """Return the transitions of a window whose states have a value: all, or the first one for a causal student.

    The state of a causal student's later chunk follows from what was drawn for the chunks before it, so that its value
    would be no baseline of these draws. The initial noise depends on none of them.
    """
    return window[:1] if sampler.chunks.causal else window


def _own(rows: Tensor, mesh: Mesh) -> Tensor:
    """Return this rank's part of what was gathered from all ranks."""
    return rows.chunk(mesh.data_size)[mesh.data_rank]
