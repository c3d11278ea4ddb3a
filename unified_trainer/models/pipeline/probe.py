"""Facts of a pipeline: `learn` calls it a few times with networks without memory, and compares what passed."""

import math
from typing import Any

import torch
from torch import Tensor

from unified_trainer.models.pipeline.arguments import FoundArguments
from unified_trainer.models.pipeline.calls import SHORT, STEPS, CallRecord, Pipeline
from unified_trainer.models.pipeline.facts import Facts, FoundTime
from unified_trainer.models.pipeline.guidance import guided, negative_place, rule_of
from unified_trainer.models.pipeline.latents import FoundLatents
from unified_trainer.models.pipeline.sound import FoundSound
from unified_trainer.models.pipeline.tokens import noted_block, tokens_of
from unified_trainer.models.pipeline.values import Place, Size, made_of, part, rows_of, same, stacked, wider


@torch.autocast("cpu", enabled=False)  # a role that runs in bf16 may be the first to ask
def learn(pipeline: Pipeline, size: Size) -> Facts:
    """Return what the pipeline's calls say at one size; ProbeError, which names an argument, for what does not fit."""
    pipeline.memory.answers.clear()  # those of another size
    with noted_block(pipeline) as block:
        one = _off(pipeline, size)
    guidance, factor = _guidance(pipeline, size, one)
    moved = [steps for steps in (one.steps, one.sound_steps) if steps]
    latents, *sounds = FoundLatents.of(pipeline, size, *(steps[0][1] for steps in moved))
    times = _times(pipeline, one, latents.name)
    (sign, output), *of_sounds = [
        _output(pipeline, made_of(one.outputs[0], place), stacked(moved[place][0][0]), found)
        for place, found in enumerate((latents, *sounds))
    ]
    for steps in moved:
        _check_euler(pipeline, one.sigmas.double().tolist(), steps)
    known = {*(time.name for time in times), guidance, *(sound.name for sound in sounds)}
    arguments = FoundArguments.of(pipeline, size, one, latents, known)
    seen = guided(pipeline, size)
    unlike = None if arguments.paired else negative_place(pipeline, size, seen, arguments.text)
    return Facts(
        pipeline=type(pipeline.pipe).__name__,
        size=size,
        latents=latents,
        sound=FoundSound(sounds[0], *of_sounds[0], latents.shape) if sounds else None,
        times=times,
        sign=sign,
        output=output,
        arguments=arguments,
        given_levels=one.given_levels,
        guidance=guidance,
        guidance_factor=factor,
        rule=rule_of(pipeline, seen, latents, sign=sign, output=output),
        negative=unlike,
        tokens=tokens_of(pipeline, size, latents, block),
        no_guidance=dict(pipeline.no_guidance),
    )


def _off(pipeline: Pipeline, size: Size) -> CallRecord:
    """Turn guidance off and return what passed in a call."""
    guider = pipeline.pipe.components.get("guider")
    if guider is not None:
        pipeline.pipe.guider = guider.new(guidance_scale=1.0)
    for scale in (1.0, 0.0):  # the two scales that pipelines call off
        if "guidance_scale" in pipeline.no_guidance:
            pipeline.no_guidance["guidance_scale"] = scale
        seen = pipeline.call([SHORT], size)
        if _is_single(seen):
            return seen
    if len(seen.inputs) == len(seen.steps) == STEPS - 1 and "strength" in pipeline.names:
        raise pipeline.refuse("starts from a noised image or clip, at the level of its strength, and not from noise")
    if len(seen.inputs) == STEPS:
        raise pipeline.refuse("calls its network on more rows than samples without guidance")
    raise pipeline.refuse(f"calls its network {len(seen.inputs)} times in {STEPS} steps without guidance")


