"""Clips to learn from: the tiny world's, rendered and encoded when the run starts."""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.data.tiny_world import FRAMES, PHRASINGS, SIZE, TRAINING, draw_clip, render
from unified_trainer.errors import UserError
from unified_trainer.models.base import Codec

ENCODE_BATCH = 32


@dataclass(frozen=True)
class VideoConfig:
    frames: int = 17  # pixel frames, 4k + 1 for Wan
    height: int = 64  # pixels
    width: int = 64  # pixels


@dataclass(frozen=True)
class DataConfig:
    path: Path | None = None  # folder of FastVideo t2v parquet files to learn from; clips of the tiny world by default
    num_clips: int = 512  # rendered clips of the tiny world, if no path is given


@dataclass(frozen=True)
class Clips:
    """A source of captions with clean latents."""

    prompts: tuple[str, ...]
    encoded: Float[Tensor, "n c t h w"]

    def __len__(self) -> int:
        return len(self.prompts)

    def prompt(self, index: int) -> str:
        return self.prompts[index]

    def latents(self, indices: list[int]) -> Float[Tensor, "b c t h w"]:
        return self.encoded[indices]


def check_tiny_clips(config: DataConfig, video: VideoConfig) -> None:
    """Raise UserError for a number or size of clips that the tiny world does not have."""
    if (video.frames, video.height, video.width) != (FRAMES, SIZE, SIZE):
        raise UserError(
            f"the tiny world's clips have {FRAMES} frames of {SIZE} x {SIZE} pixels, but video.frames, height and width "
            f"are {video.frames}, {video.height} and {video.width}: change them, or set data.path"
        )
    if config.num_clips < 1:
        raise UserError(f"data.num_clips must be at least 1, not {config.num_clips}")


def render_clips(config: DataConfig, codec: Codec, video: VideoConfig, seed: int) -> Clips:
    """Training subjects in turn, phrasings at random, encoded by the codec of the run."""
    generator = torch.Generator().manual_seed(seed)
    subjects = [TRAINING[i % len(TRAINING)] for i in range(config.num_clips)]
    drawn = [draw_clip(subject, generator) for subject in subjects]
    phrasings = torch.randint(len(PHRASINGS), (config.num_clips,), generator=generator).tolist()
    captions = tuple(subject.caption(phrasing) for subject, phrasing in zip(subjects, phrasings, strict=True))
    parts = [drawn[i : i + ENCODE_BATCH] for i in range(0, len(drawn), ENCODE_BATCH)]
    return Clips(captions, torch.cat([codec.encode(render(part)) for part in parts]))
