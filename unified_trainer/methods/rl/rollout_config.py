"""Settings of a training step's rollout, and of how its samples divide into updates."""

from dataclasses import dataclass
from typing import Annotated, Literal

from unified_trainer.basics.ranges import MAY_CHANGE, Count, Positive
from unified_trainer.data.batch_plan import BatchPlan
from unified_trainer.methods.base import MethodConfig
from unified_trainer.sampling.solver import SamplerConfig

TrajectoryPlace = Literal["device", "cpu"]


@dataclass(frozen=True)
class RolloutConfig(MethodConfig):
    """Settings of the methods that learn from the rewards of a rollout's samples."""

    num_prompts: Count = 8
    """Prompts per training step, over all ranks."""
    num_samples: Count = 8
    """Samples of each prompt: the group within which advantages are computed."""
    prompts_per_update: Count = 8
    """Prompts of one optimizer update; a rollout has num_prompts / prompts_per_update updates."""
    rollout_batch: Annotated[Count, MAY_CHANGE] = 32
    """Samples generated, decoded and scored at a time, at most."""
    update_batch: Annotated[Count, MAY_CHANGE] = 32
    """Samples per backward pass, at most: a rank takes the largest size that divides its share of an update."""
    trajectories: Annotated[TrajectoryPlace, MAY_CHANGE] = "device"
    """Where the latents of a rollout are kept until its updates read them: on the device, or in pinned CPU memory. The
    latents of a backward pass are then copied while the pass before it runs. Changes no result."""
    init_same_noise: bool = False
    """Start all samples of a prompt from one initial noise instead of one each."""
    advantage_clip: Positive = 5.0
    """Largest absolute advantage."""

    def kept_states(self, sampler: SamplerConfig) -> int:
        """Return how many states of each sample are kept for the update; here its end alone."""
        return 1

    def plan(self) -> BatchPlan:
        keys = (
            "algorithm.num_prompts",
            "algorithm.num_samples",
            "algorithm.prompts_per_update",
            "algorithm.update_batch",
        )
        return BatchPlan(self.num_prompts, self.num_samples, self.prompts_per_update, self.update_batch, keys)
