"""The real clips of a validation, and the features that its Frechet distances compare."""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import torch

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import check_file
from unified_trainer.basics.requests import Request
from unified_trainer.basics.types import Video
from unified_trainer.data.captioned import find_videos
from unified_trainer.data.clips import VideoConfig
from unified_trainer.data.tiny_world import is_tiny_world, real_clip, render
from unified_trainer.data.video_reader import read_video, to_video
from unified_trainer.models.base import Codec
from unified_trainer.numerics.frechet import frame_features
from unified_trainer.rewards.base import Features
from unified_trainer.run.settings.config import ValidationConfig
from unified_trainer.run.validation.distances import FRECHET, FVD, Distances, VideoFeatures
from unified_trainer.run.validation.i3d import I3D

CLIPS, NETWORK = "--validation.real-clips", "--validation.i3d"


def distances_of(
    config: ValidationConfig,
    video: VideoConfig,
    codec: Codec,
    features: Features | None,
    requests: Sequence[Request],
    device: torch.device,
) -> Distances | None:
    """Return the distances that validations with videos of this size measure; None without features or real clips.

    `features` are image features, of a scorer. Real clips are those of validation.real_clips, or without it drawn for
    the captions of the tiny world, and then passed through the VAE as samples are.
    """

    def drawn(samples: range) -> Video:
        clips = [real_clip(requests[i % len(requests)].text, config.seed, i) for i in samples]
        return codec.decode(codec.encode(render(clips).to(device)))

    if not config.real_clips and not _tiny(video, requests):
        return None
    real = partial(read_real, config.real_clips, CLIPS, video) if config.real_clips else drawn
    named = video_features(features, config.frechet_stride, config.i3d, NETWORK, video, config.batch, device)
    return Distances(named, lambda samples: real(samples).to(device)) if named else None


def video_features(
    features: Features | None, stride: int, i3d: str, key: str, size: VideoConfig, batch: int, device: torch.device
) -> dict[str, VideoFeatures]:
    """Return what Frechet distances compare: image features of every `stride`-th frame, and those of an I3D file.

    `batch` frames or videos are seen at a time. `key` is the setting that names the file, for messages.
    """
    named: dict[str, VideoFeatures] = {}
    if features is not None:
        named[FRECHET] = partial(frame_features, features=features, stride=stride, batch=batch)
    if i3d:
        named[FVD] = I3D.load(Path(i3d), key, device, (size.frames, size.height, size.width), batch)
    return named


def check_distances(config: ValidationConfig, video: VideoConfig, requests: Sequence[Request]) -> None:
    """Raise UserError for real clips that cannot be read or are fewer than the samples, and for an I3D without any."""
    if config.i3d:
        check_file(Path(config.i3d), NETWORK)
        if not config.real_clips and not _tiny(video, requests):
            raise UserError(f"{NETWORK} {config.i3d} compares samples with real clips: add {CLIPS} DIR")
    if config.real_clips:
        check_real(config.real_clips, CLIPS, video, config.num_samples, "a validation")


def check_real(folder: str, key: str, size: VideoConfig, samples: int, of: str) -> None:
    """Raise UserError, naming `key`, unless a folder has as many readable videos as `of` has samples."""
    files = find_videos(Path(folder), key)
    if len(files) < samples:
        found = f"{key} {folder} holds {len(files)} videos"
        raise UserError(f"{found}, fewer than the {samples} samples of {of}: add clips, or make fewer samples")
    for file in files[:samples]:
        read_video(file, size)


def read_real(folder: str, key: str, size: VideoConfig, samples: Iterable[int]) -> Video:
    """Return the real clips of some samples: those of these numbers in a folder, counted round and round."""
    files = find_videos(Path(folder), key)
    return torch.cat([to_video(read_video(files[i % len(files)], size).frames) for i in samples])


def _tiny(video: VideoConfig, requests: Sequence[Request]) -> bool:
    return is_tiny_world((video.frames, video.height, video.width), [request.text for request in requests])
