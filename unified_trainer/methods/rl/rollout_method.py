"""The base of the methods that learn from the rewards of their own samples."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from unified_trainer.basics.types import Batch, Rollout, of_kind
from unified_trainer.data.loader import Loader
from unified_trainer.methods.base import Method, Metrics
from unified_trainer.methods.rl.buffer import BufferConfig, ExperienceBuffer
from unified_trainer.methods.rl.policy import PolicyConfig, sample_policy
from unified_trainer.methods.rl.policy_update import PolicyUpdate
from unified_trainer.methods.rl.rollouts import Rollouts, ScoredSamples, lag_metrics
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.rewards.reward import RewardSum
from unified_trainer.roles.role import Frozen, Role, Trainable
from unified_trainer.sampling.solver import SamplerConfig


class RolloutMethod(Method, shared=True):
    """One training step is a rollout of the student, scored, and one or more updates on its samples."""

    uses_reward = True
    sampled_by = "student"
    trained_for_sampler = True
    student: Trainable
    reference: Frozen | None = None  # where a KL is used
    reward: RewardSum
    loader: Loader
    rollouts: Rollouts

    def micro_batches(self, batch: Batch) -> list[Batch]:
        return [batch]  # all samples of the rank: they are compared before the first update

    def sample_from(self, rollouts: Rollouts) -> None:
        """Take the samples from these rollouts."""
        self.rollouts = rollouts

    def roll_out(self, batch: Batch, step: int, rng: Streams, mesh: Mesh, metrics: Metrics) -> ScoredSamples:
        """Sample and score a batch; note how old its samples are, and what they took."""
        samples = self.rollouts.samples(batch, step, rng)
        metrics |= lag_metrics(samples, step, mesh) | self.rollouts.metrics()
        return samples


class PolicyMethod(RolloutMethod, shared=True):
    """A method that trains the student's transitions as those of a stochastic policy."""

    def __init__(self, config: PolicyConfig, sampler: SamplerConfig, **parts: Any) -> None:
        super().__init__(config, sampler, **parts)
        self.update = PolicyUpdate(
            config,
            sampler,
            self.student,
            self.reference,
            update_batch=config.update_batch,
            same_noise=config.init_same_noise,
        )
        self.sample_from(self.rollouts)

    def sample_from(self, rollouts: Rollouts) -> None:
        super().sample_from(rollouts)
        self.update.attach(rollouts)

    @staticmethod
    def sample(
        config: PolicyConfig, sampler: SamplerConfig, role: Role, batch: Batch, step: int, rng: Streams
    ) -> Rollout:
        return sample_policy(config, sampler, role, batch, step, rng, same_noise=config.init_same_noise)

    def state_dict(self) -> dict[str, Tensor]:
        return self.update.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.update.load_state_dict(state)


def with_buffer(method: Method, config: BufferConfig) -> ExperienceBuffer:
    """Let a method take its samples from an experience buffer around its rollouts, and return the buffer."""
    method = of_kind(RolloutMethod, method)
    buffer = ExperienceBuffer(method.rollouts, config, method.loader)
    method.sample_from(buffer)
    return buffer
