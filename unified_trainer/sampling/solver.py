"""Sampling latents from noise with a student, all frames at once or chunk by chunk."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.effects import Text
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import NetworkCalls, PositiveFraction, Shift, at_least
from unified_trainer.basics.types import Batch, Latents, Rollout, of_kind
from unified_trainer.models.flow_map import ending_at
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.numerics.flow import (
    GuidanceScale,
    add_noise,
    shift_sigma,
    sigma_table,
    stretched,
    x0_from_velocity,
)
from unified_trainer.numerics.kernels import Kernel, Policy, transition
from unified_trainer.parallel.meter import detail, phase
from unified_trainer.roles.causal import Causal, KVCache
from unified_trainer.roles.role import Role, Trainable
from unified_trainer.sampling.equal_rows import EqualRows
from unified_trainer.sampling.outside_window import OutsideWindow
from unified_trainer.sampling.shared_calls import Velocity, shared_velocity

Solver = Literal["ode", "sde"]
Draw = Callable[[int], Latents]  # noise of transition s; number num_steps is the context noise of a causal student


@dataclass(frozen=True)
class SamplerConfig:
    num_steps: NetworkCalls = 30
    """Network calls per sample."""
    step_sigmas: tuple[PositiveFraction, ...] = ()
    """Falling noise levels in (0, 1] before the shift, one per step, e.g. 1 0.75 0.5 0.25; empty spaces them evenly."""
    shift: Shift = 3.0
    """Shift of the noise levels towards noise; 1 is none."""
    terminal: Annotated[float, at_least(0, 0.999)] = 0.0
    """Last noise level above 0, to which all are stretched after the shift, as LTX-Video's scheduler does; 0 stretches
    none."""
    solver: Solver = "ode"
    """Euler steps of the ODE (ode), or renoising of the predicted x0 (sde), for which few-step students are trained."""
    guidance_scale: GuidanceScale = 3.0
    """Guidance scale w of uncond + w (cond - uncond); 1 is no guidance. Two numbers: high- and low-noise expert."""
    negative_prompt: Text = ""
    """Prompt of the unconditional pass."""
    chunks: ChunkConfig = field(default_factory=ChunkConfig)

    def check(self) -> None:
        """Raise UserError, naming the key, for settings that contradict each other."""
        self.chunks.check()
        if self.terminal and self.num_steps < 2:
            raise UserError(f"sampler.terminal {self.terminal:g} needs 2 or more steps, but sampler.num_steps is 1")
        if not self.step_sigmas:
            return
        if len(self.step_sigmas) != self.num_steps:
            raise UserError(
                f"sampler.step_sigmas has {len(self.step_sigmas)} levels, but sampler.num_steps is {self.num_steps}"
            )
        if any(a <= b for a, b in itertools.pairwise(self.step_sigmas)):
            raise UserError(f"sampler.step_sigmas must fall from step to step, not {self.step_sigmas}")

    def check_unguided(self) -> None:
        """Raise UserError if the sampler has guidance, which a distilled student does not need."""
        if self.guidance_scale != 1:
            raise UserError(
                f"sampler.guidance_scale must be 1, not {self.guidance_scale}: a distilled student runs without "
                "guidance; the teacher's is algorithm.guidance_scale"
            )

    def sigmas(self) -> Float[Tensor, " steps_and_0"]:
        """Return the noise levels of all steps, shifted and stretched, float64, with a trailing 0."""
        if self.step_sigmas:
            levels = shift_sigma(torch.tensor((*self.step_sigmas, 0.0), dtype=torch.float64), self.shift)
        else:
            levels = sigma_table(self.num_steps, self.shift)
        return stretched(levels, self.terminal) if self.terminal else levels

    @property
    def kernel(self) -> tuple[Kernel, float]:
        """The transition kernel of the solver, and its noise level."""
        return ("cps", 1.0) if self.solver == "sde" else ("ode", 0.0)


@phase("rollout")
@torch.no_grad()
def generate(
    role: Role, noise: Latents, batch: Batch, sampler: SamplerConfig, draw: Draw, equal: EqualRows | None = None
) -> Latents:
    """Return clean latents by the sampler's own solver; equal noise and draws give equal samples.

    The first call of a bidirectional student is made once for `equal` rows, of one noise and condition.
    """
    last = sampler.num_steps - 1
    if not sampler.chunks.causal:
        velocity = shared_velocity(role, batch, equal, 1, functools.partial(_velocity_of, role, sampler))
        return sample_to_step(velocity, noise, sampler, draw, last)
    exits = [last] * len(sampler.chunks.ranges(noise.shape[2]))
    return predict_chunks(of_kind(Causal, role), noise, batch, sampler, draw, exits)


@phase("rollout")
def predict_at(role: Role, noise: Latents, batch: Batch, sampler: SamplerConfig, draw: Draw, step: int) -> Latents:
    """Return the x0 that network call number `step` predicts; only that call keeps a graph, and it is the last."""
    velocity = functools.partial(policy_velocity, role, batch=batch, sampler=sampler)
    return sample_to_step(velocity, noise, sampler, draw, step)


@phase("rollout")
def predict_chunks(
    student: Causal,
    noise: Latents,
    batch: Batch,
    sampler: SamplerConfig,
    draw: Draw,
    exits: Sequence[int],
    first_gradient_frame: int = 0,
) -> Latents:
    """Return the latents of all chunks, from an empty KV cache on: see `next_chunks`."""
    ranges, sigmas = sampler.chunks.ranges(noise.shape[2]), sampler.sigmas()[: max(exits) + 1]
    cache = student.open_cache(batch.cond, batch.uncond, sampler.chunks, sampler.guidance_scale, sigmas)
    return torch.cat(list(next_chunks(cache, noise, sampler, draw, ranges, exits, first_gradient_frame)), 2)


def next_chunks(
    cache: KVCache,
    noise: Latents,
    sampler: SamplerConfig,
    draw: Draw,
    ranges: Sequence[tuple[int, int]],
    exits: Sequence[int],
    first_gradient_frame: int = 0,
) -> Iterator[Latents]:
    """Yield the chunks that follow a KV cache (Self-Forcing, arXiv:2506.08009): x0 of chunk i from its call exits[i].

    `ranges` are the chunks' frames of `noise`. Only call exits[i] keeps a graph, and only in chunks that start at
    `first_gradient_frame` or later. A yielded chunk that others of `noise` follow is then appended to the KV cache at
    the context noise, without gradient.
    """
    draw = functools.cache(draw)
    for (start, stop), step in zip(ranges, exits, strict=True):
        own = slice(start, stop)
        with torch.set_grad_enabled(torch.is_grad_enabled() and start >= first_gradient_frame):
            x0 = sample_to_step(cache.velocity, noise[:, :, own], sampler, frames_of(draw, own), step)
        yield x0
        if stop < noise.shape[2]:
            cache.append(as_context(x0.detach(), sampler, frames_of(draw, own)))


@torch.no_grad()
def recomputed_cache(
    student: Causal,
    past: Float[Tensor, "b c past h w"],
    frames: Sequence[int],
    batch: Batch,
    sampler: SamplerConfig,
    draw: Draw,
    exits: Sequence[int],
) -> KVCache:
    """Return the KV cache of finished latent frames `past`, computed anew with the prompts of `batch`.

    `frames` are their numbers in the video, rising; the next chunk follows the last one. Frames that have left the
    window are not given: what they added to keys and values of later frames is lost (LongLive, arXiv:2509.22622).
    """
    sigmas, draw = sampler.sigmas()[: max(exits) + 1], functools.cache(draw)
    cache = student.open_cache(batch.cond, batch.uncond, sampler.chunks, sampler.guidance_scale, sigmas)
    starts = {start for start, _ in sampler.chunks.ranges(frames[-1] + 1)} if frames else ()
    cuts = [i for i, frame in enumerate(frames) if i == 0 or frame in starts or frame - 1 != frames[i - 1]]
    for i, stop in itertools.pairwise([*cuts, len(frames)]):
        own = slice(i, stop)
        cache.append(as_context(past[:, :, own], sampler, frames_of(draw, own)), at=frames[i])
    return cache


@phase("rollout")
@torch.no_grad()
def rollout(
    role: Role,
    noise: Latents,
    batch: Batch,
    sampler: SamplerConfig,
    policy: Policy,
    window: range,
    draw: Draw,
    *,
    equal: EqualRows | None = None,
    kept: range | None = None,
    outside: OutsideWindow | None = None,
) -> Rollout:
    """Sample with the policy's noise in the transitions of `window` and none elsewhere, and keep those transitions.

    `kept` are fewer of them to keep. Steps outside of the window are by default the sampler's own. `draw(s)` is the
    noise of transition s. The last transition goes to the clean prediction without noise: it has no density and cannot
    be in the window. A causal student samples every chunk so; state s then joins all chunks at their step s.

    Rows that are `equal`, of one noise and condition, stay so until the window's first transition adds its noise: up to
    there, and for a causal student in the first chunk, a call is made once for all of them.
    """
    outside = outside or OutsideWindow.of_sampler(sampler.sigmas(), window)
    walk = functools.partial(_policy_walk, outside=outside, policy=policy, window=window, kept=kept or window)
    share = functools.partial(shared_velocity, role, batch, equal, len(outside.before))
    if not sampler.chunks.causal:
        return walk(share(functools.partial(_velocity_of, role, sampler)), noise, draw=draw)
    student, draw = of_kind(Causal, role), functools.cache(draw)
    sigmas, parts = sampler.sigmas()[:-1], []

    def open_cache(rows: Batch) -> KVCache:
        return student.open_cache(rows.cond, rows.uncond, sampler.chunks, sampler.guidance_scale, sigmas)

    cache = open_cache(batch)

    def first_velocity(rows: Batch) -> Velocity:
        return (cache if rows is batch else open_cache(rows)).velocity

    for start, stop in sampler.chunks.ranges(noise.shape[2]):
        own = slice(start, stop)
        velocity = cache.velocity if parts else share(first_velocity)
        part = walk(velocity, noise[:, :, own], draw=frames_of(draw, own))
        parts.append(part)
        if stop < noise.shape[2]:
            cache.append(part.x0)
    fractions = [part.states.shape[3] / noise.shape[2] for part in parts]
    log_probs = sum(fraction * part.log_probs for fraction, part in zip(fractions, parts, strict=True))
    states = torch.cat([part.states for part in parts], 3)
    return Rollout(states, log_probs, torch.cat([part.x0 for part in parts], 2))


def trainable_steps(student: Trainable, sampler: SamplerConfig) -> list[int]:
    """Return the sampler's steps whose network call reaches trained weights."""
    return [step for step, sigma in enumerate(sampler.sigmas()[:-1]) if student.trains(sigma)]


