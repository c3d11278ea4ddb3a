"""The distances of samples from the clips of the tiny world, measured in each attribute that its generator draws."""

import math
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.types import PerSample, Video
from unified_trainer.data import tiny_world
from unified_trainer.data.tiny_world import SHAPES, SIZE, Subject
from unified_trainer.numerics.wasserstein import wasserstein

WORLD, DRAWN = "world/", "drawn/"  # before the names of distances, and of the attributes of a sample
DISTANCES = tuple(f"{WORLD}{name}" for name in ("color", "place", "shape", "size", "travel"))  # 0 is best
DIVERSITY = f"{WORLD}diversity"
ACCURACY = "accuracy/"  # before the names of what a sample shows of its caption
ATTRIBUTES = ("size", "x", "y", "travel")  # of a clip, in the order of its law
DRAWS = 2000  # clips of a subject, whose attributes are the real law
OTHER_COLOR = 0.70  # distance of the two nearest of COLORS, red and yellow
CORE = 0.8  # share of a frame's largest difference from the ground, above which pixels show its own color
STRIDE = 4  # frames between two that are measured; the first and the last of a clip are


def exact_measures(video: Video, captions: Sequence[str]) -> dict[str, PerSample]:
    """Measure videos in [0, 1]: `check_attributes` of their captions, as 0 or 1, and their `attributes`."""
    subjects = [tiny_world.SUBJECT_OF_CAPTION[caption] for caption in captions]
    hits = tiny_world.check_attributes(video.cpu(), subjects)
    return {f"{ACCURACY}{name}": right.float() for name, right in hits.items()} | attributes(video, subjects)


def attributes(video: Video, subjects: Sequence[Subject]) -> dict[str, PerSample]:
    """Measure what the generator draws, and the distance of color and shape from those of the subject.

    drawn/size is the radius of the circle of equal area, drawn/x and drawn/y are the centre, both as means over frames,
    and drawn/travel is the way of the centre from the first frame to the last in the subject's direction, in pixels. A
    pixel belongs to the shape by its share of the frame's own color, which is the mean of the pixels that differ most
    from the ground.

    world/color is the distance of that color from the subject's in RGB, 1 for the distance of red and yellow.
    world/shape is 1 minus the subject's `tiny_world.leads`: 0 for its template, 1 for a shape between two, more for
    another shape.
    """
    ground = torch.tensor(tiny_world.BACKGROUND).view(3, 1, 1, 1)
    difference = video[:, :, ::STRIDE].cpu().float() - ground
    strength = difference.norm(dim=1)
    body = (strength > (CORE * strength.amax((2, 3), keepdim=True)).clamp(min=0.1)).float()
    own = torch.einsum("bcthw,bthw->bct", difference, body) / body.sum((2, 3)).clamp(min=1)[:, None]
    alpha = torch.einsum("bcthw,bct->bthw", difference, own) / own.square().sum(1).clamp(min=1e-4)[..., None, None]
    alpha = alpha.clamp(max=1) * (alpha > 0.25)
    area = alpha.sum((2, 3)).clamp(min=1)
    grid = torch.arange(SIZE) + 0.5
    radius, x, y = (area / math.pi).sqrt(), alpha.sum(2) @ grid / area, alpha.sum(3) @ grid / area
    along = torch.tensor([tiny_world.DIRECTIONS[subject.direction] for subject in subjects])
    wanted = torch.tensor([tiny_world.COLORS[subject.color] for subject in subjects]) - ground.flatten()
    way = torch.stack([x[:, -1] - x[:, 0], y[:, -1] - y[:, 0]], 1)
    shape = torch.tensor([SHAPES.index(subject.shape) for subject in subjects])
    overlap = tiny_world.overlaps(alpha.flatten(0, 1), x.flatten(), y.flatten(), radius.flatten())
    lead = tiny_world.leads(overlap.unflatten(1, x.shape).mean(2))[shape, torch.arange(len(shape))]
    return {
        f"{DRAWN}size": radius.mean(1),
        f"{DRAWN}x": x.mean(1),
        f"{DRAWN}y": y.mean(1),
        f"{DRAWN}travel": (way * along).sum(1),
        f"{WORLD}color": (own - wanted[..., None]).norm(dim=1).mean(1) / OTHER_COLOR,
        f"{WORLD}shape": 1 - lead,
    }


def world_distances(columns: Mapping[str, Tensor], captions: Sequence[str]) -> dict[str, float]:
    """Return the distances of the drawn attributes from their real law, and the diversity within subjects.

    world/size, world/place (mean of x and y) and world/travel are Wasserstein distances of the samples of each subject,
    divided by the real standard deviation, as means over subjects. world/diversity is the root of the mean variance
    (Bessel) within subjects over the real one: 1 for real clips, 0 if all samples of a subject are alike; it is left
    out if every subject has one sample. The distances of few samples are biased upwards: compare equal numbers.
    """
    rows: dict[Subject, list[int]] = {}
    for i, caption in enumerate(captions):
        rows.setdefault(tiny_world.SUBJECT_OF_CAPTION[caption], []).append(i)
    far: dict[str, list[float]] = {name: [] for name in ATTRIBUTES}
    spread = []
    for subject, own in rows.items():
        for name, real in _law(subject).items():
            values = columns[f"{DRAWN}{name}"].cpu().double()[own]
            far[name].append(wasserstein(values, real) / float(real.std()))
            spread += [float(values.var() / real.var())] if len(own) > 1 else []
    size, x, y, travel = (sum(parts) / len(parts) for parts in far.values())
    distances = {f"{WORLD}size": size, f"{WORLD}place": (x + y) / 2, f"{WORLD}travel": travel}
    return distances | ({DIVERSITY: math.sqrt(sum(spread) / len(spread))} if spread else {})


@cache
def _law(subject: Subject) -> dict[str, Float[Tensor, " n"]]:
    generator = torch.Generator().manual_seed(0)
    clips = [tiny_world.draw_clip(subject, generator) for _ in range(DRAWS)]
    rows = torch.tensor([(clip.radius, *clip.centre, clip.travel) for clip in clips], dtype=torch.float64)
    return dict(zip(ATTRIBUTES, rows.unbind(1), strict=True))
