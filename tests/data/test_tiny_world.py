"""The attribute checker: right on the caption that was drawn, wrong on all others and on an empty video."""

import math

import pytest
import torch

from unified_trainer.data.tiny_world import (
    BACKGROUND,
    COLORS,
    DIRECTIONS,
    FRAMES,
    SHAPES,
    SIZE,
    SUBJECTS,
    Subject,
    check_attributes,
    coverage,
    draw_clip,
    render,
)

pytestmark = pytest.mark.slow  # seconds together

PARTS = {"color": tuple(COLORS), "shape": SHAPES, "direction": tuple(DIRECTIONS)}
OPPOSITE = {"left": "right", "right": "left", "up": "down", "down": "up"}


@pytest.fixture(scope="module")
def videos() -> torch.Tensor:
    """One drawing of every subject."""
    generator = torch.Generator().manual_seed(11)
    return render([draw_clip(subject, generator) for subject in SUBJECTS])


def verdict(video: torch.Tensor, subjects=SUBJECTS) -> dict[str, float]:
    return {name: float(right.float().mean()) for name, right in check_attributes(video, subjects).items()}


def other(part: str, subject: Subject, places: int) -> Subject:
    """The subject with another color, shape or direction."""
    values = PARTS[part]
    changed = values[(values.index(vars(subject)[part]) + places) % len(values)]
    return Subject(**vars(subject) | {part: changed})


def test_a_render_is_video_in_its_range(videos):
    assert videos.shape == (len(SUBJECTS), 3, FRAMES, SIZE, SIZE)
    assert float(videos.min()) >= 0 and float(videos.max()) <= 1


def test_every_subject_is_recognised(videos):
    assert verdict(videos) == {"color": 1, "shape": 1, "direction": 1, "all": 1}


def test_other_drawings_are_recognised_too():
    generator = torch.Generator().manual_seed(12)
    subjects = SUBJECTS[::5] * 3
    assert verdict(render([draw_clip(subject, generator) for subject in subjects]), subjects)["all"] == 1


@pytest.mark.parametrize("part", PARTS)
def test_a_wrong_part_is_wrong_and_the_others_stay_right(videos, part):
    for places in range(1, len(PARTS[part])):
        asked = [other(part, subject, places) for subject in SUBJECTS]
        assert verdict(videos, asked) == {"color": 1, "shape": 1, "direction": 1, part: 0, "all": 0}


def test_played_backwards_it_moves_the_other_way(videos):
    asked = [Subject(s.color, s.shape, OPPOSITE[s.direction]) for s in SUBJECTS]
    assert verdict(videos.flip(2), asked)["all"] == 1


def test_left_is_towards_smaller_columns_and_up_towards_smaller_rows():
    """Drawn here without `render`: a red square of 20 pixels, first and last place given."""
    for direction, (first, last) in {
        "left": ((22, 38), (22, 6)),
        "right": ((22, 6), (22, 38)),
        "up": ((38, 22), (6, 22)),
        "down": ((6, 22), (38, 22)),
    }.items():
        video = torch.tensor(BACKGROUND).view(1, 3, 1, 1, 1).repeat(1, 1, 5, SIZE, SIZE)
        for frame in range(5):
            row, column = (round(a + (b - a) * frame / 4) for a, b in zip(first, last, strict=True))
            red = torch.tensor(COLORS["red"]).view(3, 1, 1)
            video[0, :, frame, row : row + 20, column : column + 20] = red
        assert verdict(video, [Subject("red", "square", direction)])["all"] == 1


def test_a_frozen_object_has_no_direction(videos):
    frozen = videos[:, :, :1].expand_as(videos)
    assert verdict(frozen) == {"color": 1, "shape": 1, "direction": 0, "all": 0}


@pytest.mark.parametrize("fill", [BACKGROUND, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (0.9, 0.15, 0.15)])
def test_a_blank_video_is_never_right(videos, fill):
    blank = torch.tensor(fill).view(1, 3, 1, 1, 1).expand_as(videos)
    found = verdict(blank)
    assert (found["direction"], found["all"]) == (0, 0)


def test_an_empty_ground_shows_nothing(videos):
    ground = torch.tensor(BACKGROUND).view(1, 3, 1, 1, 1).expand_as(videos)
    assert verdict(ground) == {"color": 0, "shape": 0, "direction": 0, "all": 0}


