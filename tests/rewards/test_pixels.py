"""Pixel measures against closed forms, and what each one responds to."""

import math

import pytest
import torch

from unified_trainer.data.tiny_world import SUBJECTS, draw_clip, render
from unified_trainer.rewards import pixels


def grey(values: torch.Tensor) -> torch.Tensor:
    """Return luma [t, h, w] as a video of one sample."""
    return values[None, None].expand(1, 3, *values.shape).float()


def colored(*color: float) -> torch.Tensor:
    return torch.tensor(color, dtype=torch.float32).view(1, 3, 1, 1, 1).expand(1, 3, 2, 4, 4)


CLIP = render([draw_clip(SUBJECTS[0], torch.Generator().manual_seed(0))])
NOISE = torch.rand(1, 3, 17, 64, 64, generator=torch.Generator().manual_seed(1))


def test_luma_is_that_of_bt_709():
    assert float(pixels.luma(colored(1, 0, 0)).mean()) == pytest.approx(0.2126)
    assert float(pixels.luma(colored(0.2, 0.4, 0.6)).mean()) == pytest.approx(
        0.2 * 0.2126 + 0.4 * 0.7152 + 0.6 * 0.0722
    )


def test_sharpness_of_one_bright_pixel():
    """For a 1 in the middle of 5 x 5 the Laplacian is -4, four 1 and four 0: mean 0, variance 20 / 9."""
    values = torch.zeros(2, 5, 5)
    values[:, 2, 2] = 1.0
    assert float(pixels.sharpness(grey(values))) == pytest.approx(math.sqrt(20 / 9))
    values[1] = 0.3  # a flat second frame halves the mean
    assert float(pixels.sharpness(grey(values))) == pytest.approx(math.sqrt(20 / 9) / 2, abs=1e-5)


def test_sharpness_of_a_ramp_is_zero_and_falls_with_blur():
    ramp = grey(torch.arange(6.0).expand(1, 6, 6) / 6)
    assert float(pixels.sharpness(ramp)) < 1e-5
    blurred = torch.nn.functional.avg_pool3d(CLIP, (1, 3, 3), 1, (0, 1, 1))
    assert pixels.sharpness(blurred) < 0.6 * pixels.sharpness(CLIP)


def test_motion_smoothness_by_hand():
    """Means 0, 1, 3, 3 have steps 1, 2, 0 and bends 1 and 2, sums 3 and 2: 1 - 3 / 5."""
    values = torch.tensor([0.0, 1.0, 3.0, 3.0])[:, None, None].expand(4, 8, 8) / 3
    assert float(pixels.motion_smoothness(grey(values))) == pytest.approx(0.4)


def test_motion_smoothness_tells_motion_from_flicker():
    flicker = grey(torch.tensor([0.0, 1.0] * 4)[:, None, None].expand(8, 8, 8))
    shuffled = CLIP[:, :, torch.randperm(17, generator=torch.Generator().manual_seed(0))]
    assert float(pixels.motion_smoothness(flicker)) == pytest.approx(0, abs=1e-6)
    assert float(pixels.motion_smoothness(CLIP)) > 0.7 > 2 * float(pixels.motion_smoothness(shuffled))
    assert float(pixels.motion_smoothness(CLIP[:, :, :1].expand_as(CLIP))) == 1.0  # a still clip
    brighter = grey(torch.linspace(0, 1, 8)[:, None, None].expand(8, 8, 8))
    assert float(pixels.motion_smoothness(brighter)) == pytest.approx(1, abs=1e-5)


def test_saturation_is_the_span_of_the_channels():
    assert float(pixels.saturation(colored(0.9, 0.2, 0.5))) == pytest.approx(0.7)
    assert float(pixels.saturation(colored(0.5, 0.5, 0.5))) == 0


def test_dark_share_and_edge_density_count_pixels():
    values = torch.full((1, 5, 5), 0.5)
    values[0, 0, :2] = 0.0
    assert float(pixels.dark_share(grey(values))) == pytest.approx(2 / 25)
    # Of the upper left 4 x 4: (0, 0) differs from one below, (0, 1) from one to its right and one below.
    assert float(pixels.edge_density(grey(values))) == pytest.approx(2 / 16)
    assert float(pixels.edge_density(grey(values * 0.1))) == 0  # a change of 0.05


