"""The student as a stochastic policy: settings of the policy and of its update, and samples drawn from it."""

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Fraction, NonNegative, Positive, PositiveFraction, above, at_least
from unified_trainer.basics.types import Batch, Latents, Rollout
from unified_trainer.methods.base import MethodSetup
from unified_trainer.methods.rl.corrections import Correction, CorrectionName, correction_named
from unified_trainer.methods.rl.reference_kl import KLSettings
from unified_trainer.methods.rl.replay import transition_noise
from unified_trainer.methods.rl.sde_windows import WindowConfig
from unified_trainer.methods.rl.trained_steps import TrainedStepsConfig
from unified_trainer.numerics.importance_weight import WeightDensity
from unified_trainer.numerics.kernels import CappedPolicy, Kernel, Policy
from unified_trainer.numerics.kl import KLKind
from unified_trainer.numerics.objectives import Clip, Objective
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.role import Precision, Role
from unified_trainer.sampling.equal_rows import EqualRows
from unified_trainer.sampling.solver import SamplerConfig, rollout

# Parameters of corrections, and the corrections that read them.
PARAMETERS = {
    "weight_density": ("decoupled", "loglinear", "truncated", "vtrace"),
    "weight_max": ("decoupled", "loglinear", "truncated"),
    "trust_region": ("dppo",),
}


