"""Where a pipeline's latents are: in an argument of its network, in its solver steps, and in what its VAE decodes."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from unified_trainer.basics.types import Latents
from unified_trainer.models.base import Shape
from unified_trainer.models.pipeline.calls import SHORT, VAES, CallRecord, Pipeline
from unified_trainer.models.pipeline.values import Place, Size, part, same, stacked

DIGIT = 1024  # indices pass through a pipeline as two digits, which float32 holds exactly
BEHIND, KNOWN = "channels behind the latents", "first latent frames"  # parts of the argument that follow from an image


@dataclass(frozen=True)
class FoundLatents:
    """Our latents are [c, t, h, w] as the VAE has them, the native ones those in the network's argument."""

    name: str  # of the argument
    native: tuple[int, ...]  # shape of one sample
    listed: bool  # whether the argument is a list of samples
    channels: Place | None  # where the argument holds the latents, if it holds other channels behind them
    known: int  # first latent frames that the network sees clean, because they follow from the image
    known_encoded: bool  # whether these are what the VAE encodes, as the first latents of a clip are
    stepped: Tensor  # place in the flattened native latents of each number that a solver step moves; -1: it has none
    shape: Shape
    order: Tensor | None  # place in the flattened native latents of each of ours; None: they are in the same order
    inverse: Tensor | None  # place in our flattened latents of each native one
    scale: Tensor  # the VAE decodes scale x latents + shift, [c, 1, 1, 1] or [c, t, h, w]
    shift: Tensor
    flat: bool  # whether the VAE takes images [b, c, h, w]
    decode: Mapping[str, Any]  # further arguments of its decode

    @classmethod
    def of(cls, pipeline: Pipeline, size: Size, *samples: Tensor) -> list[Self]:
        """Return what shows where solver steps return zeros, ones and the two digits of indices as each of `samples`.

        The samples are the latents of the video, and those of its sound if the pipeline makes one.
        """
        indices = [torch.arange(sample.numel()).reshape(sample.shape) for sample in samples]
        calls = list[CallRecord]()
        for digit in (torch.zeros_like, torch.ones_like, lambda index: index % DIGIT, lambda index: index // DIGIT):
            numbers = [digit(index).to(sample) for index, sample in zip(indices, samples, strict=True)]
            calls.append(pipeline.call([SHORT], size, latents=numbers))
            if len(calls[-1].decoded) < len(samples):
                raise pipeline.refuse("decodes its latents by something else than the decode of its VAE")
            if len(calls) == 1:
                _check_size(pipeline, size, calls[0])
        found = list[Self]()
        for sample in samples:
            found.append(cls._of(pipeline, calls, sample, found))
        return found

    @classmethod
    def _of(cls, pipeline: Pipeline, calls: list[CallRecord], sample: Tensor, others: list[Self]) -> Self:
        """Return what the four calls show of a sample, whose argument is not that of the others."""
        place = len(others)
        decode = _words(pipeline.pipe.components[VAES[place]], *calls[0].decoded[place])
        decoded = [call.decoded[place][0].double() for call in calls]
        if flat := decoded[0].dim() == 4:
            decoded = [raw[:, :, None] for raw in decoded]
        name, given = _argument(pipeline, [call.inputs[-1] for call in calls], sample, {one.name for one in others})
        moved = given[1] - given[0] == 1
        channels = _channels(pipeline, name, moved)
        if channels:
            given, moved = given.narrow(channels[0] + 1, 0, channels[1]), moved.narrow(channels[0], 0, channels[1])
        digits = (given[2] + DIGIT * given[3])[moved].round().long()
        stepped = torch.full([sample.numel()], -1)
        stepped[digits] = moved.flatten().nonzero()[:, 0]
        known, order, scale, shift = _affine(pipeline, torch.cat(decoded), stepped, given[0].flatten().double())
        first, in_order = decoded[0][:, :, :known], torch.equal(order.flatten(), torch.arange(order.numel()))
        return cls(
            name=name,
            native=tuple(moved.shape[1:]),
            listed=not isinstance(calls[0].inputs[-1][name], Tensor),
            channels=channels,
            known=known,
            known_encoded=known > 0 and any(x.shape == first.shape and same(x, first) for x in calls[-1].encoded),
            stepped=stepped,
            shape=(order.shape[0], order.shape[1], order.shape[2], order.shape[3]),
            order=None if in_order else order.flatten(),
            inverse=None if in_order else order.flatten().argsort(),
            scale=scale.float(),
            shift=shift.float(),
            flat=flat,
            decode=decode,
        )

    def of_step(self, native: Tensor) -> Tensor:
        """Return the numbers of one sample that a solver step moves, in its order."""
        return native.flatten()[self.stepped[self.stepped >= 0]]

    def of_given(self, step: Tensor) -> Tensor:
        """Return the same numbers of what a solver step is given."""
        return step.flatten()[self.stepped.to(step.device) >= 0]

    def of_argument(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the native latents among the network's arguments."""
        x = stacked(inputs[self.name])
        return part(x, self.channels)

    def ours(self, native: Tensor) -> Latents:
        """Return native latents as ours."""
        x = native if self.order is None else native.flatten(1)[:, self.order]
        return x.reshape(-1, *self.shape)

    def packed(self, ours: Latents) -> Tensor:
        """Return our latents as native ones."""
        x = ours if self.inverse is None else ours.flatten(1)[:, self.inverse]
        return x.reshape(-1, *self.native)

    def raw(self, ours: Latents) -> Latents:
        """Return our latents in the units of the VAE."""
        return ours * self.scale.to(ours.device) + self.shift.to(ours.device)

    def apart(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the network's arguments with BEHIND and KNOWN, the parts of the latents' one, in place of it."""
        others = {name: value for name, value in inputs.items() if name != self.name}
        if self.channels:
            others[BEHIND] = stacked(inputs[self.name]).tensor_split([self.channels[1]], self.channels[0])[1]
        if self.known:
            others[KNOWN] = self.ours(self.of_argument(inputs))[:, :, : self.known]
        return others


def _check_size(pipeline: Pipeline, size: Size, seen: CallRecord) -> None:
    """Raise ProbeError if the VAE makes another size."""
    z, inputs, named = seen.decoded[0]
    made = stacked(pipeline.pipe.components["vae"].decode(z, *inputs, **named | {"return_dict": False})[0])
    if (own := (made.shape[2] if made.dim() == 5 else 1, *made.shape[-2:])) != size:
        flags = zip(("frames", "height", "width"), own, size, strict=True)
        given = ", ".join(f"video.{name} {right} in place of {wrong}" for name, right, wrong in flags if right != wrong)
        raise pipeline.refuse(f"makes no videos of this size; it takes {given}")


def _words(vae: nn.Module, z: Tensor, inputs: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a VAE's decode beside the latents."""
    signature = inspect.signature(vae.decode)
    words = list(signature.parameters)[1:]
    bound = signature.bind(z, *inputs, **named).arguments
    return {name: bound[name] for name in words if name in bound and name not in ("return_dict", "generator")}


def _argument(pipeline: Pipeline, inputs: list[dict[str, Any]], sample: Tensor, others: set[str]) -> tuple[str, Tensor]:
    """Return the name and the four values of the argument in which the numbers of the solver steps are."""
    for name, value in inputs[0].items():
        if name in others:
            continue
        parts = value if isinstance(value, (list, tuple)) else [value]
        if all(isinstance(x, Tensor) and x.is_floating_point() and x.shape == parts[0].shape for x in parts) and parts:
            given = torch.stack([stacked(held[name]) for held in inputs])
            if bool((given[1] - given[0] == 1).any()):
                return name, given
    shapes = ", ".join(f"{name} {[*value.shape]}" for name, value in inputs[0].items() if isinstance(value, Tensor))
    raise pipeline.refuse(f"gives its network no argument that holds its latents {[*sample.shape]}: {shapes}")


def _channels(pipeline: Pipeline, name: str, moved: Tensor) -> Place | None:
    """Return the place of a block of numbers that solver steps move, which ends before its argument does."""
    places = moved.nonzero()
    begins, ends = places.amin(0), places.amax(0) + 1
    behind = [(dim, int(end)) for dim, end in enumerate(ends) if end < moved.shape[dim]]
    if len(behind) > 1 or len(places) != int((ends - begins).prod()):
        raise pipeline.refuse(f"gives its network {name} {[*moved.shape]}, of which its latents are no block")
    return behind[0] if behind else None


def _affine(pipeline: Pipeline, raw: Tensor, stepped: Tensor, zeros: Tensor) -> tuple[int, Tensor, Tensor, Tensor]:
    """Return known frames, order, scale and shift from what the VAE is given, [4, c, t, h, w], of the four calls.

    Known frames are those that no solver step moves. Their order is that of the frames behind them.
    """
    shift, scale = raw[0], raw[1] - raw[0]
    known = int((scale == 0).all(0).flatten(1).all(1).sum())
    low, high = (((x - shift) / scale)[:, known:] for x in raw[2:])
    index = torch.where(scale[:, known:] == 0, -1, low.round() + DIGIT * high.round()).long()
    fits = bool(((index >= 0) & (index < len(stepped))).all())
    order = stepped[index] if fits else index
    if known and fits:
        rest = torch.ones(len(zeros), dtype=torch.bool)
        rest[order.flatten()] = False
        like = order[:, :known].flatten().argsort().argsort()
        places = rest.nonzero()[:, 0]
        fits = len(places) == len(like)
        order = torch.cat([places[like].reshape(order[:, :known].shape), order], 1) if fits else order
    if not fits or order.numel() != len(zeros) or len(order.unique()) != order.numel():
        raise pipeline.refuse(
            f"gives its VAE {raw[0].numel()} numbers of {len(zeros)} latents, which are no reordering of them"
        )
    of_channel = [x[:, known : known + 1, :1, :1] for x in (scale, shift)]
    if all(same(x[:, known:], y.expand_as(x[:, known:])) for x, y in zip((scale, shift), of_channel, strict=True)):
        scale, shift = of_channel  # others have a number for each place of a patch, as FLUX.2
    if known and not same(raw[0][:, :known], (zeros[order] * scale + shift)[:, :known]):
        raise pipeline.refuse("changes the latents of its image before it decodes them")
    return known, order, scale, shift
