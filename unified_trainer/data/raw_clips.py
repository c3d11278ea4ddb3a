"""Clips from video files, decoded and encoded when a run starts, for sets that fit in memory."""

from collections.abc import Sequence
from pathlib import Path

import torch

from unified_trainer.basics.requests import Image
from unified_trainer.data.buckets import BucketClips, Sizes
from unified_trainer.data.captioned import MEDIA, CaptionedVideo, Columns, find_videos, is_encoded, lists_videos
from unified_trainer.data.clips import Clips, VideoConfig
from unified_trainer.data.folders import files_below
from unified_trainer.data.media import Clip, VideoError
from unified_trainer.data.tables import TABLES
from unified_trainer.data.video_reader import SMALL, read_clips, read_condition, to_video
from unified_trainer.models.base import Codec

WORKERS = 4  # threads that decode
NAMED = 8  # videos that an error names


def holds_videos(path: Path) -> bool:
    """Return whether data.path names raw videos, in any layout, and no parquet files of encoded ones."""
    files = files_below(path) if path.is_dir() else [path]
    if any(file.suffix == ".parquet" and is_encoded(file) for file in files):
        return False
    if path.is_dir():
        return any(file.suffix.lower() in MEDIA or lists_videos(file) for file in files)
    return path.suffix in (*TABLES, ".tar")


def checked_videos(path: Path, size: VideoConfig | Sizes, columns: Columns = ()) -> tuple[CaptionedVideo, ...]:
    """Return the videos of data.path if all are there and have captions; else VideoError as `check_videos` raises."""
    videos = find_videos(path, "data.path", columns=columns)
    if any(video.fault for video in videos):
        check_videos(path, size, columns)
    return videos


def check_videos(path: Path, size: VideoConfig | Sizes, columns: Columns = ()) -> None:
    """Decode the videos of data.path; VideoError names those that are not there, have no caption or are too short."""
    clips = read_clips(find_videos(path, "data.path", columns=columns), size, WORKERS)
    _refuse(path, [str(clip) for _, clip in clips if isinstance(clip, VideoError)])


def encode_videos(
    path: Path, codec: Codec, size: VideoConfig | Sizes, columns: Columns = (), *, first_frames: bool = False
) -> Clips:
    """Decode and encode a clip of each video; VideoError names those that cannot be used.

    With `first_frames` the condition images of a clip are those that its row names, or else its first frame.
    """
    encoded, faults, images = [], [], list[tuple[Image, ...]]()
    videos = checked_videos(path, size, columns)
    for video, clip in read_clips(videos, size, WORKERS):
        if isinstance(clip, VideoError):
            faults.append(str(clip))
        elif not faults:
            encoded.append(codec.encode(to_video(clip.frames)).cpu())
            images += [_conditions(video, clip, size)] if first_frames else []
    _refuse(path, faults)
    clip_of = tuple(number for number, video in enumerate(videos) for _ in video.captions)
    captions = tuple(caption for video in videos for caption in video.captions)
    actions = tuple(video.actions for video in videos)
    if len({x.shape for x in encoded}) > 1:
        return BucketClips(captions, [x[0] for x in encoded], None, tuple(images), actions, clip_of)
    return Clips(captions, torch.cat(encoded), None, tuple(images), actions, clip_of)


def _conditions(video: CaptionedVideo, clip: Clip, size: VideoConfig | Sizes) -> tuple[Image, ...]:
    if not video.conditions:
        return (Image.of(clip.frames[0].copy()),)
    fps = (size if isinstance(size, VideoConfig) else size[0]).fps
    named = tuple(read_condition(file, f"data.path: the condition of {video.name}:", fps) for file in video.conditions)
    for image in named:
        image.frames(len(clip.frames), *SMALL)
    return named


def _refuse(path: Path, faults: Sequence[str]) -> None:
    if faults:
        more = f"; and {len(faults) - NAMED} more" if len(faults) > NAMED else ""
        raise VideoError(f"data.path {path}: {'; '.join(faults[:NAMED])}{more}")