@dataclass(frozen=True)
class PolicyConfig(TrainedStepsConfig):
    """Settings of the methods that train the transitions of a stochastic policy."""

    has_values: ClassVar[bool] = False  # whether a value function predicts rewards

    kernel: Kernel | Literal["auto"] = "auto"
    """Transition kernel of the policy; auto takes dance, or for an sde sampler its own renoising."""
    eta: Annotated[float, above(0, 100)] = 0.3
    """Noise level of the policy; flow_wan has none, and renoising is cps at level 1."""
    std_cap: NonNegative = 0.0
    """Largest standard deviation of a transition, for kernel dance or flow; 0 is none (experimental)."""
    normalised: bool = True
    """Use the policy's normalised density; without, -(x_next - mean)^2 as published for cps (experimental)."""
    window: WindowConfig = field(default_factory=WindowConfig)
    timestep_fraction: PositiveFraction = 0.6
    """Fraction of the stochastic transitions trained, drawn anew in each training step from those that may be trained.
    It has no effect with algorithm.window.size: a window is trained whole."""
    objective: Objective = field(default_factory=Clip)
    clip_low: PositiveFraction = 1e-4
    """The ratio is clipped at 1 - clip_low; it stays near 1 because log-densities are means over elements."""
    clip_high: Positive = 1e-4
    """The ratio is clipped at 1 + clip_high."""
    clip_velocity: NonNegative = 0.0
    """Change of the velocity, rms per element, at which the ratio reaches the clip range: calibrates the range of each
    transition from its noise and the latent size. 0 takes clip_low and clip_high (experimental)."""
    correction: CorrectionName = "none"
    """For samples that older weights made (experimental): clip the ratio around the policy of the start of the training
    step (decoupled, one more network call per trained transition), around one interpolated by lag (loglinear) or not at
    all (truncated), and weight samples by importance; or correct the value targets and advantages of dance_ppo
    (vtrace). For all samples: stop the gradient of transitions that have left algorithm.trust_region (dppo)."""
    weight_density: WeightDensity = "mean"
    """Densities that importance weights compare: their mean over elements, which keeps the weight near 1, or joint over
    all elements, which is unbiased and useful only while lag and latents are small."""
    weight_max: Annotated[float, at_least(1)] = 2.0
    """Largest importance weight; larger ones are truncated."""
    trust_region: Positive = 1e-4
    """For dppo: KL per element to the policy of the rollout from which a transition has no gradient if its ratio has
    moved in the direction of its advantage."""
    ess_floor: Fraction = 0.0
    """Smallest ess, the share of samples that a step's gradient comes from, while samples lag. Below it the run warns
    and makes samples one step less ahead; 0 is no limit."""
    guard: bool = False
    """Centre the log-ratio on 0 with one spread at all steps, as GRPO-Guard does (experimental)."""
    step_weight: Literal["none", "inverse_dt", "equal"] = "none"
    """Weight of transitions: none, 1 / (sigma - sigma'), or equal gradient per velocity (experimental)."""
    kl_estimate: KLKind = "exact"
    """KL to the reference per element: exact for each transition, or estimated from the drawn state: kl (k1), abs, mse
    (k2) or low_var_kl (k3). In the loss the gradient of kl has expectation zero."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the KL per element to the loss of each trained transition, or subtract it from a sample's reward."""
    kl_coefficient: NonNegative = 0.0
    """Coefficient of the KL to the reference, the student as the run started; 0 needs no reference."""
    kl_target: NonNegative = 0.0
    """KL to which the coefficient is adapted, from the one given; 0 keeps it fixed."""
    kl_horizon: Positive = 1e4
    """Samples over which an adapted coefficient may change by its own size."""

    def policy(self, sampler: SamplerConfig) -> Policy:
        """Return the policy of these settings and the sampler."""
        kernel, level = self.kernel, self.eta
        if kernel == "auto":
            kernel, level = sampler.kernel if sampler.solver == "sde" else ("dance", self.eta)
        if self.std_cap:
            return CappedPolicy(kernel, level, sampler.sigmas(), self.normalised, self.std_cap)
        return Policy(kernel, level, sampler.sigmas(), self.normalised)

    def window_at(self, step: int, sampler: SamplerConfig, shared: np.random.Generator) -> range:
        """Return the stochastic transitions of a training step, equal on all ranks: all, or a window of the range."""
        places = self._places(sampler)
        window = self.window.at(step, len(places), shared)
        return places[window.start : window.stop]

    def windows(self, sampler: SamplerConfig) -> list[range]:
        """Return all that `window_at` can return."""
        places = self._places(sampler)
        return [places[window.start : window.stop] for window in self.window.all(len(places))]

    def kept(self, sampler: SamplerConfig, window: range) -> range:
        """Return the transitions of a window that a rollout keeps: from the first that may be trained to the last.

        All of them where a KL of the whole rollout reads them.
        """
        if self.kl_in == "reward":
            return window
        read = [s for s in self.candidates(sampler, sampler.num_steps - 1) if s in window]
        return range(read[0], read[-1] + 1)

    def kept_states(self, sampler: SamplerConfig) -> int:
        kept = (self.kept(sampler, window) for window in self.windows(sampler))
        return 2 + max(map(len, kept))  # both ends of the transitions, and x0

    def _places(self, sampler: SamplerConfig) -> range:
        """The transitions that windows lie in; without a window size all of them, wherever they are trained."""
        if not self.window.size:
            return range(sampler.num_steps - 1)
        chosen = self.candidates(sampler, sampler.num_steps - 1)
        return range(chosen[0], chosen[-1] + 1)

    def kl_settings(self, batch: int) -> KLSettings:
        """Return the settings of the KL to the reference; `batch` samples are computed at a time."""
        return KLSettings(self.kl_estimate, self.kl_in, self.kl_coefficient, self.kl_target, self.kl_horizon, batch)

    def correction_value(self) -> Correction:
        """Return the correction of these settings."""
        return correction_named(
            self.correction, density=self.weight_density, largest=self.weight_max, trust_region=self.trust_region
        )

    def check_above(self, floor: float, precision: Precision = "bf16") -> None:
        """Raise UserError for a KL to keep that is not above `floor`, the KL that rounding makes."""
        kept = {"trust_region": self.trust_region * (self.correction == "dppo"), "kl_target": self.kl_target}
        for name, kl in kept.items():
            if 0 < kl <= floor:
                raise UserError(
                    f"algorithm.{name} {kl:g} is below the rounding of student.precision {precision}: a replay with "
                    f"unchanged weights has a KL of {floor:.2g}; set it above that"
                )

    def check(self, setup: MethodSetup) -> None:
        super().check(setup)
        sampler = setup.sampler
        if sampler.num_steps < 2:
            raise UserError("sampler.num_steps must be at least 2: the last transition is not trained")
        self.check_steps(setup, sampler.num_steps - 1)
        self._check_policy(sampler)
        self._check_objective()
        setup.check_guidance("student", "sampler.guidance_scale", sampler.guidance_scale)
        if self.window.outside_steps:
            flow_map = setup.roles["student"].is_flow_map
            self.window.check_outside(sampler.num_steps, self.windows(sampler), flow_map=flow_map)
        sigmas = sampler.sigmas().tolist()
        windows = [[sigmas[s] for s in window] for window in self.windows(sampler)]
        setup.require_trained("student", windows, "algorithm.window")

    def _check_policy(self, sampler: SamplerConfig) -> None:
        if self.kernel == "ode":
            raise UserError("algorithm.kernel must be stochastic, not ode: else there is no policy")
        if self.kernel == "cps" and self.eta > 1:
            raise UserError(f"algorithm.eta must be at most 1 for cps, not {self.eta}: 1 draws all noise anew")
        policy = self.policy(sampler)
        if self.std_cap and policy.kernel not in ("dance", "flow"):
            raise UserError(f"algorithm.std_cap needs algorithm.kernel dance or flow, not {policy.kernel}")
        for s in range(sampler.num_steps - 1):
            if not policy.std(s) > 0:
                raise UserError(
                    f"algorithm.kernel {policy.kernel} at level {policy.level:g} has no density at transition {s}, "
                    f"from noise level {policy.sigmas[s]:.4g} to {policy.sigmas[s + 1]:.4g}"
                )
        if not self.normalised and policy.kernel != "cps":
            raise UserError("--algorithm.no-normalised needs algorithm.kernel cps")
        if self.window.size and self.trained_steps:
            raise UserError(
                "algorithm.trained_steps must be empty with algorithm.window.size: a window is trained whole; give "
                "algorithm.noise_range"
            )
        self.window.check(len(self._places(sampler)))
        if self.window.size and sampler.solver == "sde":
            raise UserError("algorithm.window.size must be 0 for sampler.solver sde, which has no deterministic steps")
        if sampler.chunks.causal and sampler.chunks.context_noise:
            raise UserError("sampler.chunks.context_noise must be 0: the replay attends to clean chunks")

    def _check_objective(self) -> None:
        if not self.kl_coefficient and (self.kl_target or self.kl_in == "reward" or self.kl_estimate != "exact"):
            raise UserError(
                "algorithm.kl_target, algorithm.kl_in reward and algorithm.kl_estimate need algorithm.kl_coefficient "
                "above 0"
            )
        self._check_correction()
        self._check_gain()
        if not self.normalised and (self.guard or self.step_weight == "equal" or self.clip_velocity):
            raise UserError(
                "algorithm.guard, algorithm.step_weight equal and algorithm.clip_velocity need the normalised density: "
                "set --algorithm.normalised"
            )

    def _check_correction(self) -> None:
        correction, off_by_default = self.correction_value(), PolicyConfig()
        for name, readers in PARAMETERS.items():
            if getattr(self, name) != getattr(off_by_default, name) and self.correction not in readers:
                raise UserError(f"algorithm.{name} needs algorithm.correction {' or '.join(readers)}, which reads it")
        if correction.compares_densities and self.guard:
            raise UserError(
                f"algorithm.correction {self.correction} cannot be combined with algorithm.guard, which compares "
                "means, not densities: set --algorithm.no-guard or --algorithm.correction none"
            )
        if correction.of_values and not self.has_values:
            raise UserError(
                f"algorithm.correction {self.correction} corrects the targets of a value function, which dance_ppo "
                "alone has: take decoupled, loglinear or truncated"
            )
        if self.weight_density == "joint" and not self.normalised:
            raise UserError("algorithm.weight_density joint needs the normalised density: set --algorithm.normalised")

    def _check_gain(self) -> None:
        """Raise UserError for an objective that does not give one number per element, before any weight is read."""
        objective = self.objective
        if objective.of_sample and self.clip_velocity:
            raise UserError(
                f"algorithm.clip_velocity must be 0 for algorithm.objective.kind {objective.kind}, whose ratio is that "
                "of all transitions of a sample"
            )
        log_ratio = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        gain = objective(log_ratio, torch.tensor([1.0, -1.0], dtype=torch.float64), self.clip_low, self.clip_high)
        if not (isinstance(gain, torch.Tensor) and gain.shape == log_ratio.shape and gain.requires_grad):
            raise UserError(
                f"algorithm.objective.kind {objective.kind} must return one gain per element, a function of log_ratio"
            )


