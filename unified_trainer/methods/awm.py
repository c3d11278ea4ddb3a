"""Advantage Weighted Matching: flow matching on one's own samples, weighted by their advantages (arXiv:2509.25050)."""

from dataclasses import dataclass

from unified_trainer.basics.ranges import Decay, NonNegative, Positive, PositiveFraction
from unified_trainer.basics.types import Latents, PerSample
from unified_trainer.methods.base import initial_copy, trained, updated_copy
from unified_trainer.methods.rl.old_policy import NoisedSamples, OldPolicyConfig, OldPolicyMethod
from unified_trainer.numerics.flow import Sigma, promote, sample_mean
from unified_trainer.numerics.kl import velocity_kl
from unified_trainer.numerics.objectives import Clip

LEAST_ERROR = 1e-10  # keeps the slope of a power finite where an error is 0


@dataclass(frozen=True)
class AWMConfig(OldPolicyConfig):
    """The defaults are those of the published configurations for GenEval and OCR, without their KL to the reference."""

    power: PositiveFraction = 0.25
    """Power p of the error e in a sample's log-likelihood, -sigma e^p / p; 1 is flow matching weighted by sigma."""
    clip_range: Positive = 1.0
    """The ratio of likelihoods to the old policy's is clipped at 1 - clip_range and 1 + clip_range."""
    old_kl: NonNegative = 1.0
    """Coefficient of mean (v - v_old)^2 to the old policy."""
    old_decay: Decay = 0.3
    """Largest decay of the old policy, which samples: an average of the student, updated once a training step."""


class AWM(OldPolicyMethod):
    """Raise the likelihood of the better samples of each group and lower that of the worse."""

    config_class = AWMConfig
    roles = {
        "student": trained(),
        "old": updated_copy("student"),
        "reference": initial_copy("student", when=lambda config: config.kl_coefficient > 0),
    }
    sampled_by = "old"

    def objective(
        self, samples: NoisedSamples, velocity: Latents, velocity_old: Latents
    ) -> tuple[PerSample, dict[str, PerSample]]:
        """Return -min(r A, clip(r) A) + old_kl mean (v - v_old)^2 with A = advantage / advantage_clip in [-1, 1]."""
        config, target, sigma = self.config, samples.noise - samples.x0, samples.sigma
        new, old = (log_likelihood(v, target, sigma, config.power) for v in (velocity, velocity_old))
        log_ratio = new - old
        gain = Clip()(log_ratio, samples.advantages / config.advantage_clip, config.clip_range, config.clip_range)
        loss = config.old_kl * velocity_kl(velocity, velocity_old) - gain
        outside = (log_ratio.detach().exp() - 1).abs() >= config.clip_range
        return loss, {"clip_fraction": outside.float()}


def log_likelihood(velocity: Latents, target: Latents, sigma: Sigma, power: float) -> PerSample:
    """Return -sigma ((e + 1e-10)^p - 1e-10^p) / p of each sample, e = mean (v - target)^2 over its elements.

    It takes the place of a log-density: the flow matching error bounds it (arXiv:2509.25050). The power, called
    generalised Huber in the published code, gives samples of large error less weight. The result is in the
    widest dtype of its device.
    """
    error = sample_mean((promote(velocity) - promote(target)).square())
    return -float(sigma) / power * ((error + LEAST_ERROR) ** power - LEAST_ERROR**power)
