"""Facts of a pipeline: `learn` calls it a few times with networks without memory, and compares what passed."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image as Picture
from torch import Tensor, nn

from unified_trainer.models.base import Shape
from unified_trainer.models.pipeline.calls import STEPS, CallRecord, Pipeline, ProbeError, made_of, same, stacked
from unified_trainer.models.pipeline.facts import BEHIND, Argument, Facts, Place, Size, nested, of_tensors
from unified_trainer.models.pipeline.guidance import rule_of

SHORT = "a cat"
LONG = 'a red circle and a blue square above the words "moving left", ' * 100  # longer than any pipeline takes
COLORS = (200, 30, 30), (30, 90, 200)
DIGIT = 1024  # indices pass through a pipeline as two digits, which float32 holds exactly


@torch.autocast("cpu", enabled=False)  # a role that runs in bf16 may be the first to ask
def learn(pipeline: Pipeline, size: Size) -> Facts:
    """Return what the pipeline's calls say at one size; ProbeError, which names an argument, for what does not fit."""
    image, other_image = (Picture.new("RGB", size[:0:-1], color) for color in COLORS)
    pipeline.memory.answers.clear()  # those of another size
    with _noted(pipeline) as block:
        one = _off(pipeline, size, image)
    guidance, factor = _guidance(pipeline, size, image, one)
    latents, channels, listed = _latents(pipeline, one)
    time, line, time_shape = _time(pipeline, one, latents)
    sign, output = _output(pipeline, one)
    _check_euler(pipeline, one)
    arguments = _Arguments.of(
        pipeline, size, (image, other_image), one, {latents: channels, time: None, guidance: None}
    )
    vae = _VAE.of(pipeline, size, image, one.steps[0][1])
    rule, more = rule_of(pipeline, SHORT, size, image, sign=sign, output=output)
    slope, offset, warp = line
    return Facts(
        pipeline=type(pipeline.pipe).__name__,
        size=size,
        latents=latents,
        native=tuple(one.steps[0][1].shape[1:]),
        shape=vae.shape,
        order=vae.order,
        channels=channels,
        listed_shape=listed,
        time=time,
        slope=slope,
        offset=offset,
        warp=warp,
        time_shape=time_shape,
        sign=sign,
        output=output,
        text=arguments.text,
        images=arguments.images,
        image_parts=arguments.image_parts,
        paired=arguments.paired,
        counted=arguments.counted,
        constants=arguments.constants,
        replicated=arguments.replicated,
        scale=vae.scale,
        shift=vae.shift,
        flat=vae.flat,
        decode=vae.words,
        given_levels=one.given_levels,
        guidance=guidance,
        guidance_factor=factor,
        rule=rule,
        more_guidance=more,
        features=_features(block[-1], {x.shape[0] for x in arguments.text.values() if x.shape}),
        no_guidance=dict(pipeline.no_guidance),
    )


def text_call(pipeline: Pipeline, prompt: str, size: Size, image: Picture.Image | None, *, paired: bool) -> CallRecord:
    """Call the pipeline up to its network; `first_rows` of the arguments are the prompt's."""
    return pipeline.call([prompt, LONG] if paired else [prompt], size, image, stop=True)


def first_row(value: Any) -> Tensor:
    """Return the first sample's part of an argument: a tensor [b, ...] or a list of b tensors."""
    return value[0]


def _off(pipeline: Pipeline, size: Size, image: Picture.Image) -> CallRecord:
    """Turn guidance off and return what passed in a call."""
    guider = pipeline.pipe.components.get("guider")
    if guider is not None:
        pipeline.pipe.guider = type(guider)(guidance_scale=1.0)
    for scale in (1.0, 0.0):  # the two scales that pipelines call off
        if "guidance_scale" in pipeline.no_guidance:
            pipeline.no_guidance["guidance_scale"] = scale
        seen = pipeline.call([SHORT], size, image)
        if _is_single(seen):
            return seen
    raise pipeline.refuse(f"calls its network {len(seen.inputs)} times in {STEPS} steps without guidance")


