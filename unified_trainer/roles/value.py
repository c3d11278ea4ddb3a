"""The value function of a policy: predicts the reward of the sample that a state of sampling will end in."""

from unified_trainer.basics.types import Condition, Latents, PerSample
from unified_trainer.roles.headed import Headed


class Value(Headed):
    """A network that is trained through its head alone, from the student's weights or with an adapter on them.

    The blocks behind the features do not run and stay as they were read.
    """

    head = "value"

    def value(self, x_t: Latents, sigma: PerSample, cond: Condition) -> PerSample:
        """Return the predicted reward at (x_t, sigma, prompt), one number per sample; 0 before the first update."""
        return self.head_alone(x_t, sigma, cond)
