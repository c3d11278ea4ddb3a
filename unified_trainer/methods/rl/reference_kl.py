"""The KL of the policy to a reference, in the loss or in the reward, and its coefficient."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.types import Latents, PerSample
from unified_trainer.methods.base import Metrics
from unified_trainer.methods.rl.replay import Trajectories, Transition
from unified_trainer.numerics.kernels import Policy
from unified_trainer.numerics.kl import AdaptiveKL, KLKind, gaussian_kl, gaussian_kl_estimate
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.rewards.reward import check_real
from unified_trainer.roles.role import Frozen
from unified_trainer.sampling.equal_rows import EqualRows
from unified_trainer.sampling.solver import SamplerConfig, policy_velocity


@dataclass(frozen=True)
class KLSettings:
    """The settings that a method with a reference KL hands over."""

    kind: KLKind
    where: Literal["loss", "reward"]
    coefficient: float
    target: float  # KL that an adaptive coefficient settles at; 0 keeps the coefficient
    horizon: float  # samples over which an adaptive coefficient may change by its own size
    batch: int  # samples per pass of the KL of whole rollouts


def check_reference(coefficient: float, reference: Frozen | None) -> None:
    """Raise UserError for a KL coefficient above 0 without a reference that the KL is measured to."""
    if coefficient and reference is None:
        raise UserError("algorithm.kl_coefficient above 0 needs a reference role: set it to 0")


class ReferenceKL:
    """The KL to a reference role, with a fixed or adaptive coefficient."""

    def __init__(self, settings: KLSettings, sampler: SamplerConfig, policy: Policy, reference: Frozen | None) -> None:
        check_reference(settings.coefficient, reference)
        self._settings, self._sampler, self._policy, self._reference = settings, sampler, policy, reference
        self._estimate = partial(gaussian_kl_estimate, settings.kind) if settings.kind != "exact" else _exact
        self._adaptive = (
            AdaptiveKL(settings.coefficient, settings.target, settings.horizon) if settings.target else None
        )

    @property
    def coefficient(self) -> float:
        """The present coefficient."""
        return self._adaptive.coefficient if self._adaptive else self._settings.coefficient

    @property
    def in_loss(self) -> bool:
        return self._settings.coefficient > 0 and self._settings.where == "loss"

    @property
    def in_reward(self) -> bool:
        return self._settings.coefficient > 0 and self._settings.where == "reward"

    def of_transition(self, s: int, made: Transition, mean: Latents, equal: EqualRows | None = None) -> PerSample:
        """Return the KL of transition s with this mean to the reference's transition.

        The reference is called once for rows that are `equal` before the transition.
        """
        assert self._reference is not None  # `check_reference` requires it for a KL
        sigma = self._policy.sigmas[s]
        with torch.no_grad():
            velocity = policy_velocity(self._reference, made.x_t, sigma, made.batch, self._sampler, made.x0, equal)
        mean_ref, std = self._policy.step(s, made.x_t, velocity)
        return self._estimate(made.x_next, mean, mean_ref, std)

    @torch.no_grad()
    def of_samples(self, trajectories: Trajectories) -> PerSample:
        """Return the KL of the rollout itself, averaged over each sample's stochastic transitions."""
        parts = []
        for rows in torch.arange(len(trajectories.batch)).split(self._settings.batch):
            steps = []
            for s in trajectories.window:
                made = trajectories.transition(s, rows)
                _, std = self._policy.step(s, made.x_t, torch.zeros_like(made.x_t))
                mean = made.x_next - std * trajectories.noise(made.batch, s)
                steps.append(self.of_transition(s, made, mean, trajectories.equal_rows(rows, s)))
            parts.append(torch.stack(steps).mean(0))
        return torch.cat(parts)

    def penalty(self, trajectories: Trajectories, mesh: Mesh, metrics: Metrics) -> PerSample | None:
        """Return the penalty on each sample's reward, and note it; None without a KL in the reward."""
        if not self.in_reward:
            return None
        kl, coefficient, batch = self.of_samples(trajectories), self.coefficient, trajectories.batch
        everywhere = mesh.gather(kl)
        check_real(coefficient * everywhere, lambda row: "its KL: ", batch.prompts, mesh.data_rank * len(batch))
        metrics |= self.adapt(everywhere)
        return coefficient * kl

    def adapt(self, kl: Tensor) -> Metrics:
        """Return metrics of the KL of all samples and the coefficient used, then adapt the coefficient."""
        metrics = {"kl": float(kl.mean()), "kl_coefficient": self.coefficient}
        if self._adaptive:
            self._adaptive.update(metrics["kl"], len(kl))
        return metrics

    def state_dict(self) -> dict[str, Tensor]:
        if not self._adaptive:
            return {}
        return {"kl_coefficient": torch.tensor(self._adaptive.coefficient, dtype=torch.float64)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if self._adaptive:
            self._adaptive.coefficient = float(state["kl_coefficient"])


def _exact(x_next: Latents, mean: Latents, mean_ref: Latents, std: Tensor) -> PerSample:
    """Return the KL itself, which does not read the state that was drawn."""
    return gaussian_kl(mean, mean_ref, std)
