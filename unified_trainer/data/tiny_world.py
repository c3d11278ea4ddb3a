"""The tiny world: clips of one colored shape moving on a dark ground, their captions, and an attribute checker."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unified_trainer.parallel.random import generator

SIZE = 64  # pixels, both sides
FRAMES = 17
BACKGROUND = (0.08, 0.08, 0.10)
COLORS = {
    "red": (0.90, 0.15, 0.15),
    "green": (0.15, 0.80, 0.20),
    "blue": (0.20, 0.30, 0.95),
    "yellow": (0.95, 0.85, 0.15),
}
SHAPES = ("circle", "square", "triangle")
DIRECTIONS = {"left": (-1.0, 0.0), "right": (1.0, 0.0), "up": (0.0, -1.0), "down": (0.0, 1.0)}
PHRASINGS = (
    "a {color} {shape} moving {direction}",
    "{color} {shape} moves {direction}",
    "a {shape} that is {color} and moves {direction}",
    "moving {direction}, a {color} {shape}",
)
RADIUS_RANGE = (11.0, 14.0)  # pixels, of the circle of equal area
TRAVEL_RANGE = (18.0, 26.0)  # pixels, from the first frame of a clip to its last
OVERLAP = 0.85  # least of a shape with its template; clips that went through the VAE have .90 or more
LEAD = 0.25  # least of a shape in `leads`; clips that went through the VAE have .31 or more, a curve of power 3 has .22


@dataclass(frozen=True)
class Subject:
    """The attributes that a caption names and the attribute checker verifies."""

    color: str
    shape: str
    direction: str

    def caption(self, phrasing: int = 0) -> str:
        """Write the caption in one of PHRASINGS."""
        return PHRASINGS[phrasing].format(color=self.color, shape=self.shape, direction=self.direction)


SUBJECTS = tuple(Subject(*parts) for parts in itertools.product(COLORS, SHAPES, DIRECTIONS))
# Eight of the 48: every color and every direction twice, every shape at least twice; each pair is seen elsewhere.
HELD_OUT = tuple(
    Subject(color, SHAPES[(i + j) % 3], tuple(DIRECTIONS)[(i + 2 * j) % 4])
    for i, color in enumerate(COLORS)
    for j in range(2)
)
TRAINING = tuple(subject for subject in SUBJECTS if subject not in HELD_OUT)
SUBJECT_OF_CAPTION = {subject.caption(phrasing): subject for subject in SUBJECTS for phrasing in range(len(PHRASINGS))}


@dataclass(frozen=True)
class Clip:
    """A drawing of a subject: the centre of its path, its radius, and the length of its path, in pixels."""

    subject: Subject
    centre: tuple[float, float]
    radius: float
    travel: float


def draw_clip(subject: Subject, generator: torch.Generator) -> Clip:
    """Draw a clip, uniformly over size, travel and position.

    Circles and squares stay inside the frame. The upper corner of a triangle is 1.56 radii from its centre: in 23 % of
    the clips of triangles it leaves the frame, by up to 2.9 pixels.
    """
    u = torch.rand(4, generator=generator, dtype=torch.float64).tolist()
    radius = RADIUS_RANGE[0] + u[0] * (RADIUS_RANGE[1] - RADIUS_RANGE[0])
    travel = TRAVEL_RANGE[0] + u[1] * (TRAVEL_RANGE[1] - TRAVEL_RANGE[0])
    reach = radius * 1.35  # more than circles and squares, less than the upper corner of a triangle
    centre = []
    for part, along in zip(u[2:], DIRECTIONS[subject.direction], strict=True):
        slack = SIZE / 2 - reach - abs(along) * travel / 2
        centre.append(SIZE / 2 + (2 * part - 1) * max(slack, 0.0))
    return Clip(subject, (centre[0], centre[1]), radius, travel)


def real_clip(caption: str, seed: int, sample: int) -> Clip:
    """Draw the real clip that a sample of this caption is compared with; it depends on seed and sample alone."""
    drawn = int(generator(seed, "real clip", sample).integers(2**63))
    return draw_clip(SUBJECT_OF_CAPTION[caption], torch.Generator().manual_seed(drawn))


def is_tiny_world(shape: Sequence[int], prompts: Sequence[str]) -> bool:
    """Whether videos of these frames, height and width are as the tiny world's clips, and all prompts its captions."""
    return tuple(shape) == (FRAMES, SIZE, SIZE) and all(prompt in SUBJECT_OF_CAPTION for prompt in prompts)


def render(clips: Sequence[Clip], frames: int = FRAMES) -> Float[Tensor, "b 3 t h w"]:
    """Render clips as antialiased video in [0, 1]."""
    video = torch.empty(len(clips), 3, frames, SIZE, SIZE)
    ground = torch.tensor(BACKGROUND).view(3, 1, 1, 1)
    for i, clip in enumerate(clips):
        path = torch.linspace(-0.5, 0.5, frames) * clip.travel
        along = DIRECTIONS[clip.subject.direction]
        x, y = (c + a * path for c, a in zip(clip.centre, along, strict=True))
        alpha = coverage(clip.subject.shape, x, y, torch.full_like(x, clip.radius))
        color = torch.tensor(COLORS[clip.subject.color]).view(3, 1, 1, 1)
        video[i] = ground + alpha * (color - ground)
    return video