def _guidance(pipeline: Pipeline, size: Size, image: Picture.Image, one: CallRecord) -> tuple[str, float]:
    """Return the argument of guidance that is embedded in the network, and its factor."""
    if "guidance_scale" in pipeline.names:
        scale = pipeline.no_guidance["guidance_scale"] + 2
        more = pipeline.call([SHORT], size, image, guidance_scale=scale, stop=True)
        for name, value in more.inputs[0].items():
            before = one.inputs[0].get(name)
            numbers = [float(x) for x in (before, value) if isinstance(x, Tensor) and x.numel() == 1]
            if len(numbers) == 2 and numbers[0] != numbers[1]:
                return name, numbers[1] / scale
    return "", 1.0


def _is_single(seen: CallRecord) -> bool:
    """Whether the network was called once in each step, on the samples alone."""
    return len(seen.inputs) == len(seen.steps) == STEPS and len(stacked(seen.outputs[0])) == len(seen.steps[0][1])


def _latents(pipeline: Pipeline, seen: CallRecord) -> tuple[str, Place | None, tuple[int, ...] | None]:
    named, sample = seen.inputs[0], seen.steps[0][1]
    for name, value in named.items():
        if of_tensors(value):
            if sum(x.numel() for x in value) == sample.numel() and same(stacked(value).reshape(sample.shape), sample):
                return name, None, tuple(value[0].shape)
        elif isinstance(value, Tensor) and value.is_floating_point():
            if value.shape == sample.shape and same(value, sample):
                return name, None, None
            for place in _wider(value, sample):
                if same(value.narrow(place[0], 0, place[1]), sample):
                    return name, place, None
    shapes = ", ".join(f"{name} {[*value.shape]}" for name, value in named.items() if isinstance(value, Tensor))
    raise pipeline.refuse(f"gives its network no argument that holds its latents {[*sample.shape]}: {shapes}")


def _wider(value: Tensor, part: Tensor) -> list[Place]:
    """Return the dimension in which a tensor is larger than the part, if that is one, and the part's size there."""
    if value.dim() != part.dim():
        return []
    other = [dim for dim in range(value.dim()) if value.shape[dim] != part.shape[dim]]
    return [(dim, part.shape[dim]) for dim in other if len(other) == 1 and dim and value.shape[dim] > part.shape[dim]]


def _time(
    pipeline: Pipeline, seen: CallRecord, latents: str
) -> tuple[str, tuple[float, float, float], tuple[int, ...]]:
    sigmas = seen.sigmas[:STEPS].double().cpu()
    for name, value in seen.inputs[0].items():
        if name == latents or not isinstance(value, Tensor) or value.dtype == torch.bool or not value.numel():
            continue
        each = [call[name].double().flatten() for call in seen.inputs]
        times = torch.stack([one[0] for one in each])
        if len(times.unique()) == STEPS and all(bool((one == one[0]).all()) for one in each):
            line = _line(sigmas, times)
            if line is not None:
                return name, line, tuple(value.shape[1:])
    raise pipeline.refuse(f"gives its network no argument that follows the noise levels {sigmas.tolist()}")


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


def _output(pipeline: Pipeline, seen: CallRecord) -> tuple[float, Place | None]:
    made, given = stacked(seen.outputs[0]), stacked(seen.steps[0][0])
    for sign in (1.0, -1.0):
        if made.numel() == given.numel() and same(sign * made.flatten(), given.flatten()):
            return sign, None
        for place in _wider(made, given):
            if same(sign * made.narrow(place[0], 0, place[1]), given):
                return sign, place
    raise pipeline.refuse(
        f"makes the velocity {[*given.shape]} of the network's output {[*made.shape]} by more than a sign"
    )


