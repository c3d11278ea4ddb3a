"""Settings of the experience buffer: the groups of earlier training steps that an update trains on again."""

from dataclasses import dataclass, field

from unified_trainer.errors import UserError
from unified_trainer.methods.base import MethodSetup
from unified_trainer.ranges import Count, CountOrZero, NonNegative, Positive
from unified_trainer.rl.chunk_credit import CreditedGroupConfig
from unified_trainer.rl.policy import PolicyConfig
from unified_trainer.sampling import SamplerConfig


@dataclass(frozen=True)
class ExperienceConfig:
    """The number of stored groups, how long they are kept, and how many of them an update trains on."""

    groups: CountOrZero = 0
    """Stored groups in each update besides its fresh ones; it divides algorithm.prompts_per_update. 0: each group is
    trained on in one training step, and nothing is stored (experimental)."""
    depth: Count = 4
    """Groups stored at most for each prompt of a training step, in CPU memory and in checkpoints: depth x num_prompts
    in all."""
    max_age: Count = 8
    """Training steps after which a stored group is not drawn any more."""
    half_life: Positive = 4.0
    """Training steps in which the priority of a stored group halves."""
    exponent: NonNegative = 1.0
    """Priority of a new group: the standard deviation of its rewards to this power. 0: age alone decides."""

    def check(self, policy: PolicyConfig, groups: CreditedGroupConfig, sampler: SamplerConfig) -> None:
        """Raise UserError, naming the key, for settings that cannot work with those of the policy and the groups."""
        if not self.groups:
            return
        if groups.prompts_per_update % self.groups:
            raise UserError(
                f"algorithm.experience.groups ({self.groups}) must divide algorithm.prompts_per_update "
                f"({groups.prompts_per_update}): each stored group is drawn among those of an equal part of the prompts"
            )
        if groups.credit.per_chunk:
            raise UserError(
                "algorithm.experience.groups must be 0 with algorithm.credit.per_chunk: stored groups have "
                "advantages of whole samples"
            )
        if len(policy.window.all(sampler.num_steps - 1)) > 1:
            raise UserError(
                "algorithm.experience.groups must be 0 with a window that moves: stored groups have the transitions of "
                "their own window. Set algorithm.window.size 0"
            )


@dataclass(frozen=True)
class StoredGroupConfig(PolicyConfig, CreditedGroupConfig):
    """Settings of a policy and of its groups, which may be stored and trained on again."""

    experience: ExperienceConfig = field(default_factory=ExperienceConfig)

    def check(self, setup: MethodSetup) -> None:
        super().check(setup)
        self.experience.check(self, self, setup.sampler)
