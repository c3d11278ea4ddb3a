"""The critic: learns the score of the student's samples, and may learn to tell them from real clips."""

from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.types import Condition, Latents, PerSample
from unified_trainer.roles.headed import Headed


class Critic(Headed):
    """A trainable velocity field with a discriminator as its head."""

    head = "discriminator"

    def velocity_and_logits(
        self, x_t: Latents, sigma: PerSample, cond: Condition
    ) -> tuple[Latents, Float[Tensor, " b"]]:
        """Return the velocity and, from the same pass, the logit that each noisy sample is real."""
        return self.velocity_and_head(x_t, sigma, cond)
