"""Clips from video files, decoded and encoded when a run starts, for sets that fit in memory."""

from pathlib import Path

import torch

from unified_trainer.data.captioned import VIDEOS, CaptionedVideo, find_videos
from unified_trainer.data.clips import Clips, VideoConfig
from unified_trainer.data.tables import TABLES
from unified_trainer.data.video_reader import VideoError, read_clips, to_video
from unified_trainer.models.base import Codec

WORKERS = 4  # threads that decode


def holds_videos(path: Path) -> bool:
    """Return whether data.path names raw videos: a table of them, or a folder with videos and no parquet files."""
    if path.is_dir():
        kinds = {file.suffix.lower() for file in path.rglob("*")}
        return ".parquet" not in kinds and not kinds.isdisjoint(VIDEOS)
    return path.suffix in TABLES and path.suffix != ".parquet"


def checked_videos(path: Path) -> tuple[CaptionedVideo, ...]:
    """Return the videos of data.path; VideoError names one that is not there or has no caption."""
    videos = find_videos(path, "data.path")
    for video in videos:
        if video.fault:
            raise VideoError(f"data.path {path}: {video.file}: {video.fault}")
    return videos


def encode_videos(path: Path, codec: Codec, size: VideoConfig) -> Clips:
    """Decode and encode the first clip of each video; VideoError names the first one that cannot be used."""
    encoded = []
    videos = checked_videos(path)
    for _, clip in read_clips(videos, size, WORKERS):
        if isinstance(clip, VideoError):
            raise VideoError(f"data.path {path}: {clip}")
        encoded.append(codec.encode(to_video(clip)).cpu())
    return Clips(tuple(video.caption for video in videos), torch.cat(encoded))
