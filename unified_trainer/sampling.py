"""From noise to latents: the student followed along its noise levels, by its own sampler or as a policy."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.flow import sigma_table, warp_steps, x0_from_velocity
from unified_trainer.policy import Kernel, log_prob, transition
from unified_trainer.roles.role import Role
from unified_trainer.types import Batch, Latents, Rollout

Solver = Literal["ode", "sde"]
Draw = Callable[[int], Latents]  # the noise of transition s


@dataclass(frozen=True)
class SamplerConfig:
    num_steps: int = 30  # network calls per sample
    step_list: tuple[float, ...] = ()  # falling noise levels in thousandths before the shift; empty spaces them evenly
    shift: float = 3.0  # of the noise levels towards noise; 1 is none
    solver: Solver = "ode"  # Euler steps, or renoising the predicted x0 (sde), which few-step students are made for
    guidance_scale: float = 3.0  # uncond + w (cond - uncond); 1 is no guidance
    negative_prompt: str = ""  # what guidance steers away from

    def check(self) -> None:
        """Raise ValueError, naming the key, for what cannot be."""
        if self.num_steps < 1:
            raise ValueError(f"sampler.num_steps must be at least 1, not {self.num_steps}")
        if not self.step_list:
            return
        if len(self.step_list) != self.num_steps:
            raise ValueError(
                f"sampler.step_list has {len(self.step_list)} levels, but sampler.num_steps is {self.num_steps}"
            )
        if self.step_list[0] > 1000 or any(a <= b for a, b in itertools.pairwise((*self.step_list, 0.0))):
            raise ValueError(f"sampler.step_list must fall from at most 1000 and stay above 0, not {self.step_list}")

    def sigmas(self) -> Float[Tensor, " steps_and_0"]:
        if not self.step_list:
            return sigma_table(self.num_steps, self.shift)
        return warp_steps((*self.step_list, 0.0), self.shift)

    @property
    def kernel(self) -> tuple[Kernel, float]:
        """The transition kernel of the solver, and its level."""
        return ("cps", 1.0) if self.solver == "sde" else ("ode", 0.0)


@torch.no_grad()
def rollout(
    role: Role,
    noise: Latents,
    batch: Batch,
    sampler: SamplerConfig,
    kernel: Kernel,
    level: float,
    draw: Draw,
) -> Rollout:
    """Sample with a stochastic kernel and keep every state; `draw(s)` is the noise of transition s.

    The last transition goes to the clean prediction without noise: it has no density and is not part of the policy.
    """
    sigmas, states, log_probs = sampler.sigmas(), [noise], []
    for s in range(sampler.num_steps):
        velocity = policy_velocity(role, states[-1], sigmas[s], batch, sampler)
        if s == sampler.num_steps - 1:
            states.append(x0_from_velocity(states[-1], velocity, sigmas[s]))
            continue
        mean, std = transition(kernel, states[-1], velocity, sigmas[s], sigmas[s + 1], level)
        states.append(mean + std * draw(s).to(mean))
        log_probs.append(log_prob(states[-1], mean, std))
    return Rollout(torch.stack(states, 1), torch.stack(log_probs, 1))


def predict_at(role: Role, noise: Latents, batch: Batch, sampler: SamplerConfig, draw: Draw, step: int) -> Latents:
    """x0 as the sampler's call number `step` predicts it; only that call keeps a graph, and none is made after it."""
    sigmas, x_t = sampler.sigmas(), noise
    kernel, level = sampler.kernel
    with torch.no_grad():
        for s in range(step):
            velocity = policy_velocity(role, x_t, sigmas[s], batch, sampler)
            x_t, std = transition(kernel, x_t, velocity, sigmas[s], sigmas[s + 1], level)
            if level:
                x_t = x_t + std * draw(s).to(x_t)
    velocity = policy_velocity(role, x_t, sigmas[step], batch, sampler)
    return x0_from_velocity(x_t, velocity, sigmas[step])


@torch.no_grad()
def generate(role: Role, noise: Latents, batch: Batch, sampler: SamplerConfig, draw: Draw) -> Latents:
    """Clean latents by the sampler's own solver; the same noise and draws give the same sample."""
    return predict_at(role, noise, batch, sampler, draw, sampler.num_steps - 1)


def policy_velocity(role: Role, x_t: Latents, sigma: Tensor, batch: Batch, sampler: SamplerConfig) -> Latents:
    """The one network call of sampling and of its replay: same batch geometry, same guidance."""
    return role.guided_velocity(x_t, sigma.expand(len(batch)), batch.cond, batch.uncond, sampler.guidance_scale)
