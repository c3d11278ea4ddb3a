"""DanceGRPO: the student as a stochastic policy, improved by group-relative rewards (arXiv:2505.07818)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.types import Batch, Rollout
from unified_trainer.data.loader import Loader
from unified_trainer.methods.base import Loss, Method, MethodSetup, initial_copy, trained
from unified_trainer.methods.rl.dynamic_sampling import collect_samples
from unified_trainer.methods.rl.groups import GroupConfig, compute_advantages
from unified_trainer.methods.rl.policy import PolicyConfig, sample_policy
from unified_trainer.methods.rl.policy_update import PolicyUpdate
from unified_trainer.methods.rl.rollouts import Rollouts
from unified_trainer.methods.rl.updates import update_losses
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.rewards.reward import RewardSum
from unified_trainer.roles.role import Frozen, Role, Trainable
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
        self.config, self.reward, self.loader, self.rollouts = config, reward, loader, rollouts
        same = config.init_same_noise
        self.update = PolicyUpdate(config, sampler, student, reference, config.update_batch, same_noise=same)

    @staticmethod
    def sample(
        config: DanceGRPOConfig, sampler: SamplerConfig, role: Role, batch: Batch, step: int, rng: Streams
    ) -> Rollout:
        return sample_policy(config, sampler, role, batch, step, rng, same_noise=config.init_same_noise)

    def micro_batches(self, batch: Batch) -> list[Batch]:
        return [batch]  # all samples of the rank: groups are compared before the first update

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        window, trained = self.update.transitions(step, rng)
        check = partial(self.update.check_worker, window, trained, rng)
        samples, collected = collect_samples(
            self.config, self.rollouts, self.reward, self.loader, batch, step, rng, mesh, check
        )
        trajectories = self.update.trajectories(samples, step, window, rng)
        penalty, kl_metrics = self.update.kl.penalty(trajectories, mesh)
        advantages = compute_advantages(
            self.config, self.reward, samples.scores, penalty, samples.batch, self.loader, mesh
        )
        metrics = advantages.metrics | collected | kl_metrics | self.update.transition_metrics(window, trained)
        values = advantages.values[:, None].expand(-1, len(trained))
        start_update = self.update.begin(trajectories, values, trained, advantages.minibatches, mesh)
        yield from update_losses(advantages, trained, start_update, metrics)
        if self.update.lags_too_far:
            self.rollouts.lower_ahead()

    def state_dict(self) -> dict[str, Tensor]:
        return self.update.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.update.load_state_dict(state)
