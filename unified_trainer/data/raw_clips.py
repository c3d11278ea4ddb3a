"""Clips from video files, decoded and encoded when a run starts, for sets that fit in memory."""

from collections.abc import Sequence
from pathlib import Path

import torch

from unified_trainer.basics.requests import Image
from unified_trainer.data.captioned import PICTURES, VIDEOS, CaptionedVideo, find_videos
from unified_trainer.data.clips import Clips, VideoConfig
from unified_trainer.data.media import VideoError
from unified_trainer.data.tables import TABLES
from unified_trainer.data.video_reader import read_clips, to_video
from unified_trainer.models.base import Codec

WORKERS = 4  # threads that decode
NAMED = 8  # videos that an error names


def holds_videos(path: Path) -> bool:
    """Return whether data.path names raw videos: a table of them, or a folder with videos and no parquet files."""
    if path.is_dir():
        kinds = {file.suffix.lower() for file in path.rglob("*")}
        return ".parquet" not in kinds and not kinds.isdisjoint((*VIDEOS, *PICTURES))
    return path.suffix in TABLES and path.suffix != ".parquet"


def checked_videos(path: Path, size: VideoConfig) -> tuple[CaptionedVideo, ...]:
    """Return the videos of data.path if all are there and have captions; else VideoError as `check_videos` raises."""
    videos = find_videos(path, "data.path")
    if any(video.fault for video in videos):
        check_videos(path, size)
    return videos


def check_videos(path: Path, size: VideoConfig) -> None:
    """Decode the videos of data.path; VideoError names those that are not there, have no caption or are too short."""
    clips = read_clips(find_videos(path, "data.path"), size, WORKERS)
    _refuse(path, [str(clip) for _, clip in clips if isinstance(clip, VideoError)])


def encode_videos(path: Path, codec: Codec, size: VideoConfig, *, first_frames: bool = False) -> Clips:
    """Decode and encode the first clip of each video; VideoError names those that cannot be used.

    With `first_frames` the first frames of the clips are condition images.
    """
    encoded, faults, images = [], [], list[Image]()
    videos = checked_videos(path, size)
    for _, clip in read_clips(videos, size, WORKERS):
        if isinstance(clip, VideoError):
            faults.append(str(clip))
        elif not faults:
            encoded.append(codec.encode(to_video(clip.frames)).cpu())
            images += [Image.of(clip.frames[0].copy())] if first_frames else []
    _refuse(path, faults)
    return Clips(tuple(video.caption for video in videos), torch.cat(encoded), None, tuple(images))


def _refuse(path: Path, faults: Sequence[str]) -> None:
    if faults:
        more = f"; and {len(faults) - NAMED} more" if len(faults) > NAMED else ""
        raise VideoError(f"data.path {path}: {'; '.join(faults[:NAMED])}{more}")
