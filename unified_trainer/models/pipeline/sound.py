"""Latents of a sound in one tensor with those of its video [b, c, t, h, w] (docs/decisions/0018-sound-in-latents.md).

A sample's elements in their order are the video's latents [c, frames, h, w], those of the sound as its VAE has them,
and a rest that fills the last latent frame. Data has zeros there, so that its velocity is known: x_t / sigma.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor, cat

from unified_trainer.basics.types import Latents
from unified_trainer.models.base import Shape
from unified_trainer.models.pipeline.latents import FoundLatents
from unified_trainer.models.pipeline.values import Place


class Parts(NamedTuple):
    """The parts of latents; where torch can, they share memory."""

    video: Float[Tensor, "b c frames h w"]
    sound: Float[Tensor, "b channels 1 length bands"]
    rest: Float[Tensor, "b n"]


@dataclass(frozen=True)
class FoundSound:
    """The second argument of a network with latents, whose velocity is the second of its outputs."""

    latents: FoundLatents
    sign: float  # velocity = sign x output
    output: Place | None  # the output's channels that are the velocity, if it has others
    video: Shape

    @property
    def shape(self) -> Shape:
        """The shape of both: as many latent frames behind those of the video as the sound takes."""
        channels, frames, height, width = self.video
        return channels, frames + math.ceil(math.prod(self.latents.shape) / (channels * height * width)), height, width

    def parts(self, latents: Latents) -> Parts:
        """Cut latents of both."""
        elements, seen, heard = latents.flatten(1), math.prod(self.video), math.prod(self.latents.shape)
        video, sound, rest = elements.split([seen, heard, elements.shape[1] - seen - heard], 1)
        return Parts(video.unflatten(1, self.video), sound.unflatten(1, self.latents.shape), rest)

    def joined(self, parts: Parts) -> Latents:
        """Return the latents that are cut into these parts."""
        return cat([part.flatten(1) for part in parts], 1).unflatten(1, self.shape)
