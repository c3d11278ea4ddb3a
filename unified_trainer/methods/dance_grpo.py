"""DanceGRPO: the student as a stochastic policy, improved by group-relative rewards (arXiv:2505.07818)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.types import Batch
from unified_trainer.methods.base import Loss, MethodSetup, Metrics, initial_copy, trained
from unified_trainer.methods.rl.dynamic_sampling import with_replacement
from unified_trainer.methods.rl.groups import GroupConfig, Groups
from unified_trainer.methods.rl.policy import PolicyConfig
from unified_trainer.methods.rl.rollout_method import PolicyMethod
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.sampling.solver import SamplerConfig


@dataclass(frozen=True)
class DanceGRPOConfig(PolicyConfig, GroupConfig):
    """Settings of the policy, of its update and of the groups."""

    def check(self, setup: MethodSetup) -> None:
        super().check(setup)
        if self.kl_in == "reward" and self.advantage == "gdpo":
            raise UserError(
                "algorithm.kl_in must be loss for algorithm.advantage gdpo, which compares each reward alone"
            )


class DanceGRPO(PolicyMethod):
    """Roll out, score, compare within the group, and raise the density of the better samples."""

    config_class = DanceGRPOConfig
    trains_flow_maps = True
    roles = {
        "student": trained(),
        "reference": initial_copy("student", when=lambda config: config.kl_coefficient > 0),
    }

    def __init__(self, config: DanceGRPOConfig, sampler: SamplerConfig, **parts: Any) -> None:
        super().__init__(config, sampler, **parts)
        self.groups = Groups(config, self.reward, self.loader)
        self.rollouts = with_replacement(self.rollouts, config, self.reward, self.loader)

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        metrics: Metrics = {}
        window, trained = self.update.transitions(step, rng, metrics)
        samples = self.roll_out(batch, step, rng, mesh, metrics)
        trajectories = self.update.trajectories(samples, step, window, rng)
        penalty = self.update.kl.penalty(trajectories, mesh, metrics)  # None unless the KL is in the reward
        advantages = self.groups.advantages(samples, penalty, metrics)  # (reward - mean) / std of the group
        yield from self.update.losses(trajectories, advantages, trained, mesh, metrics)