def test_noise_is_never_right():
    noise = torch.rand(len(SUBJECTS), 3, FRAMES, SIZE, SIZE)
    assert verdict(noise)["all"] == 0


def test_a_change_of_color_on_the_way_is_wrong(videos):
    half = videos.clone()
    half[:, :, FRAMES // 2 :] = videos[:, [2, 0, 1]][:, :, FRAMES // 2 :]
    assert verdict(half)["all"] == 0


def moving(alpha: torch.Tensor) -> torch.Tensor:
    """A video of a red shape, given by its share of each pixel, that moves right by 16 pixels."""
    ground, red = (torch.tensor(one).view(3, 1, 1, 1) for one in (BACKGROUND, COLORS["red"]))
    return (ground + (red - ground) * torch.stack([alpha.roll(step, 1) for step in range(-8, 9)]))[None]


def template(shape: str, radius: float = 12.0) -> torch.Tensor:
    return coverage(shape, *(torch.tensor([value]) for value in (SIZE / 2, SIZE / 2, radius)))[0]


def curve(power: float) -> torch.Tensor:
    """|x|^p + |y|^p = r^p: a circle at p = 2, and at p of about 3.5 as near to the square."""
    grid = (torch.arange(SIZE) + 0.5 - SIZE / 2).abs()
    return (11.5 - (grid[None] ** power + grid[:, None] ** power) ** (1 / power)).add(0.5).clamp(0, 1)


def blurred(shape: str, times: int) -> torch.Tensor:
    alpha = template(shape)[None]
    for _ in range(times):  # 1.4 pixels of standard deviation each
        alpha = torch.nn.functional.avg_pool2d(alpha, 5, 1, 2)
    return alpha[0]


NEAR_MISSES = {
    **{f"a rounded square, power {power}": curve(power) for power in (3.0, 3.2, 3.5, 4.0, 5.0)},
    **{
        f"a triangle cut at {cut}": torch.minimum(template("triangle"), template("circle", 12 * cut))
        for cut in (1.0, 1.1, 1.2)
    },
    **{f"a {shape} blurred {times} times": blurred(shape, times) for shape in SHAPES for times in (2, 4, 8, 16)},
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_is_nearly_a_circle_is_none(name):
    assert not check_attributes(moving(NEAR_MISSES[name]), [Subject("red", "circle", "right")])["shape"].any()


def test_curves_near_the_templates_are_recognised():
    for power, shape in ((2.0, "circle"), (2.5, "circle"), (8.0, "square"), (20.0, "square")):
        assert verdict(moving(curve(power)), [Subject("red", shape, "right")])["all"] == 1


def test_counts_must_match(videos):
    with pytest.raises(ValueError, match="check_attributes: 48 videos but 47 subjects"):
        check_attributes(videos, SUBJECTS[:-1])


def test_only_the_upper_corner_of_a_triangle_leaves_the_frame():
    """The half sizes follow from the area pi r^2; the numbers stand in the docstring of `draw_clip`."""
    generator = torch.Generator().manual_seed(0)
    inradius = math.sqrt(math.pi / (3 * math.sqrt(3)))
    half = {"circle": 1.0, "square": math.sqrt(math.pi) / 2, "triangle": math.sqrt(3) * inradius}
    above = half | {"triangle": 2 * inradius}  # of the centre
    below = half | {"triangle": inradius}
    outside: dict[str, list[float]] = {shape: [] for shape in half}
    for subject in SUBJECTS * 100:
        clip = draw_clip(subject, generator)
        (x, y), shape = clip.centre, subject.shape
        dx, dy = (abs(part) * clip.travel / 2 for part in DIRECTIONS[subject.direction])
        side, top, bottom = (clip.radius * size[shape] for size in (half, above, below))
        edges = (side + dx - x, x + side + dx - SIZE, y + bottom + dy - SIZE, top + dy - y)
        assert max(edges[:3]) <= 0
        outside[shape].append(edges[3])
    assert max(*outside["circle"], *outside["square"]) <= 0
    triangles = outside["triangle"]
    assert max(triangles) == pytest.approx(2.8, abs=0.1)
    assert sum(edge > 0 for edge in triangles) / len(triangles) == pytest.approx(0.23, abs=0.02)
