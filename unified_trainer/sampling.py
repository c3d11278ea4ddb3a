"""From noise to latents: the student followed along its noise levels, all at once or chunk by chunk."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.numerics.flow import GuidanceScale, add_noise, guide, sigma_table, warp_steps, x0_from_velocity
from unified_trainer.numerics.kernels import Kernel, Policy, transition
from unified_trainer.roles.causal import CausalStudent
from unified_trainer.roles.role import Role, Trainable
from unified_trainer.types import Batch, Condition, Latents, Rollout

Solver = Literal["ode", "sde"]
Draw = Callable[[int], Latents]  # the noise of transition s; number num_steps is the context's of a causal student
Call = Callable[[Latents, Tensor], Latents]  # velocity of x_t at one noise level


@dataclass(frozen=True)
class SamplerConfig:
    num_steps: int = 30  # network calls per sample
    step_sigmas: tuple[
        float, ...
    ] = ()  # falling noise levels in thousandths before the shift; empty spaces them evenly
    shift: float = 3.0  # of the noise levels towards noise; 1 is none
    solver: Solver = "ode"  # Euler steps, or renoising the predicted x0 (sde), which few-step students are made for
    guidance_scale: GuidanceScale = 3.0  # uncond + w (cond - uncond); 1 is no guidance. Two numbers: of the
    # high- and of the low-noise expert
    negative_prompt: str = ""  # what guidance steers away from
    chunks: ChunkConfig = field(default_factory=ChunkConfig)

    def check(self) -> None:
        """Raise ValueError, naming the key, for what cannot be."""
        self.chunks.check()
        if self.num_steps < 1:
            raise ValueError(f"sampler.num_steps must be at least 1, not {self.num_steps}")
        if not self.step_sigmas:
            return
        if len(self.step_sigmas) != self.num_steps:
            raise ValueError(
                f"sampler.step_sigmas has {len(self.step_sigmas)} levels, but sampler.num_steps is {self.num_steps}"
            )
        if self.step_sigmas[0] > 1000 or any(a <= b for a, b in itertools.pairwise((*self.step_sigmas, 0.0))):
            raise ValueError(
                f"sampler.step_sigmas must fall from at most 1000 and stay above 0, not {self.step_sigmas}"
            )

    def check_distilled(self) -> None:
        """ValueError unless it runs without guidance, as a student does whose teacher had it."""
        if self.guidance_scale != 1:
            raise ValueError(
                f"sampler.guidance_scale must be 1, not {self.guidance_scale}: a distilled student runs without "
                "guidance; the teacher's is algorithm.guidance_scale"
            )

    def sigmas(self) -> Float[Tensor, " steps_and_0"]:
        if not self.step_sigmas:
            return sigma_table(self.num_steps, self.shift)
        return warp_steps((*self.step_sigmas, 0.0), self.shift)

    @property
    def kernel(self) -> tuple[Kernel, float]:
        """The transition kernel of the solver, and its level."""
        return ("cps", 1.0) if self.solver == "sde" else ("ode", 0.0)


@torch.no_grad()
def generate(role: Role, noise: Latents, batch: Batch, sampler: SamplerConfig, draw: Draw) -> Latents:
    """Clean latents by the sampler's own solver; the same noise and draws give the same sample."""
    last = sampler.num_steps - 1
    if not sampler.chunks.causal:
        return predict_at(role, noise, batch, sampler, draw, last)
    exits = [last] * len(sampler.chunks.ranges(noise.shape[2]))
    return predict_chunks(role, noise, batch, sampler, draw, exits)


def predict_at(role: Role, noise: Latents, batch: Batch, sampler: SamplerConfig, draw: Draw, step: int) -> Latents:
    """x0 as the sampler's call number `step` predicts it; only that call keeps a graph, and none is made after it."""
    return _sample_to_step(
        lambda x_t, sigma: policy_velocity(role, x_t, sigma, batch, sampler), noise, sampler, draw, step
    )


def predict_chunks(
    student: CausalStudent,
    noise: Latents,
    batch: Batch,
    sampler: SamplerConfig,
    draw: Draw,
    exits: Sequence[int],
    first_gradient_frame: int = 0,
) -> Latents:
    """All of `stream_chunks`."""
    return torch.cat(list(stream_chunks(student, noise, batch, sampler, draw, exits, first_gradient_frame)), 2)


def stream_chunks(
    student: CausalStudent,
    noise: Latents,
    batch: Batch,
    sampler: SamplerConfig,
    draw: Draw,
    exits: Sequence[int],
    first_gradient_frame: int = 0,
    turns: Mapping[int, Condition] = MappingProxyType({}),
) -> Iterator[Latents]:
    """Chunk by chunk (Self-Forcing, arXiv:2506.08009): x0 as call number exits[i] of chunk i predicts it.

    Only that call keeps a graph, and only in chunks from `first_gradient_frame` on. A finished chunk is handed out,
    and then looked back on, at the context noise and without gradient. From chunk i on the condition is turns[i].
    """
    chunks, draw = sampler.chunks, functools.cache(draw)
    levels = sampler.sigmas()[: max(exits) + 1]
    past = student.open_cache(batch.cond, batch.uncond, chunks, sampler.guidance_scale, levels)
    for i, ((start, stop), step) in enumerate(zip(chunks.ranges(noise.shape[2]), exits, strict=True)):
        own = slice(start, stop)
        if i in turns:
            past.set_condition(turns[i])
        with torch.set_grad_enabled(torch.is_grad_enabled() and start >= first_gradient_frame):
            x0 = _sample_to_step(past.velocity, noise[:, :, own], sampler, lambda s, own=own: draw(s)[:, :, own], step)
        yield x0
        past.append(_context(x0.detach(), sampler, lambda s, own=own: draw(s)[:, :, own]))


