"""What a pipeline's call says about its network, its conditions and its VAE."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unified_trainer.models.base import Shape

Place = tuple[int, int]  # a dimension, and how many of its first channels are meant
Size = tuple[int, int, int]  # frames, height and width in pixels


@dataclass(frozen=True)
class Argument:
    """An argument of the network that has a row for each sample, which follows from its prompt or its image."""

    shape: tuple[int, ...]  # the largest, without the sample axis
    dtype: torch.dtype
    listed: bool = False  # whether the network takes a list of tensors, each as long as its prompt


@dataclass(frozen=True)
class Facts:
    """What holds at one size. Our latents are [c, t, h, w] as the VAE has them, the native ones the pipeline's own."""

    pipeline: str
    size: Size
    latents: str  # the argument with the noisy latents
    native: tuple[int, ...]  # shape of one sample
    shape: Shape
    order: Tensor | None  # place in the flattened native latents of each of ours; None: they are in the same order
    channels: Place | None  # where the argument holds the latents, if it holds other channels behind them
    listed_shape: tuple[int, ...] | None  # of one sample, where the argument is a list of samples
    time: str  # the argument with the time: slope w + offset, where w is sigma without the shift `warp`
    slope: float
    offset: float
    warp: float
    time_shape: tuple[int, ...]  # of one sample, where each token has a time
    sign: float  # velocity = sign x output
    output: Place | None  # the output's channels that are the velocity, if it has others
    text: Mapping[str, Argument]
    images: Mapping[str, Argument]  # what follows from a condition image; BEHIND is the channels behind the latents
    image_parts: tuple[str, ...]  # the components that make them
    paired: bool  # whether prompts are encoded beside a long one, so that all are padded to one length
    counted: tuple[str, ...] | None  # set: each sample is called alone, with so many items of these as its prompt
    constants: Mapping[str, Any]  # all other arguments; BEHIND may be one
    replicated: tuple[str, ...]  # those of them that have a row, or an item, for each sample
    scale: Tensor  # the VAE decodes scale x latents + shift, [c, 1, 1, 1] or [c, t, h, w]
    shift: Tensor
    flat: bool  # whether the VAE takes images [b, c, h, w]
    decode: Mapping[str, Any]  # further arguments of its decode
    given_levels: bool  # whether the pipeline gives its scheduler the levels before the shift
    guidance: str  # the argument of guidance that is embedded in the network; "": none
    guidance_factor: float
    features: tuple[int | None, int, int]  # the middle block's output: its place in a tuple, channels and tokens
    no_guidance: Mapping[str, float]  # arguments of the call that turn guidance off

    def behind(self, value: Tensor) -> Tensor:
        """Return the channels behind the latents in the argument that holds both."""
        dim, latents = self.channels or (1, value.shape[1])
        return value.tensor_split([latents], dim)[1]

    def __str__(self) -> str:
        """Return the facts in words."""
        time = f"{self.slope:.6g} sigma" + (f" + {self.offset:.6g}" if self.offset else "")
        time += f", sigma without a shift of {self.warp:.6g}" if self.warp != 1 else ""
        behind = ", with other channels behind them" if self.channels else ""
        parts = [
            f"latents: {self.latents} {[*self.native]}{behind}",
            f"time: {self.time} = {time}{' for each token' if self.time_shape else ''}",
            f"velocity: {'-' if self.sign < 0 else ''}output",
            f"prompt: {', '.join(self.text)}",
        ]
        parts += [f"image: {', '.join(self.images)}"] if self.images else []
        parts += [f"guidance in the network: {self.guidance}"] if self.guidance else []
        return "; ".join(parts)


BEHIND = "channels behind the latents"


def flat(arguments: Mapping[str, Any], samples: int) -> dict[str, Any]:
    """Return arguments with those apart that hold others by name, or tensors of all samples: "a/b" is a[b]."""
    apart: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, Mapping) and value:
            apart |= flat({f"{name}/{key}": one for key, one in value.items()}, samples)
        elif of_tensors(value) and all(x.dim() > 2 and len(x) == samples for x in value):
            apart |= {f"{name}/{place}": x for place, x in enumerate(value)}
        else:
            apart[name] = value
    return apart


def nested(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that `flat` took apart as they were."""
    whole: dict[str, Any] = {}
    for name, value in arguments.items():
        head, _, rest = name.partition("/")
        whole[head] = whole.get(head, {}) | {rest: value} if rest else value
    for head in {name.partition("/")[0] for name in arguments if "/" in name}:
        parts = whole[head]
        numbered = all(key.isdecimal() for key in parts)
        whole[head] = [parts[key] for key in sorted(parts, key=int)] if numbered else nested(parts)
    return whole


def of_tensors(value: Any) -> bool:
    """Whether a value is a list of tensors."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(one, Tensor) for one in value)
