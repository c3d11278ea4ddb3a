"""The settings of dance_grpo, and what cannot be among them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from unified_trainer.numerics.kernels import Kernel, Policy
from unified_trainer.numerics.kl import KL
from unified_trainer.numerics.objectives import Mode, ObjectiveParameters
from unified_trainer.rl.groups import GroupConfig
from unified_trainer.rl.sde_windows import WindowConfig
from unified_trainer.roles.experts import ExpertLayout, check_guidance
from unified_trainer.sampling import SamplerConfig


@dataclass(frozen=True)
class DanceGRPOConfig(GroupConfig):
    kernel: Kernel | Literal["auto"] = "auto"  # transition of the policy; auto: dance, or renoising for a sde sampler
    eta: float = 0.3  # level of the policy's noise; flow_wan has none, and renoising is cps at level 1
    normalised: bool = True  # the policy's density; without, -(x_next - mean)^2 alone, as published for cps
    window: WindowConfig = field(default_factory=WindowConfig)
    timestep_fraction: float = 0.6  # share of the stochastic transitions trained, drawn anew each training step
    objective: Mode = "clip"  # policy objective
    clip_low: float = 1e-4  # the ratio is clipped at 1 - clip_low; it stays near 1, being a mean over elements
    clip_high: float = 1e-4  # and at 1 + clip_high
    clip_velocity: float = 0.0  # change of the velocity, rms per element, that may leave the clip range: calibrates it
    # for each transition from its noise and the latent size. 0 takes clip_low and clip_high
    shape: ObjectiveParameters = field(default_factory=ObjectiveParameters)
    guard: bool = False  # centre the log-ratio on 0 and give it one spread at all steps, as GRPO-Guard does
    trust_region: float = 0.0  # KL per element from which a sample that moved its advantage's way is dropped; 0 is none
    step_weight: Literal["none", "inverse_dt", "equal"] = "none"  # of transitions: 1 / (sigma - sigma'), or equal pull
    kl: KL = "exact"  # KL to the reference: exact per transition, its estimates k1, k2, k3, or of the velocities
    kl_in: Literal["loss", "reward"] = "loss"  # where it counts: per trained transition, or off a sample's reward
    kl_coefficient: float = 0.0  # of that KL; 0 needs no reference, which is the student as the run started
    kl_target: float = 0.0  # KL that the coefficient is adapted to, from the one given; 0 keeps it as it is
    kl_horizon: float = 1e4  # samples over which an adapted coefficient may change by its own size

    @property
    def optional_roles(self) -> tuple[str, ...]:
        return ("reference",) if self.kl_coefficient else ()

    def policy(self, sampler: SamplerConfig) -> Policy:
        """The policy that the sampler and the settings make."""
        kernel, level = self.kernel, self.eta
        if kernel == "auto":
            kernel, level = sampler.kernel if sampler.solver == "sde" else ("dance", self.eta)
        return Policy(kernel, level, sampler.sigmas(), self.normalised, self.window.tail)

    def check(self, sampler: SamplerConfig) -> None:
        self.check_groups()
        if sampler.num_steps < 2:
            raise ValueError("sampler.num_steps must be at least 2: the last transition is not trained")
        if not 0 < self.timestep_fraction <= 1:
            raise ValueError(f"algorithm.timestep_fraction must be in (0, 1], not {self.timestep_fraction}")
        self._check_policy(sampler)
        self._check_objective(sampler)

    def check_experts(self, sampler: SamplerConfig, layouts: Mapping[str, ExpertLayout]) -> None:
        for name, split in layouts.items():
            check_guidance("sampler.guidance_scale", sampler.guidance_scale, name, split)
        levels = sampler.sigmas().tolist()
        windows = [[levels[s] for s in window] for window in self.window.everywhere(sampler.num_steps - 1)]
        layouts["student"].refuse_idle(
            windows, "algorithm.window", "Train the other expert, or change algorithm.window"
        )

    def _check_policy(self, sampler: SamplerConfig) -> None:
        if self.kernel == "ode" or self.eta <= 0:
            raise ValueError("algorithm.kernel must be stochastic and algorithm.eta above 0: else there is no policy")
        if self.kernel == "cps" and self.eta > 1:
            raise ValueError(f"algorithm.eta must be at most 1 for cps, not {self.eta}: 1 draws all noise anew")
        policy = self.policy(sampler)
        for s in range(sampler.num_steps - 1):
            if not policy.std(s) > 0:
                raise ValueError(
                    f"algorithm.kernel {policy.kernel} at level {policy.level:g} has no density at transition {s}, "
                    f"from noise level {policy.sigmas[s]:.4g} to {policy.sigmas[s + 1]:.4g}"
                )
        if not self.normalised and policy.kernel != "cps":
            raise ValueError("algorithm.normalised can be false for algorithm.kernel cps alone")
        self.window.check(sampler.num_steps - 1)
        if self.window.size and sampler.solver == "sde":
            raise ValueError("algorithm.window.size must be 0 for sampler.solver sde, which has no deterministic steps")
        if sampler.chunks.causal and sampler.chunks.context_noise:
            raise ValueError("sampler.chunks.context_noise must be 0: the replay looks back on clean chunks")

    def _check_objective(self, sampler: SamplerConfig) -> None:
        self.shape.check()
        if not 0 <= self.clip_low <= 1 or self.clip_high < 0:
            raise ValueError("algorithm.clip_low must be in [0, 1] and algorithm.clip_high not negative")
        if self.trust_region < 0 or self.kl_coefficient < 0:
            raise ValueError("algorithm.trust_region and algorithm.kl_coefficient must not be negative")
        if self.kl_target < 0 or self.kl_horizon <= 0:
            raise ValueError("algorithm.kl_target must not be negative, and algorithm.kl_horizon must be above 0")
        if self.kl_in == "reward" and self.advantage == "gdpo":
            raise ValueError(
                "algorithm.kl_in must be loss for algorithm.advantage gdpo, which compares each reward alone"
            )
        if not self.kl_coefficient and (self.kl_target or self.kl_in == "reward"):
            raise ValueError("algorithm.kl_coefficient must be above 0 for algorithm.kl_target and algorithm.kl_in")
        if self.clip_velocity < 0 or (self.clip_velocity and self.objective == "gspo"):
            raise ValueError(
                "algorithm.clip_velocity must not be negative, and 0 for gspo, which has one ratio for all transitions"
            )
        if self.objective == "gspo" and self.step_weight != "none":
            raise ValueError("algorithm.step_weight must be none for gspo, which has one ratio for all transitions")
        estimates = self.kl_coefficient > 0 and self.kl in ("k1", "k2", "k3")
        if not self.normalised and (self.guard or self.step_weight == "equal" or self.clip_velocity or estimates):
            raise ValueError(
                "algorithm.normalised must be true for algorithm.guard, algorithm.step_weight equal, "
                "algorithm.clip_velocity and the estimates of algorithm.kl: they need the density itself"
            )
