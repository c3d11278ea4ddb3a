"""The measures of the tiny world: exact on drawings, and each planted fault is the alarm of the measure it is for."""

from dataclasses import replace

import pytest
import torch

from unified_trainer.data.tiny_world import (
    BACKGROUND,
    COLORS,
    FRAMES,
    HELD_OUT,
    SIZE,
    SUBJECTS,
    Clip,
    Subject,
    draw_clip,
    render,
)
from unified_trainer.data.tiny_world_features import world_features
from unified_trainer.data.tiny_world_measures import STRIDE, attributes, world_distances
from unified_trainer.numerics.frechet import frechet_distance

SAMPLES, SETS = 12, 6  # of each subject; sets of real clips that make the floor
ASKED = [subject for subject in HELD_OUT for _ in range(SAMPLES)]


def shown(clips: list[Clip]) -> torch.Tensor:
    """Videos of clips whose frames between those that are measured are copies."""
    return render(clips, 1 + (FRAMES - 1) // STRIDE).repeat_interleave(STRIDE, 2)[:, :, :FRAMES]


def drawn(seed: int, subjects: list[Subject] = ASKED) -> list[Clip]:
    generator = torch.Generator().manual_seed(seed)
    return [draw_clip(subject, generator) for subject in subjects]


def measured(video: torch.Tensor, reference: torch.Tensor | None = None) -> dict[str, float]:
    """All measures of 96 samples of ASKED, and the Frechet distance to the features of a reference."""
    columns = attributes(video, ASKED)
    means = {name: float(columns[name].mean()) for name in ("world/color", "world/shape")}
    found = means | world_distances(columns, [subject.caption() for subject in ASKED])
    if reference is not None:
        rows = (world_features(video).flatten(0, 1), reference.flatten(0, 1))
        found["world/frechet"] = frechet_distance(*rows)
    return found


def vivid(video: torch.Tensor) -> torch.Tensor:
    """Each pixel 30% further from its gray, where that is in range."""
    gray = video.mean(1, keepdim=True)
    return (gray + 1.3 * (video - gray)).clamp(0, 1)


def of_clips(change) -> torch.Tensor:
    return shown([change(clip) for clip in drawn(100)])


def collapsed() -> torch.Tensor:
    return shown([clip for clip in drawn(100)[::SAMPLES] for _ in range(SAMPLES)])


def permuted() -> torch.Tensor:
    """Clips of another held-out subject, with another color."""
    return shown(drawn(100, [*ASKED[2 * SAMPLES :], *ASKED[: 2 * SAMPLES]]))


FAULTS = {
    "collapse within a prompt": (collapsed, "world/diversity"),
    "half the motion": (lambda: of_clips(lambda clip: replace(clip, travel=clip.travel / 2)), "world/travel"),
    "a frozen first frame": (lambda: shown(drawn(100))[:, :, :1].repeat(1, 1, FRAMES, 1, 1), "world/travel"),
    "permuted captions": (permuted, "world/travel"),
    "saturation": (lambda: vivid(shown(drawn(100))), "world/color"),
    "shapes grown by a tenth": (lambda: of_clips(lambda clip: replace(clip, radius=1.1 * clip.radius)), "world/size"),
    "all places in the middle": (
        lambda: of_clips(lambda clip: replace(clip, centre=(SIZE / 2, SIZE / 2))),
        "world/place",
    ),
}


@pytest.fixture(scope="module")
def clips() -> torch.Tensor:
    """One drawing of every subject."""
    return shown(drawn(11, list(SUBJECTS)))


@pytest.fixture(scope="module")
def reference() -> torch.Tensor:
    return world_features(shown(drawn(1000)))


@pytest.fixture(scope="module")
def floor(reference) -> dict[str, torch.Tensor]:
    """All measures of sets of real clips."""
    sets = [measured(shown(drawn(seed)), reference) for seed in range(SETS)]
    return {name: torch.tensor([one[name] for one in sets]) for name in sets[0]}


def test_attributes_of_drawings_are_those_that_were_drawn(clips):
    found = attributes(clips, SUBJECTS)
    known = [(clip.radius, *clip.centre, clip.travel) for clip in drawn(11, list(SUBJECTS))]
    inside = torch.tensor([subject.shape != "triangle" for subject in SUBJECTS])  # a triangle may leave the frame
    for name, values, most in zip(
        ("size", "x", "y", "travel"), torch.tensor(known).T, (0.15, 0.2, 0.2, 0.3), strict=True
    ):
        error = (found[f"drawn/{name}"] - values).abs()
        assert error[inside].max() < most and error.max() < 0.6, name
    assert found["world/color"].max() < 0.02 and found["world/shape"].abs().max() < 0.12


def test_motion_is_measured_in_the_direction_of_the_prompt(clips):
    forth, back = attributes(clips, SUBJECTS), attributes(clips.flip(2), SUBJECTS)
    assert torch.allclose(back["drawn/travel"], -forth["drawn/travel"], atol=1e-3)
    assert torch.allclose(back["drawn/size"], forth["drawn/size"])


def test_another_color_and_shape_are_far(clips):
    for part, values in (("color", [*COLORS]), ("shape", ["circle", "square", "triangle"])):
        asked = [replace(one, **{part: values[values.index(vars(one)[part]) - 1]}) for one in SUBJECTS]
        assert attributes(clips, asked)[f"world/{part}"].min() > 0.98


def test_a_rounded_square_is_far_from_the_circle():
    """The curve |x|^p + |y|^p = r^p: a circle at p = 2, and nearer to the square from p of about 3.5 on."""
    grid = torch.arange(SIZE) + 0.5 - SIZE / 2
    circle, square = (Subject("red", shape, "right") for shape in ("circle", "square"))
    lead = {}
    for power in (2.0, 3.2, 20.0):
        radius = 12.0 if power == 2 else 11.0
        norm = (grid[None].abs() ** power + grid[:, None].abs() ** power) ** (1 / power)
        alpha = (radius - norm + 0.5).clamp(0, 1)
        ground = torch.tensor(BACKGROUND).view(1, 3, 1, 1, 1)
        color = torch.tensor(COLORS["red"]).view(1, 3, 1, 1, 1)
        frames = [ground[:, :, 0] + (color - ground)[:, :, 0] * alpha.roll(step, 1) for step in range(-8, 9)]
        video = torch.stack(frames, 2)
        lead[power] = [float(attributes(video, [one])["world/shape"]) for one in (circle, square)]
    assert lead[2.0][0] < 0.1 and lead[20.0][1] < 0.2
    assert 0.74 < lead[3.2][0] < 1.0  # more than all real clips, at most .74 after the VAE


def test_a_video_without_a_shape_is_far_and_finite(clips):
    for fill in (BACKGROUND, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)):
        found = attributes(torch.tensor(fill).view(1, 3, 1, 1, 1).expand_as(clips), SUBJECTS)
        assert all(values.isfinite().all() for values in found.values())
        assert found["world/color"].min() > 0.9 and found["drawn/travel"].abs().max() < 1
        assert ((found["drawn/size"] < 1) | (found["drawn/size"] > 30)).all()


