"""Which of the sampler's steps are trained: those of a range of noise levels, or those of a list."""

from dataclasses import dataclass

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import CountOrZero, Fraction
from unified_trainer.methods.base import MethodSetup
from unified_trainer.methods.rl.rollout_config import RolloutConfig
from unified_trainer.sampling.solver import SamplerConfig


@dataclass(frozen=True)
class TrainedStepsConfig(RolloutConfig):
    """Settings of the methods that train at steps of the sampler; a fraction of these steps may be drawn from them."""

    noise_range: tuple[Fraction, Fraction] = (0.0, 1.0)
    """Lowest and highest noise level of the steps that may be trained; windows lie in it (experimental)."""
    trained_steps: tuple[CountOrZero, ...] = ()
    """Steps that may be trained, by number: 0 is the noisiest. Empty: all of algorithm.noise_range (experimental)."""

    def candidates(self, sampler: SamplerConfig, count: int) -> list[int]:
        """Return which of the sampler's first `count` steps may be trained, in order."""
        low, high = self.noise_range
        steps = [s for s, sigma in enumerate(sampler.sigmas()[:count].tolist()) if low <= sigma <= high]
        return [s for s in steps if s in self.trained_steps] if self.trained_steps else steps

    def check_steps(self, setup: MethodSetup, count: int) -> None:
        """Raise UserError unless some of the sampler's first `count` steps may be trained, by a trained expert."""
        low, high = self.noise_range
        levels = setup.sampler.sigmas()[:count].tolist()
        if low >= high:
            raise UserError(f"algorithm.noise_range must rise, not {self.noise_range}")
        if unknown := [s for s in self.trained_steps if s >= count]:
            raise UserError(
                f"algorithm.trained_steps must lie in 0 to {count - 1} with this sampler.num_steps, not {unknown[0]}"
            )
        chosen = self.candidates(setup.sampler, count)
        if not chosen:
            shown = ", ".join(f"{level:.4g}" for level in levels)
            raise UserError(
                f"no step is trained with algorithm.noise_range {self.noise_range} and algorithm.trained_steps "
                f"{self.trained_steps}: the noise levels of steps 0 to {count - 1} are {shown}"
            )
        setup.require_trained("student", [[levels[s] for s in chosen]], "algorithm.noise_range")
