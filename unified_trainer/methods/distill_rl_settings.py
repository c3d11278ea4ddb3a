"""Settings of distillation and reward in one run: the weight of each term, and when it counts."""

import math
from dataclasses import dataclass, field
from typing import Annotated

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import NonNegative, PeriodOrZero, Positive, Range, at_least
from unified_trainer.methods.base import MethodSetup
from unified_trainer.methods.distribution_matching import ScoreConfig
from unified_trainer.methods.rl.groups import GroupConfig
from unified_trainer.methods.rl.policy import PolicyConfig
from unified_trainer.numerics.flow import GuidanceScale
from unified_trainer.sampling.solver import SamplerConfig


@dataclass(frozen=True)
class TermConfig:
    """A term of the student's loss, with its weight by training step."""

    weight: NonNegative = 1.0
    """Weight of the term in the student's loss; 0 leaves it out."""
    first_step: PeriodOrZero = 0
    """Training steps at the start without the term."""
    ramp_steps: PeriodOrZero = 0
    """Training steps, from the term's first one on, over which its weight rises linearly."""
    end_step: PeriodOrZero = 0
    """Training steps of the run after which the term is left out; 0 keeps it to the end."""

    def weight_at(self, step: int) -> float:
        """Return the weight in a training step."""
        if step < self.first_step or (self.end_step and step >= self.end_step):
            return 0.0
        return self.weight * min(1.0, (step - self.first_step + 1) / (self.ramp_steps + 1))

    def check_calendar(self, key: str, steps: int) -> None:
        """Raise UserError for a term with a weight that counts in no training step of a run; `key` names the term."""
        if self.weight:
            check_calendar(key, self.first_step, self.end_step, steps)


def check_calendar(key: str, first_step: int, end_step: int, steps: int) -> None:
    """Raise UserError if what acts from `first_step` on, and before an `end_step` above 0, never acts in a run."""
    if end_step and end_step <= first_step:
        raise UserError(
            f"{key}.end_step {end_step} must be above {key}.first_step {first_step}, or 0 for no end: else it never "
            "acts"
        )
    if 0 < steps <= first_step:
        raise UserError(
            f"{key}.first_step {first_step} must be below the run's steps ({steps}): else it never acts. Lower it, or "
            "raise --steps"
        )


@dataclass(frozen=True)
class GradientTermConfig(TermConfig):
    """The gradient of the reward through the decoder and the sampler's last call."""

    weight: NonNegative = 0.0
    """Weight of the term in the student's loss; 0 leaves it out."""
    margin: Annotated[float, Range(also=(math.inf,))] = math.inf
    """The term is the mean of max(0, margin - reward), which ends where the reward reaches the margin; with inf it is
    minus the mean reward (experimental)."""


@dataclass(frozen=True)
class TiltConfig:
    """The tilt of the critic's samples, which moves the student's law to the teacher's times exp(reward / beta)."""

    beta: NonNegative = 0.0
    """The critic's errors are weighted by exp(-(reward - mean of the group's other samples) / beta): the smaller, the
    stronger the reward. 0 is no tilt (experimental)."""
    max_weight: Annotated[float, at_least(1)] = 10.0
    """Largest such weight, before the weights are divided by their mean. Cutting weights moves the law that the tilt
    reaches; the metric tilt_capped is the share that is cut."""
    first_step: PeriodOrZero = 0
    """Training steps at the start without the tilt."""
    end_step: PeriodOrZero = 0
    """Training steps of the run after which the tilt is left out; 0 keeps it to the end."""

    def beta_at(self, step: int) -> float:
        """Return beta in a training step; 0 is no tilt."""
        acts = step >= self.first_step and not (self.end_step and step >= self.end_step)
        return self.beta if acts else 0.0


@dataclass(frozen=True)
class MatchingTermConfig(ScoreConfig, TermConfig):
    """Distribution matching on the rollout's samples."""

    weight: NonNegative = 0.01
    """Weight of the term in the student's loss; more of it holds the student closer to its teacher, 0 leaves it out."""


@dataclass(frozen=True)
class GANTermConfig(TermConfig):
    """The discriminator of `dmd2` on the features of the critic, which tells samples from clips."""

    weight: NonNegative = 0.0
    """Weight of the discriminator in the student's loss; needs clips. 0 leaves it out (experimental)."""
    critic_weight: Positive = 1e-2
    """Weight of the discriminator's own loss in the critic's (experimental)."""


@dataclass(frozen=True)
class DistillRLConfig(PolicyConfig, GroupConfig):
    """Settings of the groups, of the policy and of each term."""

    matching: MatchingTermConfig = field(default_factory=MatchingTermConfig)
    surrogate: TermConfig = field(default_factory=TermConfig)
    reward_gradient: GradientTermConfig = field(default_factory=GradientTermConfig)
    gan: GANTermConfig = field(default_factory=GANTermConfig)
    tilt: TiltConfig = field(default_factory=TiltConfig)
    critic_updates: Annotated[int, at_least(1, 1000)] = 1
    """Updates of the critic before each update of the student, on the same samples with other noise."""

    @property
    def terms(self) -> dict[str, TermConfig]:
        """The terms of the student's loss by name."""
        return {
            "matching": self.matching,
            "surrogate": self.surrogate,
            "reward_gradient": self.reward_gradient,
            "gan": self.gan,
        }

    @property
    def needs_clips(self) -> bool:
        return self.gan.weight > 0

    @property
    def trains_critic(self) -> bool:
        """Whether a term follows the critic or its discriminator."""
        return self.matching.weight > 0 or self.gan.weight > 0

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the terms once they have begun and risen."""
        return {name: term.weight for name, term in self.terms.items()}

    def weights_at(self, step: int) -> dict[str, float]:
        """Return the weights of the terms in a training step."""
        return {name: term.weight_at(step) for name, term in self.terms.items()}

    @property
    def teacher_guidance(self) -> GuidanceScale | None:
        return self.matching.guidance_scale if self.matching.weight else None

    def check(self, setup: MethodSetup) -> None:
        super().check(setup)
        if setup.sampler.solver != "sde" or self.kernel != "auto":
            raise UserError(
                "sampler.solver must be sde and algorithm.kernel auto for distill_rl: the policy is the student's own "
                "renoising"
            )
        self.matching.check_scores(setup, "algorithm.matching")
        if not any(self.weights.values()):
            raise UserError(
                "algorithm.matching.weight, algorithm.surrogate.weight or algorithm.reward_gradient.weight must be "
                "above 0: without a term there is nothing to train"
            )
        if self.tilt.beta and not self.matching.weight:
            raise UserError(
                "algorithm.tilt.beta needs algorithm.matching.weight above 0: it tilts what matching follows"
            )
        self._check_calendars(setup.steps)
        if any(weight for name, weight in self.weights.items() if name != "surrogate"):
            setup.require_trained("student", [setup.sampler.sigmas()[-2:-1].tolist()], "the last step of the sampler")

    def updates(self, role: str, steps: int, sampler: SamplerConfig) -> int:
        return super().updates(role, steps, sampler) * (self.critic_updates if role == "critic" else 1)

    def _check_calendars(self, steps: int) -> None:
        for name, term in self.terms.items():
            term.check_calendar(f"algorithm.{name}", steps)
        if self.tilt.beta:
            check_calendar("algorithm.tilt", self.tilt.first_step, self.tilt.end_step, steps)
