"""DiffusionNFT: reinforcement learning on the forward process, from better and worse samples (arXiv:2509.16117)."""

from dataclasses import dataclass

from unified_trainer.basics.ranges import Positive
from unified_trainer.basics.types import Latents, PerSample
from unified_trainer.methods.base import initial_copy, trained, updated_copy
from unified_trainer.methods.rl.old_policy import NoisedSamples, OldPolicyConfig, OldPolicyMethod
from unified_trainer.numerics.flow import Sigma, x0_from_velocity
from unified_trainer.numerics.objectives import relative_error


@dataclass(frozen=True)
class DiffusionNFTConfig(OldPolicyConfig):
    beta: Positive = 1.0
    """Distance of the two implicit policies from the old policy, in units of the student's own distance."""


class DiffusionNFT(OldPolicyMethod):
    """Move the velocity towards the better samples of each group and away from the worse."""

    config_class = DiffusionNFTConfig
    roles = {
        "student": trained(),
        "old": updated_copy("student"),
        "reference": initial_copy("student", when=lambda config: config.kl_coefficient > 0),
    }
    sampled_by = "old"

    def objective(
        self, samples: NoisedSamples, velocity: Latents, velocity_old: Latents
    ) -> tuple[PerSample, dict[str, PerSample]]:
        """Return advantage_clip times the contrast, with the optimality A / (2 advantage_clip) + 1/2."""
        clip = self.config.advantage_clip
        x0, x_t, sigma = samples.x0, samples.x_t, samples.sigma
        optimality = (samples.advantages / (2 * clip) + 0.5).clamp(0, 1)
        return clip * contrast(x0, x_t, sigma, velocity, velocity_old, optimality, self.config.beta), {}


def contrast(
    x0: Latents,
    x_t: Latents,
    sigma: Sigma,
    velocity: Latents,
    velocity_old: Latents,
    optimality: PerSample,
    beta: float,
) -> PerSample:
    """Return (r |x0+ - x0|^2 / w+ + (1 - r) |x0- - x0|^2 / w-) / beta, means over elements (arXiv:2509.16117).

    v+ = beta v + (1 - beta) v_old, v- = (1 + beta) v_old - beta v, x0+- = x_t - sigma v+-, and w+- = mean |x0+- - x0|
    of the sample without gradient (`relative_error`); r is the optimality in [0, 1].
    """
    positive = x0_from_velocity(x_t, beta * velocity + (1 - beta) * velocity_old, sigma)
    negative = x0_from_velocity(x_t, (1 + beta) * velocity_old - beta * velocity, sigma)
    return (optimality * relative_error(positive, x0) + (1 - optimality) * relative_error(negative, x0)) / beta
