"""Clips of the tiny world to train on, rendered and encoded when the run starts."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.actions import NO_ACTIONS, Actions
from unified_trainer.basics.effects import READS, Text
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Count, Frames, FramesPerSecond, Pixels, above
from unified_trainer.basics.requests import Image, Request
from unified_trainer.basics.types import Video, take_rows
from unified_trainer.data.tiny_world import FRAMES, PHRASINGS, SIZE, TRAINING, draw_clip, render
from unified_trainer.models.base import Codec

ENCODE_BATCH = 32


@dataclass(frozen=True)
class VideoConfig:
    """The size of the videos that are trained on and generated."""

    frames: Frames = 81
    """Pixel frames; a VAE that compresses time by 4 takes 4k + 1. An image has 1."""
    height: Pixels = 480
    """Height in pixels."""
    width: Pixels = 832
    """Width in pixels."""
    fps: FramesPerSecond = 16.0
    """Frames per second of written mp4 files, and at which videos to train on are sampled; Wan's videos have 16."""


@dataclass(frozen=True)
class DataConfig:
    """The clips to train on, for methods that need some, or the stored trajectories of a teacher."""

    path: Annotated[str, READS] = ""
    """Parquet file of encoded clips, or a folder of such files (FastVideo's kinds t2v and i2v); or a small set of
    videos or images: a folder with x.txt beside x.mp4 or x.png, a table with columns path and caption, or another
    layout of docs/data.md; "tiny": clips of the tiny world. For ode_init, parquet files of trajectories (kind ode),
    which take the place of the teacher."""
    columns: tuple[Text, ...] = ()
    """Columns of a table of videos: that of their paths, or of the videos themselves, and those of captions, of which
    each epoch draws one; by default the first of each that docs/data.md names."""
    rejected: Annotated[str, READS] = ""
    """Parquet file or folder with the clips that people or a reward preferred less: row by row the rejected one for the
    clip of data.path with the same id and caption. If path is tiny, clips of another subject."""
    buckets: tuple[Text, ...] = ()
    """Sizes of the clips of one run, each FRAMESxHEIGHTxWIDTH, such as 49x480x832 49x832x480. A clip goes to the one
    that suits its aspect ratio and length, and a batch has clips of one. video.* is then the size of validations."""
    first_frame: bool = False
    """Condition each clip on its first frame, where the student can do with and without an image (Wan2.2 TI2V). A
    student that needs an image always gets it."""
    shuffle: bool = True
    """Take prompts and clips in a new random order in each epoch, and otherwise always in the order of the file."""
    num_clips: Count = 512
    """Number of rendered clips, if path is tiny."""
    window_gib: Annotated[float, above(0, 1e6)] = 16.0
    """CPU memory for the row groups that batches are read from at a time, in GiB over all ranks. Of a larger window,
    more row groups are mixed in a batch, and more ranks read row groups of their own."""


@dataclass(frozen=True)
class Clips:
    """A source of captions with clean latents in memory; a clip may have the captions of several rows."""

    prompts: tuple[str, ...]
    encoded: Float[Tensor, "n c t h w"]
    less_preferred: Float[Tensor, "n c t h w"] | None = None  # of a source of pairs
    images: tuple[tuple[Image, ...], ...] = ()  # condition images of the clips, where they have some
    actions: tuple[Actions, ...] = ()  # of the clips, where they have some
    clip_of: tuple[int, ...] = ()  # the clip of each row; by default that of the row's own number

    def __len__(self) -> int:
        return len(self.prompts)

    def request(self, index: int) -> Request:
        """Return the caption of a row, its condition images and its actions."""
        clip = self._clips([index])[0]
        actions = self.actions[clip] if self.actions else NO_ACTIONS
        return Request(self.prompts[index], self.images[clip] if self.images else (), actions=actions)

    def latents(self, indices: list[int]) -> Float[Tensor, "b c t h w"]:
        """Return the normalised latents of these rows."""
        return take_rows(self.encoded, self._clips(indices))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of the latents of each row."""
        return tuple(tuple(self.encoded[clip].shape) for clip in self._clips([*range(len(self))]))

    def rejected(self, indices: list[int]) -> Float[Tensor, "b c t h w"] | None:
        """Return the normalised latents of the clips that are preferred less; None for single clips."""
        return None if self.less_preferred is None else take_rows(self.less_preferred, indices)

    def _clips(self, indices: list[int]) -> list[int]:
        return [self.clip_of[index] for index in indices] if self.clip_of else indices


def check_tiny_clips(video: VideoConfig) -> None:
    """Raise UserError for a size of clips that the tiny world does not have."""
    if (video.frames, video.height, video.width) != (FRAMES, SIZE, SIZE):
        raise UserError(
            f"the tiny world's clips have {FRAMES} frames of {SIZE} x {SIZE} pixels, but video.frames, height and "
            f"width are {video.frames}, {video.height} and {video.width}: change them, or set data.path"
        )


def render_clips(
    config: DataConfig,
    codec: Codec,
    video: VideoConfig,
    seed: int,
    *,
    pairs: bool = False,
    first_frames: bool = False,
) -> Clips:
    """Render clips of the training subjects in turn, with random phrasings, and encode them.

    With `pairs` each clip has a rejected one: that of the next row, whose subject its caption does not name. With
    `first_frames` their first frames are condition images.
    """
    generator = torch.Generator().manual_seed(seed)
    subjects = [TRAINING[i % len(TRAINING)] for i in range(config.num_clips)]
    drawn = [draw_clip(subject, generator) for subject in subjects]
    phrasings = torch.randint(len(PHRASINGS), (config.num_clips,), generator=generator).tolist()
    captions = tuple(subject.caption(phrasing) for subject, phrasing in zip(subjects, phrasings, strict=True))
    parts = [drawn[i : i + ENCODE_BATCH] for i in range(0, len(drawn), ENCODE_BATCH)]
    encoded = torch.cat([codec.encode(render(part)) for part in parts])
    shown = parts if first_frames else []
    images = tuple((Image.of(frame),) for part in shown for frame in _first_frames(render(part)))
    return Clips(captions, encoded, encoded.roll(-1, 0) if pairs else None, images)


def _first_frames(videos: Video) -> list[np.ndarray]:
    from unified_trainer.data.video_files import to_uint8  # needs av, which settings do not

    return [frames[0] for frames in to_uint8(videos[:, :, :1])]
