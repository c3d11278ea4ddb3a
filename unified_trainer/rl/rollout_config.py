"""Settings of a training step's rollout, and of how its samples divide into updates."""

from dataclasses import dataclass

from unified_trainer.data.batch_plan import BatchPlan
from unified_trainer.errors import UserError
from unified_trainer.methods.base import MethodConfig, MethodSetup


@dataclass(frozen=True)
class RolloutConfig(MethodConfig):
    """Settings of the methods that learn from the rewards of a rollout's samples."""

    num_prompts: int = 8
    """Prompts per training step, over all ranks."""
    num_samples: int = 8
    """Samples of each prompt: the group within which advantages are computed."""
    prompts_per_update: int = 8
    """Prompts of one optimizer update; a rollout has num_prompts / prompts_per_update updates."""
    rollout_batch: int = 32
    """Samples generated, decoded and scored at a time, at most."""
    update_batch: int = 32
    """Samples per backward pass, at most: a rank takes the largest size that divides its share of an update."""
    init_same_noise: bool = False
    """Start all samples of a prompt from one initial noise instead of one each."""
    advantage_clip: float = 5.0
    """Largest absolute advantage."""

    def check(self, setup: MethodSetup) -> None:
        if self.rollout_batch < 1:
            raise UserError(f"algorithm.rollout_batch must be at least 1, not {self.rollout_batch}")
        if self.advantage_clip <= 0:
            raise UserError(f"algorithm.advantage_clip must be above 0, not {self.advantage_clip}")

    def plan(self) -> BatchPlan:
        keys = (
            "algorithm.num_prompts",
            "algorithm.num_samples",
            "algorithm.prompts_per_update",
            "algorithm.update_batch",
        )
        return BatchPlan(self.num_prompts, self.num_samples, self.prompts_per_update, self.update_batch, keys)
