"""Closed-form measures of a video's pixels, in [0, 1]: scorers without weights, and signs of reward hacking."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool3d

from unified_trainer.numerics.advantages import Ids, groups
from unified_trainer.types import PerSample, Video

LUMA = (0.2126, 0.7152, 0.0722)  # of red, green, blue (ITU-R BT.709)
DARK = 0.05  # luma below which a pixel counts as dark
EDGE = 0.1  # change of luma from one pixel to the next that counts as an edge
CELL = 8  # pixels, the side of what motion smoothness is read from
THUMBNAIL = (3, 8, 8)  # frames, height and width of what diversity is read from


def luma(video: Video) -> Float[Tensor, "b frames height width"]:
    return torch.einsum("bcthw,c->bthw", video, video.new_tensor(LUMA))


def sharpness(video: Video) -> PerSample:
    """Standard deviation of luma's Laplacian (4 neighbours), the mean over frames (Pech-Pacheco et al., ICPR 2000).

    It rises with detail, and with noise too: alone it is easily hacked.
    """
    y = luma(video)
    middle = y[..., 1:-1, 1:-1]
    around = y[..., :-2, 1:-1] + y[..., 2:, 1:-1] + y[..., 1:-1, :-2] + y[..., 1:-1, 2:]
    return (around - 4 * middle).flatten(2).var(-1, correction=0).clamp(min=1e-12).sqrt().mean(1)


def motion_smoothness(video: Video) -> PerSample:
    """1 - sum |a - 2 b + c| / sum (|a - b| + |b - c|) over neighbouring frames a, b, c, pooled to cells; in [0, 1].

    What linear interpolation of the neighbours misses of a frame: VBench's motion smoothness (arXiv:2311.17982) without
    its network. A clip that stands still has 1: hold its `motion_energy` against it. Needs three frames.
    """
    _needs(3, video, "motion_smoothness")
    frames = torch.nn.functional.avg_pool2d(video.movedim(2, 1).flatten(0, 1), min(CELL, *video.shape[3:]))
    small = frames.unflatten(0, (len(video), video.shape[2])).movedim(1, 2)
    step = small.diff(dim=2)
    before, after = step[:, :, :-1].flatten(1), step[:, :, 1:].flatten(1)
    bend = (after - before).abs().sum(1)
    return 1 - bend / (before.abs() + after.abs()).sum(1).clamp(min=1e-6)


def saturation(video: Video) -> PerSample:
    """Mean of the largest minus the smallest of a pixel's three channels: unlike HSV's ratio, small in the dark."""
    return (video.amax(1) - video.amin(1)).flatten(1).mean(1)


def dark_share(video: Video) -> PerSample:
    """Share of pixels with luma below 0.05."""
    return (luma(video) < DARK).float().flatten(1).mean(1)


def edge_density(video: Video) -> PerSample:
    """Share of pixels from which luma changes by more than 0.1 to the next ones, right and below taken together."""
    y = luma(video)
    right, below = y[..., :-1, 1:] - y[..., :-1, :-1], y[..., 1:, :-1] - y[..., :-1, :-1]
    return (torch.hypot(right, below) > EDGE).float().flatten(1).mean(1)


def motion_energy(video: Video) -> PerSample:
    """Mean absolute change of luma from one frame to the next; needs two frames."""
    _needs(2, video, "motion_energy")
    return luma(video).diff(dim=1).abs().flatten(1).mean(1)


STATISTICS = {"saturation": saturation, "dark_share": dark_share, "edge_density": edge_density}
OF_MOTION = {"motion_energy": motion_energy}


def statistics(video: Video) -> dict[str, PerSample]:
    """What reward hacking usually moves; of a single frame, nothing of motion."""
    measures = STATISTICS | (OF_MOTION if video.shape[2] > 1 else {})
    return {name: measure(video.float()) for name, measure in measures.items()}


def thumbnail(video: Video) -> Float[Tensor, "b d"]:
    """A small copy, as a row: three frames of 8 x 8, or one of a single frame."""
    frames, height, width = THUMBNAIL
    return adaptive_avg_pool3d(video.float(), (min(frames, video.shape[2]), height, width)).flatten(1)


def diversity(thumbnails: Float[Tensor, "b d"], ids: Ids) -> float | None:
    """Root of the variance (Bessel) within groups of equal id, the mean over pixels and groups; None if all are single.

    Half the mean squared distance of two samples of a group is this squared.
    """
    rows = [thumbnails[index].double() for index in groups(thumbnails, ids).values() if len(index) > 1]
    if not rows:
        return None
    return float(torch.stack([row.var(0).mean() for row in rows]).mean().sqrt())


def _needs(count: int, video: Video, name: str) -> None:
    if video.shape[2] < count:
        raise ValueError(f"{name} needs at least {count} frames of a video, not {video.shape[2]}")
