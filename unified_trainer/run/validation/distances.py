"""Frechet distances of a validation: between features of its samples and of real clips, FVD among them."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import check_file
from unified_trainer.basics.plugins import agreed_bytes
from unified_trainer.basics.requests import Request
from unified_trainer.basics.types import Video
from unified_trainer.data.captioned import find_videos
from unified_trainer.data.clips import VideoConfig
from unified_trainer.data.tiny_world import is_tiny_world, real_clip, render
from unified_trainer.data.tiny_world_features import world_features
from unified_trainer.data.video_reader import read_video, to_video
from unified_trainer.models.base import Codec
from unified_trainer.numerics.frechet import frame_features, frechet_distance
from unified_trainer.rewards.base import Features
from unified_trainer.run.settings.config import ValidationConfig

FEATURES, REAL = "features/", "real features/"  # before the name of a distance, in the columns of a validation
FRECHET, FVD, WORLD_FRECHET = "frechet", "fvd", "world/frechet"
CLIPS, NETWORK = "--validation.real-clips", "--validation.i3d"

VideoFeatures = Callable[[Video], Float[Tensor, "b k d"]]  # k rows of each video


class Distances:
    """Features of the samples of a validation and of as many real clips, which its distances compare."""

    def __init__(self, features: Mapping[str, VideoFeatures], real: Callable[[range], Video]) -> None:
        """`features` are by the name of the distance; `real` returns the real clips of some samples."""
        self._features, self._real = features, real
        self._of_real: dict[range, dict[str, Tensor]] = {}

    def columns(self, video: Video, samples: range) -> dict[str, Tensor]:
        """Return the features of samples and of their real clips; those of the clips are computed on first use."""
        if samples not in self._of_real:
            clips = self._real(samples)
            self._of_real[samples] = {f"{REAL}{name}": of(clips) for name, of in self._features.items()}
        return {f"{FEATURES}{name}": of(video) for name, of in self._features.items()} | self._of_real[samples]


def distances(columns: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the Frechet distances by name, of the columns of all samples."""
    real = with_prefix(columns, REAL)
    return {
        name: frechet_distance(rows.flatten(0, 1), real[name].flatten(0, 1))
        for name, rows in with_prefix(columns, FEATURES).items()
    }


def with_prefix(columns: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the columns whose names begin with a prefix, by the rest of the name."""
    return {name.removeprefix(prefix): rows for name, rows in columns.items() if name.startswith(prefix)}


class I3D:
    """Maps videos to the features that FVD compares (arXiv:1812.01717), a row for each video.

    The network is a TorchScript file with the interface of StyleGAN-V's i3d_torchscript.pt (arXiv:2112.14683), which is
    that of most published distances: it takes pixels from 0 to 255, and scales and resizes them itself.
    """

    def __init__(self, network: torch.jit.ScriptModule, device: torch.device, batch: int) -> None:
        self._network, self._device, self._batch = network, device, batch

    @classmethod
    def load(cls, file: Path, key: str, device: torch.device, shape: tuple[int, int, int], batch: int) -> "I3D":
        """Load a file and try it on a black video; UserError, naming `key`, unless it gives features.

        `shape` is frames, height and width; `batch` videos are seen at a time.
        """
        content = BytesIO(agreed_bytes(str(file), key))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # the published file is in no newer format
                network = torch.jit.load(content, map_location=device).eval()
            loaded = cls(network, device, batch)
            seen: Any = loaded(torch.zeros(1, 3, *shape))
        except (torch.jit.Error, RuntimeError, ValueError, OSError) as error:
            size, reason = " x ".join(map(str, shape)), " ".join(str(error).strip().splitlines()[-1:])
            raise UserError(
                f"{key} {file} gives no features of {size} pixels ({reason}): it must be I3D as "
                "TorchScript, such as i3d_torchscript.pt of StyleGAN-V, which needs about ten frames"
            ) from error
        if not isinstance(seen, Tensor) or seen.ndim != 3:
            raise UserError(f"{key} {file} gives no vector of each video: it must be I3D as TorchScript")
        return loaded

    @torch.no_grad()
    def __call__(self, video: Video) -> Float[Tensor, "b 1 d"]:
        """Return the features of videos in [0, 1]."""
        pixels = (video.float() * 255).split(self._batch)
        of = [self._network(part.to(self._device), rescale=True, resize=True, return_features=True) for part in pixels]
        return torch.cat(of)[:, None]


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

    tiny = _tiny(video, requests)
    if not config.real_clips and not tiny:
        return None
    real = partial(read_real, config.real_clips, CLIPS, video) if config.real_clips else drawn
    named = video_features(features, config.frechet_stride, config.i3d, NETWORK, video, config.batch, device)
    named |= {WORLD_FRECHET: world_features} if tiny else {}
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
