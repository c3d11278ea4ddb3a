"""The network's arguments beside latents and time, by what they follow: the prompt, the condition image, or neither."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from unified_trainer.models.pipeline.calls import (
    OTHER_COLORS,
    SHORT,
    CallError,
    CallRecord,
    Pipeline,
    ProbeError,
    Shown,
)
from unified_trainer.models.pipeline.latents import FoundLatents
from unified_trainer.models.pipeline.values import Size, differ, made_of, nested, of_tensors, rows_of, stacked
from unified_trainer.models.prompt_tensors import Shapes

ROWS = " rows"  # behind the name of a padded argument: how many of its rows a prompt has


@dataclass(frozen=True)
class Argument:
    """An argument of the network that has a row for each sample, which follows from its prompt or its image."""

    shape: tuple[int, ...]  # the largest, without the sample axis
    dtype: torch.dtype
    listed: bool = False  # whether the network takes a list of tensors, each as long as its prompt


@dataclass(frozen=True)
class FoundArguments:
    """The arguments, of which BEHIND and KNOWN are parts of the one with the latents."""

    text: Mapping[str, Argument]
    images: Mapping[str, Argument]
    joint: bool  # whether some of the text follow from prompt and image together
    image_parts: tuple[str, ...]  # the components that make them
    paired: bool  # whether prompts are encoded beside a long one, so that all are padded to one length
    counted: tuple[str, ...] | None  # set: each sample is called alone, with so many items of these as its prompt
    constants: Mapping[str, Any]  # all other arguments
    replicated: tuple[str, ...]  # those of them that have a row, or an item, for each sample
    of_pass: frozenset[str]  # what each pass sets beside the video's latents, such as the time

    @property
    def text_shapes(self) -> Shapes:
        """The largest shapes of the tensors of a prompt."""
        shapes: dict[str, tuple[int, ...]] = {name: argument.shape for name, argument in self.text.items()}
        return shapes | {name + ROWS: () for name, argument in self.text.items() if argument.listed}

    @classmethod
    def of(
        cls,
        pipeline: Pipeline,
        size: Size,
        one: CallRecord,
        latents: FoundLatents,
        known: set[str],
    ) -> Self:
        """Compare calls with another prompt and another image; `known` are further arguments that are known."""

        def called(prompts: Sequence[str], shown: Shown | None = None) -> dict[str, Any]:
            given = pipeline.call(prompts, size, shown, stop=1).inputs[0]
            starts.append(latents.of_step(latents.of_argument(given)[:1]))
            return apart(given)

        def apart(given: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in latents.apart(given).items() if name not in known}

        starts = list[Tensor]()
        steps = [apart(given) for given in one.inputs]
        for later in steps[1:]:
            if changed := [name for name in sorted({*steps[0], *later}) if differ(steps[0].get(name), later.get(name))]:
                raise pipeline.refuse(f"changes {', '.join(changed)} from step to step beside latents and time")
        try:
            first, long = steps[0], called([pipeline.long])
        except CallError:  # of a pipeline that cuts no prompts
            pipeline.long = pipeline.long[: len(pipeline.long) // 20]
            first, long = steps[0], called([pipeline.long])
        rows = {name for name, value in first.items() if rows_of(value) == 1}
        _check_two(pipeline, one.inputs[0])
        long |= {name: _all_marked(value) for name, value in first.items() if long.get(name) is None}
        prompts = [SHORT]
        if alone := any(isinstance(first[name], Tensor) and first[name].shape != long[name].shape for name in rows):
            try:
                padded = called([SHORT, pipeline.long]), called([pipeline.long] * 2)
            except ProbeError:  # of a pipeline of one prompt at a time
                padded = {}, {}
            if not (alone := not _marked(*padded)):
                rows |= {name for name, x in padded[0].items() if isinstance(x, Tensor) and first.get(name) is None}
                (first, long), prompts = padded, [SHORT, pipeline.long]
                long |= {name: torch.ones_like(first[name]) for name in rows if long.get(name) is None}
        starts.clear()
        seen = called(prompts, pipeline.uniform(size, *OTHER_COLORS))
        parts = {name: part for name, part in pipeline.pipe.components.items() if isinstance(part, nn.Module)}
        answers = {name: dict[str, Any]() for name in ["", *parts] if pipeline.takes_image or not name}
        for name in answers:  # all networks answer otherwise, and each alone
            with pipeline.memory.otherwise([parts[name]] if name else [*parts.values()]):
                answers[name] = called(prompts)
        if any(differ(starts[0], start) for start in starts):
            raise pipeline.refuse("writes its image into the noisy latents")
        text = {name for name, value in first.items() if name in rows and differ(value, long.get(name), row=True)}
        from_image = {n for n, value in first.items() if pipeline.takes_image and differ(value, seen.get(n))}
        if pipeline.takes_image and not from_image:
            raise pipeline.refuse("gives its network no argument that follows from the image")
        rows |= {name for name in from_image if isinstance(first[name], Tensor) and len(first[name]) == 1}
        from_image -= (both := text & from_image)
        pairs = [(first[name][0], long[name][0]) for name in text] if alone else []
        items = {len(short) for short, longer in pairs if short.shape != longer.shape}
        counted = {n for n in first.keys() - rows if {rows_of(first[n])} == items and _begins(first[n], long[n])}
        for name in sorted({*first, *long} - rows - counted):
            if name in from_image | both or differ(first.get(name), long.get(name)):
                raise pipeline.refuse(f"gives its network {name}, which follows from the sample but has no row for it")
        fixed = {name: value for name, value in first.items() if name not in text | from_image}
        if made := sorted(name for name, value in fixed.items() if differ(value, answers[""].get(name))):
            raise pipeline.refuse(f"makes {', '.join(made)} by another network, of neither prompt nor image")
        replicated = tuple(name for name in fixed if name in rows)
        fixed |= {name: long[name] for name in counted}
        return cls(
            {name: _argument(first[name], long[name], alone) for name in first if name in text},
            {name: _argument(first[name], seen[name]) for name in first if name in from_image},
            bool(both),
            tuple(n for n in parts if from_image and any(differ(first[x], answers[n].get(x)) for x in from_image)),
            len(prompts) > 1,
            tuple(sorted(counted)) if alone else None,
            {n: value[:1] if n in replicated else value for n, value in fixed.items() if n != "return_dict"},
            replicated,
            frozenset(known - {""}),
        )


def _check_two(pipeline: Pipeline, inputs: Mapping[str, Any]) -> None:
    """Raise ProbeError unless the network takes two samples, for which each argument of one row, or item, has two."""
    two = {
        name: (torch.cat([value] * 2) if isinstance(value, Tensor) else value * 2) if rows_of(value) == 1 else value
        for name, value in inputs.items()
    }
    try:
        output = pipeline.pipe.components[pipeline.networks[0]](**nested(two))
    except Exception as error:  # whatever a network raises says that it does not take them
        raise pipeline.refuse(f"makes one sample at a time: {type(error).__name__}: {error}") from error
    if len(stacked(made_of(output))) != 2:
        raise pipeline.refuse("makes one sample at a time")


def _marked(short: Mapping[str, Any], long: Mapping[str, Any]) -> bool:
    """Whether an argument marks or counts the tokens of a prompt that is padded beside a long one."""
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


def _argument(value: Any, longest: Any, alone: bool = False) -> Argument:
    row = longest[0]
    return Argument(tuple(row.shape), row.dtype, of_tensors(value) or (alone and row.shape != value[0].shape))
