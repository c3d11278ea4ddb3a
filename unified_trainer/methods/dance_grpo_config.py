"""The settings of dance_grpo, and what cannot be among them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from unified_trainer.advantages import Estimator
from unified_trainer.batching import BatchPlan
from unified_trainer.kl import KL
from unified_trainer.methods.windows import WindowConfig
from unified_trainer.policy import Kernel, Policy
from unified_trainer.roles.experts import Split, check_guidance
from unified_trainer.sampling import SamplerConfig
from unified_trainer.surrogates import Mode, Shape


@dataclass(frozen=True)
class DanceGRPOConfig:
    num_prompts: int = 8  # prompts per training step, over all ranks
    num_samples: int = 8  # samples of each prompt: the group an advantage is relative to
    prompts_per_update: int = 8  # prompts of one optimizer update; num_prompts / this updates per rollout
    rollout_batch: int = 32  # samples generated, decoded and scored at a time
    update_batch: int = 32  # samples per backward pass
    kernel: Kernel | Literal["auto"] = "auto"  # transition of the policy; auto: dance, or renoising for a sde sampler
    eta: float = 0.3  # level of the policy's noise; flow_wan has none, and renoising is cps at level 1
    normalised: bool = True  # the policy's density; without, -(x_next - mean)^2 alone, as published for cps
    window: WindowConfig = field(default_factory=WindowConfig)
    timestep_fraction: float = 0.6  # share of the stochastic transitions trained, drawn anew each training step
    init_same_noise: bool = False  # one initial noise per prompt and step instead of one per sample
    objective: Mode = "clip"  # policy objective
    clip_low: float = 1e-4  # the ratio is clipped at 1 - clip_low; it stays near 1, being a mean over elements
    clip_high: float = 1e-4  # and at 1 + clip_high
    shape: Shape = field(default_factory=Shape)
    guard: bool = False  # centre the log-ratio on 0 and give it one spread at all steps, as GRPO-Guard does
    trust_region: float = 0.0  # KL per element from which a sample that moved its advantage's way is dropped; 0 is none
    step_weight: Literal["none", "inverse_dt", "equal"] = "none"  # of transitions: 1 / (sigma - sigma'), or equal pull
    advantage: Estimator = "grpo"  # estimator of a group
    advantage_clip: float = 5.0  # largest absolute advantage
    reward_threshold: float = float("-inf")  # a group whose mean reward is below it teaches nothing
    keep_samples: int = 0  # samples of each group learnt from, half the best and half the worst; 0 is all
    kl: KL = "exact"  # KL to the reference: exact per transition, its estimates k1, k2, k3, or of the velocities
    kl_coefficient: float = 0.0  # of that KL in the loss; 0 needs no reference

    @property
    def learns_from_data(self) -> bool:
        return False

    def policy(self, sampler: SamplerConfig) -> Policy:
        """The policy that the sampler and the settings make."""
        kernel, level = self.kernel, self.eta
        if kernel == "auto":
            kernel, level = sampler.kernel if sampler.solver == "sde" else ("dance", self.eta)
        return Policy(kernel, level, sampler.sigmas(), self.normalised)

    def check(self, sampler: SamplerConfig) -> None:
        if self.num_samples < 2:
            raise ValueError("algorithm.num_samples must be at least 2: a group of one has no advantage")
        if sampler.num_steps < 2:
            raise ValueError("sampler.num_steps must be at least 2: the last transition is not trained")
        if self.rollout_batch < 1:
            raise ValueError(f"algorithm.rollout_batch must be at least 1, not {self.rollout_batch}")
        if not 0 < self.timestep_fraction <= 1:
            raise ValueError(f"algorithm.timestep_fraction must be in (0, 1], not {self.timestep_fraction}")
        self._check_policy(sampler)
        self._check_objective(sampler)

    def check_experts(self, sampler: SamplerConfig, splits: Mapping[str, Split]) -> None:
        for name, split in splits.items():
            check_guidance("sampler.guidance_scale", sampler.guidance_scale, name, split)
        levels = sampler.sigmas().tolist()
        windows = [[levels[s] for s in window] for window in self.window.everywhere(sampler.num_steps - 1)]
        splits["student"].refuse_idle(windows, "algorithm.window", "Train the other expert, or change algorithm.window")

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
        if self.objective == "gspo" and self.step_weight != "none":
            raise ValueError("algorithm.step_weight must be none for gspo, which has one ratio for all transitions")
        estimates = self.kl_coefficient > 0 and self.kl in ("k1", "k2", "k3")
        if not self.normalised and (self.guard or self.step_weight == "equal" or estimates):
            raise ValueError(
                "algorithm.normalised must be true for algorithm.guard, algorithm.step_weight equal and the "
                "estimates of algorithm.kl: they need the density itself"
            )
        if self.keep_samples and not (2 <= self.keep_samples <= self.num_samples and self.keep_samples % 2 == 0):
            raise ValueError(
                f"algorithm.keep_samples must be even and at most algorithm.num_samples, not {self.keep_samples}"
            )
        if self.kl_coefficient and sampler.chunks.causal:
            raise ValueError("algorithm.kl_coefficient must be 0 for a causal student: a reference has no chunks")

    def plan(self) -> BatchPlan:
        names = ("num_prompts", "num_samples", "prompts_per_update", "update_batch")
        keys = tuple(f"algorithm.{name}" for name in names)
        return BatchPlan(self.num_prompts, self.num_samples, self.prompts_per_update, self.update_batch, keys)