def sample_policy(
    config: PolicyConfig,
    sampler: SamplerConfig,
    role: Role,
    batch: Batch,
    step: int,
    rng: Streams,
    *,
    same_noise: bool,
) -> Rollout:
    """Draw a batch from the policy in training step `step`; with `same_noise` each prompt has one initial noise.

    Its samples are then equal until the window begins, and the calls before its first noise are made once.
    """
    window = config.window_at(step, sampler, rng.shared)
    kept = config.kept(sampler, window)
    noise, equal = initial_noise(rng, batch, same=same_noise)
    draw = partial(transition_noise, rng, batch)
    policy = config.policy(sampler)
    outside = config.window.outside(policy.sigmas, window)
    x_t = noise.to(role.device)
    return rollout(role, x_t, batch, sampler, policy, window, draw, equal=equal, kept=kept, outside=outside)


def initial_noise(rng: Streams, batch: Batch, *, same: bool) -> tuple[Latents, EqualRows | None]:
    """Draw the initial noise of each sample, or with `same` of each prompt.

    Also return which samples then have one noise and one prompt; None without `same`. That depends on the setting alone
    and never on the ids of a rank: sharing calls is a collective, which all ranks enter or none.
    """
    if not same:
        return rng.noise("initial", batch.sample_ids, batch.latent_shape), None
    equal = EqualRows.of(batch.prompt_ids)
    prompts = [batch.prompt_ids[row] for row in equal.first]
    return equal.spread(rng.noise("initial", prompts, batch.latent_shape)), equal