def coverage(
    shape: str, x: Float[Tensor, " n"], y: Float[Tensor, " n"], radius: Float[Tensor, " n"]
) -> Float[Tensor, "n h w"]:
    """Compute the share of each pixel that a shape covers; it is centred (by area) at x, y.

    Its area is that of a circle of this radius.
    """
    grid = torch.arange(SIZE, dtype=x.dtype) + 0.5
    dx = grid.view(1, 1, -1) - x.view(-1, 1, 1)
    dy = grid.view(1, -1, 1) - y.view(-1, 1, 1)
    r = radius.view(-1, 1, 1)
    if shape == "circle":
        inside = r - torch.hypot(dx, dy)
    elif shape == "square":
        inside = r * math.sqrt(math.pi) / 2 - torch.maximum(dx.abs(), dy.abs())
    else:  # an equilateral triangle standing on its base; inradius from the area
        inradius = r * math.sqrt(math.pi / (3 * math.sqrt(3)))
        slanted = inradius - (math.sqrt(3) / 2 * dx.abs() - dy / 2)
        inside = torch.minimum(inradius - dy, slanted)
    return (inside + 0.5).clamp(0, 1)


def check_attributes(video: Float[Tensor, "b 3 t h w"], subjects: Sequence[Subject]) -> dict[str, Bool[Tensor, " b"]]:
    """Check which videos in [0, 1] show their subject: by `color`, `shape`, `direction`, and `all` of them.

    Color: the palette color nearest in angle to the mean difference from the ground, in all thirds of the clip.
    Shape: the template of equal area and centre with the largest overlap, as a mean over frames. It must be OVERLAP or
    more, which a blurred shape has not, and lead by LEAD or more, which a shape between two templates does not.
    Direction: the axis and sign of the centroid's path, at least 8 pixels long and twice its sideways part.
    """
    if len(video) != len(subjects):
        raise ValueError(f"check_attributes: {len(video)} videos but {len(subjects)} subjects")
    readings = [read(clip) for clip in video.float()]
    parts = {
        name: torch.tensor([seen[name] == getattr(s, name) for seen, s in zip(readings, subjects, strict=True)])
        for name in ("color", "shape", "direction")
    }
    return {**parts, "all": parts["color"] & parts["shape"] & parts["direction"]}


def read(clip: Float[Tensor, "3 t h w"]) -> dict[str, str | None]:
    """Read the attributes that one clip shows; one that is not clear is None."""
    ground = torch.tensor(BACKGROUND, dtype=clip.dtype)
    difference = clip.movedim(0, -1) - ground
    names = tuple(COLORS)
    palette = torch.tensor([COLORS[name] for name in names], dtype=clip.dtype) - ground
    strength = difference.norm(dim=-1)
    weight = torch.where(strength > 0.3, strength, 0.0)
    thirds = zip(difference.chunk(3), weight.chunk(3), strict=True)
    mean = torch.stack([(d * w[..., None]).sum((0, 1, 2)) for d, w in thirds])
    cosine = torch.nn.functional.normalize(mean, dim=-1) @ torch.nn.functional.normalize(palette, dim=-1).T
    votes = cosine.argmax(-1).tolist()
    color = names[votes[0]] if len(set(votes)) == 1 and bool((cosine.amax(-1) > 0.93).all()) else None

    axis = palette[votes[len(votes) // 2]]
    alpha = ((difference @ axis) / axis.square().sum()).clamp(0, 1)
    alpha = torch.where(alpha > 0.25, alpha, 0.0)
    area = alpha.sum((1, 2))
    if not bool((area > 100).all()):  # pixels: the smallest drawn has 380
        return {"color": color, "shape": None, "direction": None}
    grid = torch.arange(SIZE, dtype=clip.dtype) + 0.5
    x = (alpha.sum(1) @ grid) / area
    y = (alpha.sum(2) @ grid) / area
    overlap = overlaps(alpha, x, y, (area / math.pi).sqrt()).mean(1)
    best = int(overlap.argmax())
    clear = bool(overlap[best] >= OVERLAP) and bool(leads(overlap)[best] >= LEAD)
    dx, dy = float(x[-1] - x[0]), float(y[-1] - y[0])
    if abs(dx) > abs(dy):
        along, aside, direction = abs(dx), abs(dy), "right" if dx > 0 else "left"
    else:
        along, aside, direction = abs(dy), abs(dx), "down" if dy > 0 else "up"
    return {
        "color": color,
        "shape": SHAPES[best] if clear else None,
        "direction": direction if along >= 8 and along >= 2 * aside else None,
    }


def overlaps(
    alpha: Float[Tensor, "n h w"], x: Float[Tensor, " n"], y: Float[Tensor, " n"], radius: Float[Tensor, " n"]
) -> Float[Tensor, "shapes n"]:
    """Compute the overlap of shapes with the templates of their centre and area: intersection over union."""
    templates = torch.stack([coverage(name, x, y, radius) for name in SHAPES])
    return torch.minimum(alpha, templates).sum((2, 3)) / torch.maximum(alpha, templates).sum((2, 3))


def leads(overlap: Float[Tensor, "shapes ..."]) -> Float[Tensor, "shapes ..."]:
    """Compute how much more each template overlaps than the best of the others: 1 as the template itself leads.

    It is 0 for a shape between two templates, and less for one that is nearer to another.
    """
    lead = _leads(overlap)
    return lead / _leads_of_templates().view(-1, *(1 for _ in lead.shape[1:]))


def _leads(overlap: Float[Tensor, "shapes ..."]) -> Float[Tensor, "shapes ..."]:
    first, second = overlap.topk(2, dim=0).values
    return overlap - torch.where(overlap == first, second, first)


@cache
def _leads_of_templates() -> Float[Tensor, " shapes"]:
    middle, radius = torch.full((1,), SIZE / 2), torch.full((1,), sum(RADIUS_RANGE) / 2)
    templates = [coverage(name, middle, middle, radius) for name in SHAPES]
    return _leads(torch.cat([overlaps(one, middle, middle, radius) for one in templates], 1)).diagonal()