def _guidance(pipeline: Pipeline, size: Size, one: CallRecord) -> tuple[str, float]:
    """Return the argument of guidance that is embedded in the network, and its factor."""
    if "guidance_scale" in pipeline.names:
        scale = pipeline.no_guidance["guidance_scale"] + 2
        negative = {"negative_prompt": SHORT} if "negative_prompt" in pipeline.names else {}
        more = pipeline.call([SHORT], size, guidance_scale=scale, stop=1, **negative)
        for name, value in more.inputs[0].items():
            before = one.inputs[0].get(name)
            numbers = [float(x) for x in (before, value) if isinstance(x, Tensor) and x.numel() == 1]
            if len(numbers) == 2 and numbers[0] != numbers[1]:
                return name, numbers[1] / scale
    return "", 1.0


def _is_single(seen: CallRecord) -> bool:
    """Whether the network was called once in each step, on the samples alone."""
    once = len(seen.inputs) == len(seen.steps) == STEPS and len(seen.sound_steps) in (0, STEPS)
    return once and len(stacked(made_of(seen.outputs[0]))) == len(seen.steps[0][1])


def _times(pipeline: Pipeline, seen: CallRecord, latents: str) -> tuple[FoundTime, ...]:
    """Return all arguments that follow the noise level."""
    sigmas, found = seen.sigmas[:STEPS].double().cpu(), list[FoundTime]()
    for name, value in seen.inputs[0].items():
        of_sample = isinstance(value, Tensor) and value.dtype != torch.bool and rows_of(value) in (1, None)
        if name == latents or not of_sample:
            continue
        each = torch.stack([call[name].double().flatten() for call in seen.inputs])
        fixed = (each == each[0]).all(0)
        times = each[:, ~fixed]
        if times.numel() and len(times[:, 0].unique()) == STEPS and bool((times == times[:, :1]).all()):
            line = _line(sigmas, times[:, 0])
            if line is not None:
                held = torch.where(fixed, each[0], torch.nan).float().reshape(value.shape[1:])
                found.append(FoundTime(name, *line, tuple(value.shape[1:]), held if bool(fixed.any()) else None))
    if not found:
        raise pipeline.refuse(f"gives its network no argument that follows the noise levels {sigmas.tolist()}")
    return tuple(found)


def _line(sigmas: Tensor, times: Tensor) -> tuple[float, float, float] | None:
    """Return slope, offset and warp of times = slope w + offset, with w = sigma / (warp - (warp - 1) sigma)."""
    u = times / (1000 if float(times.abs().max()) > 2 else 1)  # the level before a shift s: s u / (1 + (s - 1) u)
    inner = (u > 0.01) & (u < 0.99)
    warps = [1.0, float((sigmas * (1 - u) / (u * (1 - sigmas)))[inner].mean())] if bool(inner.any()) else [1.0]
    for warp in warps:
        w = sigmas / (warp - (warp - 1) * sigmas)
        fitted = torch.linalg.lstsq(torch.stack([w, torch.ones_like(w)], 1), times[:, None]).solution[:, 0]
        slope, offset = (round(x, 3) + 0.0 for x in fitted.tolist())
        if float((slope * w + offset - times).abs().max()) <= 1e-3 * float(times.abs().max()):  # some are integers
            return slope, offset, warp
    return None


def _output(pipeline: Pipeline, output: Any, velocity: Tensor, latents: FoundLatents) -> tuple[float, Place | None]:
    made, given = stacked(output), latents.of_given(velocity)
    wide = wider(made, torch.empty(1, *latents.native))
    for place in (None, *wide, *((dim, -count) for dim, count in wide)):
        native = part(made, place)
        for sign in (1.0, -1.0) if native[0].numel() == math.prod(latents.native) else ():
            if same(sign * latents.of_step(native), given):
                return sign, place
    raise pipeline.refuse(
        f"makes the velocity {[*velocity.shape]} of the network's output {[*made.shape]} by more than a sign"
    )


def _check_euler(pipeline: Pipeline, sigmas: list[float], steps: list[tuple[Any, Tensor, Tensor]]) -> None:
    """Raise ProbeError unless every solver step is Euler's, x + (next sigma - sigma) velocity."""
    for (velocity, x, moved), sigma, following in zip(steps, sigmas, sigmas[1:], strict=False):
        change = (following - sigma) * stacked(velocity).double().reshape(x.shape)
        if not same(x.double() + change, moved):
            raise pipeline.refuse("does not follow the probability flow by Euler steps")