def test_motion_energy_is_the_mean_change():
    values = torch.tensor([0.0, 0.5, 0.2])[:, None, None].expand(3, 4, 4)
    assert float(pixels.motion_energy(grey(values))) == pytest.approx(0.4)


def test_temporal_flickering_is_one_minus_the_mean_change_of_all_channels():
    video = torch.zeros(1, 3, 3, 4, 4)
    video[:, 0, 1], video[:, 2, 2] = 0.6, 0.3
    assert float(pixels.temporal_flickering(video)) == pytest.approx(1 - (0.6 + 0.6 + 0.3) / 6)


def test_first_frame_likeness_is_one_minus_the_mean_difference():
    values = torch.tensor([0.4, 0.5, 0.1])[:, None, None].expand(3, 8, 8)
    assert float(pixels.first_frame_likeness(grey(values))) == pytest.approx(1 - (0.1 + 0.3) / 2)
    assert float(pixels.first_frame_likeness(grey(values[:1].expand(3, 8, 8)))) == 1
    image = torch.full((1, 3, 8, 8), 0.3)
    assert float(pixels.first_frame_likeness(grey(values), image)) == pytest.approx(1 - (0.2 + 0.2) / 2)


@pytest.mark.parametrize(
    ("measure", "frames"),
    [
        (pixels.motion_energy, 2),
        (pixels.motion_smoothness, 3),
        (pixels.temporal_flickering, 2),
        (pixels.first_frame_likeness, 2),
    ],
)
def test_motion_needs_frames(measure, frames):
    with pytest.raises(ValueError, match=f"needs at least {frames} frames of a video, not {frames - 1}"):
        measure(NOISE[:, :, : frames - 1])
    assert bool(measure(NOISE[:, :, :frames]).isfinite().all())


def test_a_single_frame_has_no_statistic_of_motion():
    assert pixels.statistics(CLIP).keys() - pixels.statistics(CLIP[:, :, :1]).keys() == {"motion_energy"}


def test_statistics_are_the_scorers_of_their_names_bit_for_bit():
    for name, values in pixels.statistics(CLIP).items():
        assert torch.equal(values, vars(pixels)[name](CLIP)), name


@pytest.mark.parametrize(
    "name",
    ["sharpness", "motion_smoothness", "saturation", "motion_energy", "temporal_flickering", "first_frame_likeness"],
)
def test_samples_are_independent_and_have_finite_gradients(name):
    """Gradients are finite for a still, uniform clip too."""
    measure = getattr(pixels, name)
    video = torch.cat([NOISE, CLIP, torch.full_like(CLIP, 0.5)]).requires_grad_()
    together = measure(video)
    torch.testing.assert_close(together, torch.cat([measure(one[None]) for one in video]))
    together.sum().backward()
    assert bool(video.grad.isfinite().all()) and bool((video.grad[0] != 0).any())


def test_diversity_by_hand():
    """Rows 0 and 2 have variance 2, rows 1 and 1 have 0: sqrt(1). A group of one does not count."""
    rows = torch.tensor([[0.0, 0.0], [1.0, 5.0], [2.0, 2.0], [1.0, 5.0], [9.0, 9.0]])
    assert pixels.diversity(rows, ["a", "b", "a", "b", "c"]) == pytest.approx(1.0)
    assert pixels.diversity(rows, list(range(5))) is None


def test_thumbnails_keep_differences_between_samples():
    """Equal samples have diversity 0; a shape at another place has more."""
    random = torch.Generator().manual_seed(0)
    clips = render([draw_clip(SUBJECTS[0], random) for _ in range(4)])
    alike, apart = clips[:1].expand(4, *clips.shape[1:]), clips
    ids = [0] * 4
    assert pixels.diversity(pixels.thumbnail(alike), ids) == 0
    assert pixels.diversity(pixels.thumbnail(apart), ids) > 0.02
    assert pixels.thumbnail(clips).shape == (4, 3 * 3 * 8 * 8) and pixels.thumbnail(clips[:, :, :1]).shape == (4, 192)