def test_one_sample_of_a_subject_has_no_diversity():
    columns = {f"drawn/{name}": torch.full((2,), 20.0) for name in ("size", "x", "y", "travel")}
    captions = [subject.caption(1) for subject in HELD_OUT[:2]]
    assert "world/diversity" not in world_distances(columns, captions)
    together = world_distances(columns, [HELD_OUT[0].caption(0), HELD_OUT[0].caption(1)])
    assert together["world/diversity"] == 0  # two phrasings of one subject are samples of one law


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_the_largest_alarm_of_its_measure(fault, floor, reference):
    """An alarm is the distance from the floor's mean in its standard deviations, which are taken as .01 at least."""
    videos, expected = FAULTS[fault]
    found = measured(videos(), reference)
    alarms = {
        name: abs(found[name] - float(values.mean())) / max(float(values.std()), 0.01) for name, values in floor.items()
    }
    features = alarms.pop("world/frechet")  # it sees no captions
    assert max(alarms, key=lambda name: alarms[name]) == expected and alarms[expected] > 15
    assert fault == "permuted captions" or features > 5


@pytest.mark.slow
def test_features_are_white_over_real_clips(reference):
    """(sum of eigenvalues)^2 / sum of squares: 32 for equal ones; image features of the tiny HPSv3 have 1.5."""
    covariance = torch.cov(reference.flatten(0, 1).T)
    assert covariance.trace() ** 2 / covariance.square().sum() > 20
