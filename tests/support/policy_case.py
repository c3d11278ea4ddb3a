"""One training step of DanceGRPO on the small student, and its transitions by MATH.md's formulas.

A case with `moved` changes the student between rollout and replay: ratios then differ from 1, and settings from each
other.
"""

import dataclasses
import math
from dataclasses import dataclass

import torch
from helpers import Calls, ScriptedScorer, WatchedRollouts, dance_grpo, gradients, trainable

from unified_trainer.methods.dance_grpo import DanceGRPOConfig
from unified_trainer.numerics.flow import sigma_table
from unified_trainer.roles.role import Role
from unified_trainer.sampling.solver import SamplerConfig

STEPS = 4
SIGMAS = [float(sigma) for sigma in sigma_table(STEPS, 3.0)]
ELEMENTS = 128
REWARDS = (1.0, 2.0, 4.0, 5.0, -1.0, 2.0, -3.0, 1.0)
ODE = SamplerConfig(num_steps=STEPS, guidance_scale=1.0)
SDE = dataclasses.replace(ODE, solver="sde")
CONFIG = DanceGRPOConfig(
    num_prompts=2, num_samples=4, prompts_per_update=2, rollout_batch=8, update_batch=8, timestep_fraction=1.0
)
KERNELS = {  # kernel and level
    "dance": 0.3,
    "flow": 0.7,
    "flow_wan": 0.3,
    "cps": 0.8,
}


def advantages() -> torch.Tensor:
    groups = torch.tensor(REWARDS).reshape(2, 4)
    return ((groups - groups.mean(1, keepdim=True)) / groups.std(1, keepdim=True)).flatten()


A = advantages()


def kernel(name: str, level: float, x_t: torch.Tensor, v: torch.Tensor, s: int) -> tuple[torch.Tensor, float]:
    """Return mean and standard deviation of x_{s+1} (MATH.md 4)."""
    sigma, after = SIGMAS[s], SIGMAS[s + 1]
    if name == "cps":
        std = after * math.sin(level * math.pi / 2)
        kept = math.sqrt(max(0.0, after**2 - std**2))
        return (1 - after) * (x_t - sigma * v) + kept * (x_t + (1 - sigma) * v), std
    below = SIGMAS[1] if sigma == 1 else sigma
    diffusion = {"dance": level, "flow": level * math.sqrt(sigma / (1 - below)), "flow_wan": SIGMAS[1] * sigma}[name]
    drift = v + diffusion**2 / (2 * sigma) * (x_t + (1 - sigma) * v)
    return x_t + (after - sigma) * drift, diffusion * math.sqrt(sigma - after)


@dataclass
class Step:
    """One transition of all samples, with the velocity of one role."""

    velocity: torch.Tensor
    mean: torch.Tensor
    std: float
    x_next: torch.Tensor
    normalised: bool = True

    @property
    def log_probs(self) -> torch.Tensor:
        """The normalised log-density of each element, float64."""
        return torch.distributions.Normal(self.mean.double(), self.std).log_prob(self.x_next.double())

    @property
    def log_prob(self) -> torch.Tensor:
        if not self.normalised:
            return -(self.x_next - self.mean).square().flatten(1).mean(1)
        return torch.distributions.Normal(self.mean, self.std).log_prob(self.x_next).flatten(1).mean(1)


def nudge(role: Role, size: float = 0.02) -> None:
    with torch.no_grad():
        generator = torch.Generator().manual_seed(5)
        weight = role.network.proj_out.weight
        weight.add_(size * torch.randn(weight.shape, generator=generator))


class OlderRollouts(WatchedRollouts):
    """Rollouts whose samples are said to be of older weights."""

    def __init__(self, rollouts, lags) -> None:
        super().__init__(rollouts)
        self.lags, self.lowered = torch.as_tensor(lags), 0

    def samples(self, batch, step, rng):
        samples = super().samples(batch, step, rng)
        return dataclasses.replace(samples, versions=samples.versions - self.lags)

    def lower_ahead(self):
        self.lowered += 1


class Case:
    """One training step of the small student, and its transitions."""

    def __init__(
        self,
        moved: bool = False,
        sampler: SamplerConfig = ODE,
        reference=None,
        step: int = 0,
        lags=None,
        between: float = 0.0,
        **changes,
    ):
        """`lags` is the lag that all samples are said to have, or of each; `between` moves the student in an update."""
        changes = {"clip_low": 1e-3, "clip_high": 2e-3} | changes
        config = dataclasses.replace(CONFIG, **changes)
        self.moved, self.config = moved, config
        scorer = ScriptedScorer(REWARDS)
        self.one = dance_grpo(config, sampler=sampler, scorer=scorer, reference=reference)
        self.one.method.update.on_policy.over = moved
        if lags is not None:
            self.one.method.sample_from(OlderRollouts(self.one.method.rollouts, lags))
        if moved:
            scorer.before = lambda: nudge(self.one.roles["student"])
        if between:
            student, record = self.one.roles["student"], self.one.roles["student"].step
            student.step = lambda: (record(), nudge(student, between))[0]
        self.calls = Calls.of(self.one.roles["student"])
        self.metrics = self.one.step(step)
        self.cond = self.one.loader.batch(step).cond
        self.kernel = (config.kernel, config.eta) if config.kernel != "auto" else ("dance", config.eta)
        if sampler.solver == "sde" and config.kernel == "auto":
            self.kernel = ("cps", 1.0)

    @property
    def gradient(self) -> dict[str, torch.Tensor]:
        (only,) = self.one.roles["student"].gradients
        return only

    def steps(self, role: Role) -> list[Step]:
        """Return the three stochastic transitions with the velocities of `role`."""
        made = []
        for s in range(STEPS - 1):
            x_t, x_next = self.calls.x_t[s], self.calls.x_t[s + 1]
            velocity = role.velocity(x_t, torch.full((8,), SIGMAS[s], dtype=torch.float64), self.cond)
            made.append(Step(velocity, *kernel(*self.kernel, x_t, velocity, s), x_next, self.config.normalised))
        return made

    def expected(self, loss) -> dict[str, torch.Tensor]:
        """Return the gradient of loss(now, then), given the transitions of the present and of the sampling student."""
        now, then = trainable(), trainable()
        if self.moved:
            nudge(now)
        with torch.no_grad():
            old = self.steps(then)
        loss(self.steps(now), old).backward()
        return gradients(now.network)


def log_ratios(now: list[Step], then: list[Step]) -> torch.Tensor:
    return torch.stack([a.log_prob - b.log_prob for a, b in zip(now, then, strict=True)], 1)


def ks(now: list[Step], then: list[Step]) -> torch.Tensor:
    """Return mean(dmu^2) / (2 std^2) of every sample and transition."""
    pairs = zip(now, then, strict=True)
    return torch.stack([(a.mean - b.mean).square().flatten(1).mean(1) / (2 * a.std**2) for a, b in pairs], 1)


def policy_gradient(now: list[Step], then: list[Step]) -> torch.Tensor:
    return -(A[:, None] * log_ratios(now, then)).mean()


def divergence(kind: str, now: list[Step], ref: list[Step]) -> torch.Tensor:
    """KL per element: exact, or the mean over elements of an estimate from each element's densities."""
    if kind == "exact":
        return ks(now, ref)
    d = torch.stack([a.log_probs - b.log_probs for a, b in zip(now, ref, strict=True)], 1)
    estimates = {"kl": d, "abs": d.abs(), "mse": d.square() / 2, "low_var_kl": (-d).exp() + d - 1}
    return estimates[kind].flatten(2).mean(2).float()
