"""Parts of the methods that train the velocity on noised samples: the forward process, without densities of steps."""

from dataclasses import dataclass

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import PositiveFraction
from unified_trainer.basics.types import Batch, Latents, Rollout
from unified_trainer.methods.base import MethodSetup
from unified_trainer.methods.rl.policy import initial_noise
from unified_trainer.methods.rl.replay import transition_noise
from unified_trainer.methods.rl.trained_steps import TrainedStepsConfig
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.role import Role, Trainable
from unified_trainer.sampling.solver import SamplerConfig, generate


@dataclass(frozen=True)
class ForwardConfig(TrainedStepsConfig):
    """Settings of the noise levels at which samples are trained on: levels of the sampler."""

    timestep_fraction: PositiveFraction = 1.0
    """Fraction of the sampler's noise levels trained at, drawn anew in each training step."""

    def check(self, setup: MethodSetup) -> None:
        super().check(setup)
        sampler = setup.sampler
        if sampler.chunks.causal and sampler.chunks.context_noise:
            raise UserError("sampler.chunks.context_noise must be 0: noised chunks attend to clean chunks")
        if self.init_same_noise and (sampler.solver == "ode" or sampler.num_steps == 1):
            raise UserError(
                "algorithm.init_same_noise must be false with sampler.solver ode or one network call: no other noise "
                "tells the samples of a prompt apart, so that all of a group would be equal, and nothing would be left "
                "to compare. Set --algorithm.no-init-same-noise, or sampler.solver sde"
            )
        self.check_steps(setup, sampler.num_steps)

    def levels(self, student: Trainable, sampler: SamplerConfig, rng: Streams) -> list[int]:
        """Draw the steps of the sampler at whose noise levels a training step trains, equal on all ranks."""
        sigmas = sampler.sigmas()
        calls = [s for s in self.candidates(sampler, sampler.num_steps) if student.trains(sigmas[s])]
        count = max(1, round(self.timestep_fraction * len(calls)))
        return sorted(calls[i] for i in rng.shared.permutation(len(calls))[:count])


def generate_samples(
    config: ForwardConfig, sampler: SamplerConfig, role: Role, batch: Batch, step: int, rng: Streams
) -> Rollout:
    """Generate a batch by the sampler's own solver; no step is kept."""

    def draw(s: int) -> Latents:
        return transition_noise(rng, batch, s).to(role.device)

    noise, equal = initial_noise(rng, batch, same=config.init_same_noise)
    return Rollout.from_x0(generate(role, noise.to(role.device), batch, sampler, draw, equal))
