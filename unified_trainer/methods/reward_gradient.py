"""Reward gradient: ascent on the reward through the decoder and one sampling step.

ReFL, arXiv:2304.05977; DRaFT-1, arXiv:2309.17400.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import MAY_CHANGE, Count, NetworkCalls
from unified_trainer.basics.types import Batch, Latents
from unified_trainer.methods.base import Loss, Method, MethodSetup, SingleUpdateConfig, trained
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.rewards.reward import Reward
from unified_trainer.roles.role import Trainable
from unified_trainer.sampling.solver import predict_at, trainable_steps


@dataclass(frozen=True)
class RewardGradientConfig(SingleUpdateConfig):
    batch_size: Count = 16
    """Samples per optimizer update, over all ranks, each of another prompt."""
    micro_batch: Annotated[Count, MAY_CHANGE] = 16
    """Samples per backward pass, at most; each is decoded and scored with its graph."""
    last_calls: NetworkCalls = 1
    """The sample is the x0 that one of this many last network calls predicts, drawn equal on all ranks among those of
    trained experts."""
    runs_untrained = ("before",)

    def check(self, setup: MethodSetup) -> None:
        sampler = setup.sampler
        if self.last_calls > sampler.num_steps:
            raise UserError(
                f"algorithm.last_calls must be at most sampler.num_steps ({sampler.num_steps}), not {self.last_calls}"
            )
        if sampler.chunks.causal:
            raise UserError(
                "sampler.chunks.chunk_frames must be 0 for reward_gradient; dance_grpo trains causal students by reward"
            )
        setup.check_guidance("student", "sampler.guidance_scale", sampler.guidance_scale)
        setup.require_trained("student", [sampler.sigmas()[:-1].tolist()[-self.last_calls :]], "algorithm.last_calls")


class RewardGradient(Method):
    """loss = -mean reward(decode(x0)), x0 as one of the last calls predicts it; earlier calls have no gradient."""

    config_class = RewardGradientConfig
    roles = {"student": trained()}
    uses_reward = True
    trained_for_sampler = True
    student: Trainable
    reward: Reward

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        def draw(name: str | int) -> Latents:
            return rng.noise(f"transition {name}", batch.sample_ids, batch.latent_shape).to(self.student.device)

        first = self.sampler.num_steps - self.config.last_calls
        calls = [s for s in trainable_steps(self.student, self.sampler) if s >= first]
        call = calls[int(rng.shared.integers(len(calls)))]
        x0 = predict_at(self.student, draw("initial"), batch, self.sampler, draw, call)
        reward = self.reward.score_with_gradient(x0, batch.prompts, f"training step {step + 1}")
        yield Loss("student", -reward.mean(), metrics={"reward": reward.detach()})