def _velocity_of(role: Role, sampler: SamplerConfig, batch: Batch) -> Velocity:
    """The velocity of a walk of these samples, all frames at once."""
    return functools.partial(policy_velocity, role, batch=batch, sampler=sampler)


def policy_velocity(
    role: Role,
    x_t: Latents,
    sigma: Tensor,
    batch: Batch,
    sampler: SamplerConfig,
    x0: Latents | None = None,
    equal: EqualRows | None = None,
) -> Latents:
    """Return the velocity of one network call of sampling, or of its replay: same batch geometry, same guidance.

    The replay of a causal student attends to `x0`, the finished chunks of its rollout. The call is made once for rows
    that are `equal` in all of it, which those of a causal replay are not.
    """
    if equal and equal.any:
        once = policy_velocity(role, equal.reduce(x_t), sigma, batch.take(equal.first), sampler)
        return equal.spread(once)
    if role.config.is_flow_map:
        batch = _with_ends(batch, sampler)
    level = sigma.expand(len(batch))
    if x0 is None or not sampler.chunks.causal:
        return role.guided_velocity(x_t, level, batch.cond, batch.uncond, sampler.guidance_scale)
    student = of_kind(Causal, role).attending_to(x0, sampler.chunks)
    return student.guided_velocity(x_t, level, batch.cond, batch.uncond, sampler.guidance_scale)