@torch.no_grad()
def rollout(
    role: Role,
    noise: Latents,
    batch: Batch,
    sampler: SamplerConfig,
    policy: Policy,
    window: range,
    draw: Draw,
) -> Rollout:
    """Sample with the policy's noise in the transitions of `window`, none elsewhere, and keep what it did.

    `draw(s)` is the noise of transition s. The last transition goes to the clean prediction without noise: it has no
    density and cannot be in the window. A causal student does so in every chunk; state s then is what all chunks were
    at their step s.
    """
    if not sampler.chunks.causal:
        return _policy_walk(
            lambda x_t, sigma: policy_velocity(role, x_t, sigma, batch, sampler), noise, sampler, policy, window, draw
        )
    draw = functools.cache(draw)
    levels = sampler.sigmas()[:-1]
    past = role.open_cache(batch.cond, batch.uncond, sampler.chunks, sampler.guidance_scale, levels)
    parts = []
    for start, stop in sampler.chunks.ranges(noise.shape[2]):
        own = slice(start, stop)
        part = _policy_walk(
            past.velocity,
            noise[:, :, own],
            sampler,
            policy,
            window,
            lambda s, own=own: draw(s)[:, :, own],
        )
        past.append(part.x0)
        parts.append(part)
    shares = [part.states.shape[3] / noise.shape[2] for part in parts]
    log_probs = sum(share * part.log_probs for share, part in zip(shares, parts, strict=True))
    states, x0 = torch.cat([part.states for part in parts], 3), torch.cat([part.x0 for part in parts], 2)
    return Rollout(states, log_probs, x0)


def trainable_steps(student: Trainable, sampler: SamplerConfig) -> list[int]:
    """The sampler's calls that reach weights which are trained: all, unless one of two experts is not."""
    return [call for call, sigma in enumerate(sampler.sigmas()[:-1]) if student.learns(sigma)]


def policy_velocity(
    role: Role, x_t: Latents, sigma: Tensor, batch: Batch, sampler: SamplerConfig, x0: Latents | None = None
) -> Latents:
    """The one network call of sampling and of its replay: same batch geometry, same guidance.

    A causal student's replay looks back on `x0`, the chunks that its rollout finished with.
    """
    level = sigma.expand(len(batch))
    if x0 is None or not sampler.chunks.causal:
        return role.guided_velocity(x_t, level, batch.cond, batch.uncond, sampler.guidance_scale)
    if sampler.guidance_scale == 1:
        return role.masked_velocity(x_t, level, batch.cond, sampler.chunks, x0)
    x_both, x0_both, cond = torch.cat([x_t, x_t]), torch.cat([x0, x0]), batch.cond.cat(batch.uncond)
    both = role.masked_velocity(x_both, torch.cat([level, level]), cond, sampler.chunks, x0_both)
    return guide(*both.chunk(2), role.scale(level, sampler.guidance_scale))


def _sample_to_step(call: Call, x_t: Latents, sampler: SamplerConfig, draw: Draw, step: int) -> Latents:
    """Follow the solver without gradient up to call number `step`, which predicts x0."""
    sigmas = sampler.sigmas()
    kernel, level = sampler.kernel
    with torch.no_grad():
        for s in range(step):
            x_t, std = transition(kernel, x_t, call(x_t, sigmas[s]), sigmas[s], sigmas[s + 1], level)
            if level:
                x_t = x_t + std * draw(s).to(x_t)
    return x0_from_velocity(x_t, call(x_t, sigmas[step]), sigmas[step])


def _policy_walk(
    call: Call, x_t: Latents, sampler: SamplerConfig, policy: Policy, window: range, draw: Draw
) -> Rollout:
    sigmas, states, log_probs = sampler.sigmas(), [], []
    x0_before = None  # in a tail of second order
    for s in range(sampler.num_steps - 1):
        velocity = call(x_t, sigmas[s])
        if s not in window:
            x_next = policy.euler_step(s, x_t, velocity, x0_before)
            in_tail = policy.tail == "second_order" and s >= window.stop
            x0_before = x0_from_velocity(x_t, velocity, sigmas[s]) if in_tail else None
            x_t = x_next
            continue
        if not states:
            states.append(x_t)
        mean, std = policy.step(s, x_t, velocity)
        x_t = mean + std * draw(s).to(mean)
        states.append(x_t)
        log_probs.append(policy.log_prob(x_t, mean, std))
    x0 = x0_from_velocity(x_t, call(x_t, sigmas[-2]), sigmas[-2])
    return Rollout(torch.stack(states, 1), torch.stack(log_probs, 1), x0)


def _context(x0: Latents, sampler: SamplerConfig, draw: Draw) -> Latents:
    """A finished chunk at the noise level at which it is looked back on."""
    noise_level = sampler.chunks.context_noise
    return add_noise(x0, draw(sampler.num_steps).to(x0), noise_level) if noise_level else x0
