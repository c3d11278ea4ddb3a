"""The reward's own gradient, through the decoder and a sampling step (ReFL, arXiv:2304.05977; DRaFT, 2309.17400)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from unified_trainer.data.batch_plan import BatchPlan
from unified_trainer.methods.base import Loss
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.experts import ExpertLayout, check_guidance
from unified_trainer.roles.reward import Reward
from unified_trainer.roles.role import Trainable
from unified_trainer.sampling import SamplerConfig, predict_at
from unified_trainer.types import Batch, Latents


@dataclass(frozen=True)
class RewardGradientConfig:
    batch_size: int = 16  # samples per update, over all ranks, each of another prompt
    micro_batch: int = 16  # samples per backward pass, each decoded and scored with its graph
    last_calls: int = 1  # the sample is what one of so many last network calls predicts, the same on all ranks

    @property
    def needs_clips(self) -> bool:
        return False

    def check(self, sampler: SamplerConfig) -> None:
        if not 1 <= self.last_calls <= sampler.num_steps:
            raise ValueError(
                f"algorithm.last_calls must be from 1 to the {sampler.num_steps} of sampler.num_steps, "
                f"not {self.last_calls}"
            )
        if sampler.chunks.causal:
            raise ValueError(
                "sampler.chunks.chunk_frames must be 0 for reward_gradient: dance_grpo takes causal students"
            )

    def check_experts(self, sampler: SamplerConfig, layouts: Mapping[str, ExpertLayout]) -> None:
        for name, split in layouts.items():
            check_guidance("sampler.guidance_scale", sampler.guidance_scale, name, split)
        ends = [[level] for level in sampler.sigmas()[:-1].tolist()[-self.last_calls :]]
        layouts["student"].refuse_idle(ends, "algorithm.last_calls", "Train the other expert, or change the sampler")

    def plan(self) -> BatchPlan:
        return BatchPlan.one_update(self.batch_size, self.micro_batch)


class RewardGradient:
    """loss = -mean reward(decode(x0)), x0 as one of the last calls predicts it, those before it without gradient."""

    trained_for_sampler: ClassVar[bool] = True

    def __init__(
        self, config: RewardGradientConfig, sampler: SamplerConfig, *, student: Trainable, reward: Reward
    ) -> None:
        self.config, self.sampler, self.student, self.reward = config, sampler, student, reward

    def micro_batches(self, batch: Batch) -> list[Batch]:
        return batch.split(self.config.micro_batch)

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        def draw(name: str | int) -> Latents:
            return rng.noise(f"transition {name}", batch.sample_ids, batch.latent_shape).to(self.student.device)

        call = self.sampler.num_steps - 1 - int(rng.shared.integers(self.config.last_calls))
        x0 = predict_at(self.student, draw("initial"), batch, self.sampler, draw, call)
        reward = self.reward.score_with_gradient(x0, batch.prompts)
        yield Loss("student", -reward.mean(), metrics={"reward": reward.detach()})