@contextmanager
def _noted(pipeline: Pipeline) -> Iterator[list[Any]]:
    """Note what the middle block returns."""
    blocks, found = blocks_of(pipeline.pipe.components[pipeline.networks[0]]), list[Any]()
    if not blocks:
        raise pipeline.refuse("has a network without a list of blocks with attention")
    hook = blocks[len(blocks) // 2].register_forward_hook(lambda _block, _inputs, output: found.append(output))
    try:
        yield found
    finally:
        hook.remove()


def _features(output: Any, text: set[int]) -> tuple[int | None, int, int]:
    """Find the tokens of the sample in what the middle block returns: most tokens, but for those of a `text`."""
    parts = list(enumerate(output)) if isinstance(output, tuple) else [(None, output)]
    tokens = [(x.shape[1:-1].numel(), place, x.shape[-1]) for place, x in parts if isinstance(x, Tensor)]
    most, place, channels = max(tokens, key=lambda one: (one[0] not in text, one[0], one[1] or 0))
    return place, channels, most


def blocks_of(network: nn.Module) -> tuple[nn.Module, ...]:
    """Return the blocks of a network in the order of its lists: those that hold attention."""
    lists = [part for part in network.children() if isinstance(part, nn.ModuleList)]
    return tuple(
        block for part in lists for block in part if any("Attention" in type(m).__name__ for m in block.modules())
    )


def _check_euler(pipeline: Pipeline, seen: CallRecord) -> None:
    """Raise ProbeError unless every solver step is Euler's, x + (next sigma - sigma) velocity."""
    sigmas = seen.sigmas.double().tolist()
    for (velocity, x, moved), sigma, following in zip(seen.steps, sigmas, sigmas[1:], strict=False):
        change = (following - sigma) * stacked(velocity).double().reshape(x.shape)
        if not same(x.double() + change, moved):
            raise pipeline.refuse("does not follow the probability flow by Euler steps")


@dataclass(frozen=True)
class _Arguments:
    """The network's arguments beside latents and time, by what they follow."""

    text: Mapping[str, Argument]
    images: Mapping[str, Argument]
    image_parts: tuple[str, ...]
    paired: bool
    counted: tuple[str, ...] | None
    constants: Mapping[str, Any]
    replicated: tuple[str, ...]

    @classmethod
    def of(
        cls,
        pipeline: Pipeline,
        size: Size,
        images: tuple[Picture.Image, Picture.Image],
        one: CallRecord,
        known: Mapping[str, Place | None],
    ) -> "_Arguments":
        """Compare calls with another prompt, two samples and another image; `known` are the other arguments."""
        image, other_image = images
        latents, place = next(iter(known.items()))
        _check_steps(pipeline, one, known)
        first, long = one.inputs[0], pipeline.call([LONG], size, image, stop=True).inputs[0]
        two = _of_two(pipeline, size, image, first, latents)
        rows = {name for name, value in two.items() if _rows(value) == 2 * (_rows(first.get(name)) or 0) > 0}
        left_out = {name: _all_marked(value) for name, value in first.items() if long.get(name) is None}
        long = long | left_out
        paired = any(isinstance(first[name], Tensor) and first[name].shape != long[name].shape for name in rows)
        if alone := paired and not _masked(pipeline, size, image):
            paired = False
        if paired:
            first, long = (text_call(pipeline, prompt, size, image, paired=True).inputs[0] for prompt in (SHORT, LONG))
            short = one.inputs[0]
            rows |= {name for name, x in first.items() if isinstance(x, Tensor) and short.get(name) is None}
            long = {
                name: torch.ones_like(value) if long.get(name) is None and name in rows else long.get(name)
                for name, value in first.items()
            }
        seen = text_call(pipeline, SHORT, size, other_image, paired=paired).inputs[0]
        parts = {name: part for name, part in pipeline.pipe.components.items() if isinstance(part, nn.Module)}
        answers = {name: dict[str, Any]() for name in ["", *parts] if pipeline.takes_image or not name}
        for name in answers:  # all networks answer otherwise, and each alone
            with pipeline.memory.otherwise([parts[name]] if name else [*parts.values()]):
                answers[name] = text_call(pipeline, SHORT, size, image, paired=paired).inputs[0]
        start = [stacked(held[latents]) for held in (first, seen)]
        if differ(*(x.narrow(place[0], 0, place[1]) if place else x for x in start)):
            raise pipeline.refuse("writes its image into the noisy latents")
        if place:
            for held in (first, long, seen, *answers.values()):
                held[BEHIND] = held[latents].tensor_split([place[1]], place[0])[1]
            rows |= {BEHIND}
        others = {name: value for name, value in first.items() if name not in known}
        text = {name for name, value in others.items() if name in rows and differ(value, long.get(name), row=True)}
        from_image = {n for n, value in others.items() if pipeline.takes_image and differ(value, seen.get(n))}
        if pipeline.takes_image and not from_image:
            raise pipeline.refuse("gives its network no argument that follows from the image")
        rows |= {name for name in from_image if isinstance(others[name], Tensor) and len(others[name]) == 1}
        if both := text & from_image:
            raise pipeline.refuse(f"makes {', '.join(sorted(both))} of prompt and image, which are encoded apart")
        pairs = [(first_row(others[name]), first_row(long[name])) for name in text] if alone else []
        items = {len(short) for short, longer in pairs if short.shape != longer.shape}
        counted = {n for n in others.keys() - rows if {_rows(others[n])} == items and _begins(others[n], long[n])}
        for name in sorted({*others, *long} - known.keys() - rows - counted):
            if name in from_image or differ(others.get(name), long.get(name)):
                raise pipeline.refuse(f"gives its network {name}, which follows from the sample but has no row for it")
        fixed = {name: value for name, value in others.items() if name not in text | from_image}
        if made := sorted(name for name, value in fixed.items() if differ(value, answers[""].get(name))):
            raise pipeline.refuse(f"makes {', '.join(made)} by another network, of neither prompt nor image")
        replicated = tuple(name for name in fixed if name in rows)
        fixed |= {name: long[name] for name in counted}
        return cls(
            {name: _argument(others[name], long[name], alone) for name in others if name in text},
            {name: _argument(others[name], seen[name]) for name in others if name in from_image},
            tuple(n for n in parts if from_image and any(differ(others[x], answers[n].get(x)) for x in from_image)),
            paired,
            tuple(sorted(counted)) if alone else None,
            {name: value[:1] if name in replicated else value for name, value in fixed.items()},
            replicated,
        )


def _check_steps(pipeline: Pipeline, seen: CallRecord, known: Mapping[str, Place | None]) -> None:
    """Raise ProbeError if another argument than latents and time changes between the solver steps."""
    (latents, place), first = next(iter(known.items())), seen.inputs[0]
    for later in seen.inputs[1:]:
        changed = [name for name in sorted({*first, *later} - known.keys()) if differ(first.get(name), later.get(name))]
        if place:
            behind = [x[latents].tensor_split([place[1]], place[0])[1] for x in (first, later)]
            changed += [BEHIND] if differ(*behind) else []
        if changed:
            raise pipeline.refuse(f"changes {', '.join(changed)} from step to step beside latents and time")


def _of_two(
    pipeline: Pipeline, size: Size, image: Picture.Image, first: dict[str, Any], latents: str
) -> dict[str, Any]:
    """Return the network's arguments for two samples of one prompt and image."""
    ways: list[tuple[int, int, Any]] = [(1, 2, image), (2, 1, image), (2, 1, [image, image])]
    # some forget to repeat their prompts, and some take one image for all
    for prompts, samples, pictures in ways if pipeline.takes_image else ways[1::-1]:
        try:
            two = pipeline.call([SHORT] * prompts, size, pictures, samples=samples, stop=True).inputs[0]
        except ProbeError:
            continue
        if _rows(two[latents]) == 2 * (_rows(first[latents]) or 0):
            return two
    # the pipeline makes one sample at a time: what has one row has two, if the network takes them
    two = {
        name: (torch.cat([value] * 2) if isinstance(value, Tensor) else value * 2) if _rows(value) == 1 else value
        for name, value in first.items()
    }
    try:
        output = pipeline.pipe.components[pipeline.networks[0]](**nested(two))
    except Exception as error:  # whatever a network raises says that it does not take them
        raise pipeline.refuse(f"makes one sample at a time: {type(error).__name__}: {error}") from error
    if len(stacked(made_of(output))) != 2:
        raise pipeline.refuse("makes one sample at a time")
    return two


def _masked(pipeline: Pipeline, size: Size, image: Picture.Image) -> bool:
    """Whether an argument marks or counts the tokens of a prompt that is padded beside a long one."""
    short, long = (text_call(pipeline, prompt, size, image, paired=True).inputs[0] for prompt in (SHORT, LONG))
    return any(
        differ(value, long.get(name)) and (not value.is_floating_point() or bool(((value == 0) | (value == 1)).all()))
        for name, value in short.items()
        if isinstance(value, Tensor)
    )


def _all_marked(value: Any) -> Any:
    """Return the mask of a prompt that fills its argument, where pipelines leave it out; other values as they are."""
    masks = isinstance(value, Tensor) and bool(((value == 0) | (value == 1)).all())
    return torch.ones_like(value) if masks else value


def _begins(value: Any, longer: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and not differ(value, longer[: len(value)])


def _rows(value: Any) -> int | None:
    """Return the number of rows or items of an argument; None if it has none."""
    return len(value) if isinstance(value, (list, tuple)) or (isinstance(value, Tensor) and value.dim()) else None


def _argument(value: Any, longest: Any, alone: bool = False) -> Argument:
    row = first_row(longest)
    return Argument(tuple(row.shape), row.dtype, of_tensors(value) or (alone and row.shape != first_row(value).shape))


def differ(a: Any, b: Any, *, row: bool = False) -> bool:
    """Whether two arguments differ, or with `row` those of the first sample; by more than a device's rounding."""
    a, b = (None if isinstance(x, Mapping) else x for x in (a, b))  # what `flat` leaves of them is empty
    if a is None or b is None:
        return a is not b
    if row:
        a, b = first_row(a), first_row(b)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape != b.shape or not same(a.cpu(), b.cpu())
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) != len(b) or any(differ(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is not type(b) or (isinstance(a, (int, float, str, np.ndarray)) and bool(np.any(a != b)))


@dataclass(frozen=True)
class _VAE:
    """How the pipeline turns its latents into what its VAE decodes."""

    shape: Shape
    order: Tensor | None
    scale: Tensor
    shift: Tensor
    flat: bool
    words: Mapping[str, Any]

    @classmethod
    def of(cls, pipeline: Pipeline, size: Size, image: Picture.Image, sample: Tensor) -> "_VAE":
        """Send zeros, ones and indices through the pipeline's own end; `sample` are latents of one sample."""

        vae = pipeline.pipe.components["vae"]
        signature = inspect.signature(vae.decode)
        further = [name for name in list(signature.parameters)[1:] if name not in ("return_dict", "generator")]

        def decoded(x: Tensor) -> tuple[Tensor, dict[str, Any]]:
            seen = pipeline.call([SHORT], size, image, latents=x)
            if seen.decoded is None:
                raise pipeline.refuse("decodes its latents by something else than the decode of its VAE")
            z, inputs, named = seen.decoded
            made = stacked(vae.decode(z, *inputs, **named | {"return_dict": False})[0])
            if (made.shape[2] if made.dim() == 5 else 1, *made.shape[-2:]) != size:
                raise pipeline.refuse(f"makes {[*made.shape[2:]]} where {[*size]} was asked for")
            bound = signature.bind(z, *inputs, **named).arguments
            return z.double(), {name: value for name, value in bound.items() if name in further}

        index = torch.arange(sample.numel()).reshape(sample.shape)
        shift, words = decoded(torch.zeros_like(sample))
        scale = decoded(torch.ones_like(sample))[0] - shift
        low, high = (((decoded(part.to(sample))[0] - shift) / scale) for part in (index % DIGIT, index // DIGIT))
        order = (low.round() + DIGIT * high.round()).flatten()
        if order.numel() != sample.numel() or len(order.unique()) != len(order):
            raise pipeline.refuse(
                f"gives its VAE {order.numel()} numbers of {sample.numel()} latents, which are no reordering of them"
            )
        flat = shift.dim() == 4
        if flat:
            shift, scale = shift[:, :, None], scale[:, :, None]
        of_channel = [x[0, :, :1, :1, :1] for x in (scale, shift)]
        if not all(same(x[0], y.expand_as(x[0])) for x, y in zip((scale, shift), of_channel, strict=True)):
            of_channel = [scale[0], shift[0]]  # as FLUX.2 has a number for each place of a patch
        reordered = not torch.equal(order.long(), torch.arange(len(order)))
        shape = (shift.shape[1], shift.shape[2], shift.shape[3], shift.shape[4])
        scale, shift = (x.float() for x in of_channel)
        return cls(shape, order.long() if reordered else None, scale, shift, flat, words)
