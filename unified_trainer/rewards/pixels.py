"""Closed-form measures of a video's pixels: scorers without weights, and statistics that reward hacking moves."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool3d, avg_pool3d

from unified_trainer.basics.types import PerSample, Video
from unified_trainer.numerics.advantages import Ids, groups
from unified_trainer.rewards.base import ScorerKind, check_no_weights

LUMA = (0.2126, 0.7152, 0.0722)  # of red, green, blue (ITU-R BT.709)
DARK = 0.05  # luma below which a pixel counts as dark
EDGE = 0.1  # change of luma from one pixel to the next that counts as an edge
CELL = 8  # pixels, the side of the cells that motion smoothness averages over
THUMBNAIL = (3, 8, 8)  # frames, height and width of the thumbnails that diversity compares

Luma = Float[Tensor, "b frames height width"]
Images = Float[Tensor, "b 3 height width"]


def luma(video: Video) -> Luma:
    """Compute the luma of every pixel (ITU-R BT.709)."""
    weights = torch.tensor(LUMA, dtype=video.dtype).to(video.device, non_blocking=True)
    return torch.einsum("bcthw,c->bthw", video, weights)


def sharpness(video: Video) -> PerSample:
    """Compute the standard deviation of luma's Laplacian, averaged over frames (Pech-Pacheco et al., ICPR 2000).

    The Laplacian has 4 neighbors. The measure rises with detail and with noise: alone it is easily hacked.
    """
    y = luma(video)
    middle = y[..., 1:-1, 1:-1]
    around = y[..., :-2, 1:-1] + y[..., 2:, 1:-1] + y[..., 1:-1, :-2] + y[..., 1:-1, 2:]
    return (around - 4 * middle).flatten(2).var(-1, correction=0).clamp(min=1e-12).sqrt().mean(1)


def motion_smoothness(video: Video) -> PerSample:
    """Compute 1 - sum |a - 2 b + c| / sum (|a - b| + |b - c|) over adjacent frames a, b, c of cells; in [0, 1].

    The numerator is the error of linear interpolation from both neighbors: VBench's motion smoothness
    (arXiv:2311.17982) without its network. A clip without motion has 1, so read it with `motion_energy`. Raise
    ValueError for less than three frames.
    """
    _needs(3, video, "motion_smoothness")
    frames = torch.nn.functional.avg_pool2d(video.movedim(2, 1).flatten(0, 1), min(CELL, *video.shape[3:]))
    small = frames.unflatten(0, (len(video), video.shape[2])).movedim(1, 2)
    step = small.diff(dim=2)
    before, after = step[:, :, :-1].flatten(1), step[:, :, 1:].flatten(1)
    bend = (after - before).abs().sum(1)
    return 1 - bend / (before.abs() + after.abs()).sum(1).clamp(min=1e-6)


def saturation(video: Video) -> PerSample:
    """Compute the mean of each pixel's largest minus smallest channel: unlike HSV's ratio, small in dark pixels."""
    return (video.amax(1) - video.amin(1)).flatten(1).mean(1)


def dark_share(video: Video) -> PerSample:
    """Compute the share of pixels with luma below 0.05."""
    return _dark_share(luma(video))


def _dark_share(y: Luma) -> PerSample:
    return (y < DARK).float().flatten(1).mean(1)


def edge_density(video: Video) -> PerSample:
    """Compute the share of pixels whose luma gradient (forward differences, right and below) exceeds 0.1."""
    return _edge_density(luma(video))


def _edge_density(y: Luma) -> PerSample:
    right, below = y[..., :-1, 1:] - y[..., :-1, :-1], y[..., 1:, :-1] - y[..., :-1, :-1]
    return (torch.hypot(right, below) > EDGE).float().flatten(1).mean(1)


def motion_energy(video: Video) -> PerSample:
    """Compute the mean absolute change of luma between frames; raise ValueError for a single frame."""
    _needs(2, video, "motion_energy")
    return _motion_energy(luma(video))


def _motion_energy(y: Luma) -> PerSample:
    return y.diff(dim=1).abs().flatten(1).mean(1)


def temporal_flickering(video: Video) -> PerSample:
    """Compute 1 - mean |a - b| over adjacent frames a, b: VBench's measure of that name (arXiv:2311.17982).

    A clip without motion has 1: VBench measures videos of still scenes alone. Raise ValueError for a single frame.
    """
    _needs(2, video, "temporal_flickering")
    return 1 - video.diff(dim=2).abs().flatten(1).mean(1)


def first_frame_likeness(video: Video, images: Images | None = None) -> PerSample:
    """Compute 1 - mean |x - image| over the cells of all later frames, x, and of the condition image; in [0, 1].

    Without an image, the first frame is compared. A clip without motion has 1, so weigh it with `motion_energy`. Raise
    ValueError for less than two frames.
    """
    _needs(2, video, "first_frame_likeness")
    cell = (1, min(CELL, video.shape[3]), min(CELL, video.shape[4]))
    small = avg_pool3d(video, cell)
    first = small[:, :, :1] if images is None else avg_pool3d(images.to(video)[:, :, None], cell)
    return 1 - (small[:, :, 1:] - first).abs().flatten(1).mean(1)


def statistics(video: Video) -> dict[str, PerSample]:
    """Compute the statistics that reward hacking usually moves; a single frame has none of motion.

    The values are those of the scorers of these names, with luma computed once.
    """
    video = video.float()
    y = luma(video)
    values = {
        "saturation": saturation(video),
        "dark_share": _dark_share(y),
        "edge_density": _edge_density(y),
    }
    return values | ({"motion_energy": _motion_energy(y)} if video.shape[2] > 1 else {})


def thumbnail(video: Video) -> Float[Tensor, "b d"]:
    """Pool a video to three frames (or one, of a single frame) of 8 x 8 pixels, flattened."""
    frames, height, width = THUMBNAIL
    return adaptive_avg_pool3d(video.float(), (min(frames, video.shape[2]), height, width)).flatten(1)


def diversity(thumbnails: Float[Tensor, "b d"], ids: Ids) -> float | None:
    """Compute the square root of the variance (Bessel) within groups of equal id, averaged over pixels and groups.

    The square of it is half the mean squared distance of two samples of a group. None if every group has one sample, or
    if nothing was decoded.
    """
    rows = [thumbnails[index].double() for index in groups(thumbnails, ids).values() if len(index) > 1]
    if not rows or not thumbnails.shape[1]:
        return None
    return float(torch.stack([row.var(0).mean() for row in rows]).mean().sqrt())


def _needs(count: int, video: Video, name: str) -> None:
    if video.shape[2] < count:
        raise ValueError(f"{name} needs at least {count} frames of a video, not {video.shape[2]}")


def _kind(measure: Callable[[Video], PerSample], min_frames: int) -> ScorerKind:
    def scorer(video: Video, prompts: Sequence[str]) -> PerSample:
        return measure(video.float())

    return ScorerKind(measure.__name__, lambda _config, _device: scorer, check_no_weights, min_frames)


SHARPNESS = _kind(sharpness, 1)
MOTION_SMOOTHNESS = _kind(motion_smoothness, 3)
SATURATION = _kind(saturation, 1)
DARK_SHARE = _kind(dark_share, 1)
EDGE_DENSITY = _kind(edge_density, 1)
MOTION_ENERGY = _kind(motion_energy, 2)
TEMPORAL_FLICKERING = _kind(temporal_flickering, 2)


def _likeness(video: Video, prompts: Sequence[str], images: Images | None = None) -> PerSample:
    return first_frame_likeness(video.float(), images)


FIRST_FRAME_LIKENESS = ScorerKind(
    first_frame_likeness.__name__, lambda _config, _device: _likeness, check_no_weights, min_frames=2
)