def _with_ends(batch: Batch, sampler: SamplerConfig) -> Batch:
    """Tell a flow map where its steps end: at the sampler's next level, or at the x0 that the sde renoises."""
    sigmas = sampler.sigmas()
    ends = sigmas[-1:] if sampler.solver == "sde" else sigmas[1:]
    cond, uncond = (ending_at(each, ends.expand(len(batch), -1)) for each in (batch.cond, batch.uncond))
    return replace(batch, cond=cond, uncond=uncond)


def sample_to_step(velocity: Velocity, x_t: Latents, sampler: SamplerConfig, draw: Draw, step: int) -> Latents:
    """Follow the solver without gradient up to call number `step`, and return the x0 it predicts."""
    sigmas = sampler.sigmas()
    kernel, level = sampler.kernel
    with torch.no_grad():
        for s in range(step):
            detail(f"step {s + 1}/{step + 1}")
            x_t, std = transition(kernel, x_t, velocity(x_t, sigmas[s]), sigmas[s], sigmas[s + 1], level)
            if level:
                x_t = x_t + std * draw(s).to(x_t)
    detail(f"step {step + 1}/{step + 1}")
    return x0_from_velocity(x_t, velocity(x_t, sigmas[step]), sigmas[step])


def _policy_walk(
    velocity: Velocity,
    x_t: Latents,
    *,
    outside: OutsideWindow,
    policy: Policy,
    window: range,
    kept: range,
    draw: Draw,
) -> Rollout:
    states, log_probs, calls = [], [], itertools.count(1)

    def velocity_at(x_t: Latents, sigma: Tensor) -> Latents:
        detail(f"step {next(calls)}/{outside.calls + len(window)}")
        return velocity(x_t, sigma)

    x_t = outside.solve(velocity_at, x_t, outside.before)
    for s in window:
        if s == kept.start:
            states.append(x_t)
        mean, std = policy.step(s, x_t, velocity_at(x_t, policy.sigmas[s]))
        x_t = mean + std * draw(s).to(mean)
        if s in kept:
            states.append(x_t)
            log_probs.append(policy.log_prob(x_t, mean, std))
    x0 = outside.solve(velocity_at, x_t, outside.after)
    return Rollout(torch.stack(states, 1), torch.stack(log_probs, 1), x0)


def frames_of(draw: Draw, own: slice) -> Draw:
    """Return the draw of a chunk, which is its part of that of all frames."""
    return lambda s: draw(s)[:, :, own]


def as_context(x0: Latents, sampler: SamplerConfig, draw: Draw) -> Latents:
    """Noise a finished chunk to the context noise level, at which later chunks attend to it."""
    noise_level = sampler.chunks.context_noise
    return add_noise(x0, draw(sampler.num_steps).to(x0), noise_level) if noise_level else x0
