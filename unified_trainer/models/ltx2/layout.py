"""Latents of a video and of its sound in one tensor [b, c, t, h, w], whose last latent frames make room for the sound.

A sample's elements in their order are the video's latents [c, frames, h, w], those of the sound [c / 16, length, 16],
and a rest that fills the last frame. Data has zeros there, so that its velocity is known: x_t / sigma.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor, cat

from unified_trainer.basics.types import Latents
from unified_trainer.models.base import Shape

TIME, SPACE = 8, 32  # frames of a latent of the video, and pixels along its sides
FPS = 24.0  # frames per second: the frame_rate of LTX2Pipeline, in which the positions of tokens are seconds
SAMPLE_RATE, HOP, SOUND_TIME = 16000, 160, 4  # of the sound: samples per second, of a mel frame, mel frames of a latent
BANDS = 16  # of a latent of the sound: a quarter of the 64 bands of a mel spectrogram


class Parts(NamedTuple):
    """The parts of latents."""

    video: Float[Tensor, "b c frames h w"]
    sound: Float[Tensor, "b length c"]  # tokens, whose channels are those of the audio VAE times the bands
    rest: Float[Tensor, "b n"]


def sound_length(frames: int) -> int:
    """Return the latents of the sound of a video of so many latent frames, as LTX2Pipeline rounds them."""
    return round(((frames - 1) * TIME + 1) / FPS * (SAMPLE_RATE / HOP / float(SOUND_TIME)))


def with_sound(video: Shape) -> Shape:
    """Return the shape of the latents of a video and its sound, from that of the video's latents."""
    channels, frames, height, width = video
    return channels, frames + math.ceil(sound_length(frames) / (height * width)), height, width


def of_video(latents: Shape) -> Shape:
    """Return the shape of the video's latents: that of the most frames whose sound has room; `with_sound` undone."""
    channels, total, height, width = latents
    frames = 1
    while with_sound((channels, frames + 1, height, width))[1] <= total:
        frames += 1
    return channels, frames, height, width


def parts(latents: Latents) -> Parts:
    """Cut latents into video, sound and rest; where torch can, they share memory."""
    _, channels, total, height, width = latents.shape
    shape = of_video((channels, total, height, width))
    length, elements = sound_length(shape[1]), latents.flatten(1)
    seen, heard = math.prod(shape), channels * length
    video, sound, rest = elements.split([seen, heard, elements.shape[1] - seen - heard], 1)
    bands = sound.unflatten(1, (channels // BANDS, length, BANDS))
    return Parts(video.unflatten(1, shape), bands.transpose(1, 2).flatten(2), rest)


def joined(held: Parts, shape: Sequence[int]) -> Latents:
    """Return the latents [b, *shape] that `parts` cuts into these."""
    bands = held.sound.unflatten(2, (-1, BANDS)).transpose(1, 2)
    return cat([held.video.flatten(1), bands.flatten(1), held.rest], 1).unflatten(1, shape)
