"""How far the policy is from a reference, where that counts, and by how much."""

from collections.abc import Mapping

import torch
from torch import Tensor

from unified_trainer.methods.dance_grpo_config import DanceGRPOConfig
from unified_trainer.numerics.kernels import Policy
from unified_trainer.numerics.kl import KL, AdaptiveKL, gaussian_kl, kl_estimate, velocity_kl
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.rl.replay import Trajectories
from unified_trainer.roles.role import Frozen
from unified_trainer.sampling import SamplerConfig, policy_velocity
from unified_trainer.types import Batch, Latents, PerSample


def divergence(
    kind: KL,
    policy: Policy,
    s: int,
    x_t: Latents,
    x_next: Latents,
    mean: Latents,
    log_prob: PerSample,
    velocity_ref: Latents,
) -> PerSample:
    """KL of transition s, made with this mean and density, to one of another velocity.

    A mean is linear in its velocity, so that the difference of means holds that of velocities.
    """
    mean_ref, std = policy.step(s, x_t, velocity_ref)
    if kind == "velocity":
        return velocity_kl(mean, mean_ref) / policy.mean_gain(s) ** 2
    if kind == "exact":
        return gaussian_kl(mean, mean_ref, std)
    return kl_estimate(kind, log_prob, policy.log_prob(x_next, mean_ref, std))


class ReferenceKL:
    """The KL of the settings to the reference, in the loss or in the reward, and its coefficient."""

    def __init__(
        self, config: DanceGRPOConfig, sampler: SamplerConfig, policy: Policy, reference: Frozen | None
    ) -> None:
        if config.kl_coefficient and reference is None:
            raise ValueError("algorithm.kl_coefficient needs the role reference: a KL is to something. Set it to 0")
        self._config, self._sampler, self._policy, self._reference = config, sampler, policy, reference
        self._adaptive = (
            AdaptiveKL(config.kl_coefficient, config.kl_target, config.kl_horizon) if config.kl_target else None
        )

    @property
    def coefficient(self) -> float:
        """As it is now."""
        return self._adaptive.coefficient if self._adaptive else self._config.kl_coefficient

    @property
    def in_loss(self) -> bool:
        return self._config.kl_coefficient > 0 and self._config.kl_in == "loss"

    @property
    def in_reward(self) -> bool:
        return self._config.kl_coefficient > 0 and self._config.kl_in == "reward"

    def of_transition(
        self, s: int, x_t: Latents, x_next: Latents, mean: Latents, log_prob: PerSample, batch: Batch, x0: Latents
    ) -> PerSample:
        """Of transition s, made with this mean and density, to how the reference makes it."""
        with torch.no_grad():
            velocity = policy_velocity(self._reference, x_t, self._policy.sigmas[s], batch, self._sampler, x0)
        return divergence(self._config.kl, self._policy, s, x_t, x_next, mean, log_prob, velocity)

    @torch.no_grad()
    def of_samples(self, trajectories: Trajectories) -> PerSample:
        """Of the rollout itself, averaged over each sample's stochastic transitions."""
        parts = []
        for rows in torch.arange(len(trajectories.batch)).split(self._config.update_batch):
            steps = []
            for s in trajectories.window:
                batch, x_t, x_next, log_prob, x0 = trajectories.transition(s, rows)
                _, std = self._policy.step(s, x_t, torch.zeros_like(x_t))
                mean = x_next - std * trajectories.noise(batch, s).to(std)
                steps.append(self.of_transition(s, x_t, x_next, mean, log_prob, batch, x0))
            parts.append(torch.stack(steps).mean(0))
        return torch.cat(parts)

    def penalty(self, trajectories: Trajectories, mesh: Mesh) -> tuple[PerSample | None, dict[str, float]]:
        """What is taken off each sample's reward, if anything is, and its metrics."""
        if not self.in_reward:
            return None, {}
        kl, coefficient = self.of_samples(trajectories), self.coefficient
        return coefficient * kl, self.note(mesh.gather(kl))

    def note(self, kl: Tensor) -> dict[str, float]:
        """What the KL of all samples was, and the coefficient it counted with; an adaptive one moves after that."""
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
