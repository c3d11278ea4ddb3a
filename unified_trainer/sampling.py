"""From noise to latents: the student followed along its noise levels, deterministically or as a policy."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.flow import sigma_table, x0_from_velocity
from unified_trainer.policy import Kernel, log_prob, transition
from unified_trainer.roles.role import Role
from unified_trainer.types import Batch, Latents, Rollout


@dataclass(frozen=True)
class SamplerConfig:
    num_steps: int = 30  # network calls per sample
    shift: float = 3.0  # of the noise levels towards noise; 1 is none
    guidance_scale: float = 3.0  # uncond + w (cond - uncond); 1 is no guidance
    negative_prompt: str = ""  # what guidance steers away from

    def sigmas(self) -> Float[Tensor, " steps_and_0"]:
        return sigma_table(self.num_steps, self.shift)


@torch.no_grad()
def rollout(
    role: Role,
    noise: Latents,
    batch: Batch,
    sampler: SamplerConfig,
    kernel: Kernel,
    level: float,
    draw: Callable[[int], Latents],
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


@torch.no_grad()
def generate(role: Role, noise: Latents, batch: Batch, sampler: SamplerConfig) -> Latents:
    """Clean latents by Euler steps along the probability-flow ODE; the same noise gives the same sample."""
    sigmas, x_t = sampler.sigmas(), noise
    for sigma, sigma_next in itertools.pairwise(sigmas):
        velocity = policy_velocity(role, x_t, sigma, batch, sampler)
        x_t, _ = transition("ode", x_t, velocity, sigma, sigma_next, 0.0)
    return x_t


def policy_velocity(role: Role, x_t: Latents, sigma: Tensor, batch: Batch, sampler: SamplerConfig) -> Latents:
    """The one network call of sampling and of its replay: same batch geometry, same guidance."""
    return role.guided_velocity(x_t, sigma.expand(len(batch)), batch.cond, batch.uncond, sampler.guidance_scale)
