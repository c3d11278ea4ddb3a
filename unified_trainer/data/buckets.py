"""Buckets: the sizes that the clips of one run have. Each clip goes to the bucket that suits it."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.data.clips import Clips, DataConfig, VideoConfig

Sizes = tuple[VideoConfig, ...]
SIZE = re.compile(r"x".join([r"([1-9]\d{0,4})"] * 3), re.ASCII)


def sizes_of(data: DataConfig, video: VideoConfig) -> Sizes:
    """Return the sizes of data.buckets, or that of video.* alone; UserError for a text that is no size."""
    found = [(text, SIZE.fullmatch(text)) for text in data.buckets]
    if wrong := [text for text, size in found if size is None]:
        raise UserError(f"data.buckets: {wrong[0]!r} is no size: write FRAMESxHEIGHTxWIDTH, such as 49x480x832")
    made = (VideoConfig(int(size[1]), int(size[2]), int(size[3]), video.fps) for _, size in found if size)
    return tuple(made) or (video,)


def fitting(sizes: Sequence[VideoConfig], frames: int, height: float, width: float) -> VideoConfig | None:
    """Return the bucket of a clip: of those whose frames it fills, the one of the nearest aspect ratio.

    Of equal ones it is that with most frames, and then the largest that does not enlarge the clip, or the smallest.
    """

    def rank(size: VideoConfig) -> tuple[float, ...]:
        area = size.height * size.width * (1 if size.height > height or size.width > width else -1)
        return round(abs(math.log(size.width * height / (size.height * width))), 9), -size.frames, area > 0, area

    return min((size for size in sizes if size.frames <= frames), key=rank, default=None)


@dataclass(frozen=True)
class BucketClips(Clips):
    """A source of captions with clean latents of several shapes in memory."""

    encoded: Sequence[Float[Tensor, "_ _ _ _"]]

    def latents(self, indices: list[int]) -> Float[Tensor, "b c t h w"]:
        return torch.stack([self.encoded[clip] for clip in self._clips(indices)])
