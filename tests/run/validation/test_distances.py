"""Frechet distances of validations: to real clips of a folder, and FVD of a network's features."""

import math

import pytest
import torch
from helpers import SMALL, metrics_of, run, tiny_codec
from scripted import scripted_means
from torch import Tensor, nn

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Request
from unified_trainer.data.clips import VideoConfig
from unified_trainer.data.video_files import to_uint8, write_clip
from unified_trainer.run.settings.config import ValidationConfig
from unified_trainer.run.validation.distances import I3D, check_distances, distances, distances_of

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # the format of the published file

CPU = torch.device("cpu")
SIZE = VideoConfig(5, 16, 24, 8.0)
PROMPTS = Request.of(["a dog"])


class Single(nn.Module):
    def forward(self, video: Tensor, rescale: bool, resize: bool, return_features: bool) -> Tensor:
        return video.mean()


@pytest.fixture
def network(tmp_path):
    return scripted_means(tmp_path / "i3d.pt")


@pytest.fixture
def clips(tmp_path):
    """Four clips of one gray each, as a folder of videos."""
    folder = tmp_path / "clips"
    folder.mkdir()
    for i in range(4):
        write_clip(to_uint8(torch.full((1, 3, 5, 16, 24), 0.2 * (i + 1)))[0], folder / f"{i}.mp4", 8)
    return folder


def of_folder(network, clips, samples: int = 4):
    config = ValidationConfig(num_samples=samples, batch=2, real_clips=str(clips), i3d=str(network))
    return distances_of(config, SIZE, tiny_codec(), None, PROMPTS, CPU)


def test_fvd_of_the_clips_themselves_is_zero_and_of_lighter_ones_the_square_of_the_shift(network, clips):
    """A shift of all videos moves each of the three features by 2 x the shift, and leaves the covariance."""
    measured = of_folder(network, clips)
    videos = torch.stack([torch.full((3, 5, 16, 24), 0.2 * (i + 1)) for i in range(4)])
    parts = [measured.columns(videos[i : i + 2], range(i, i + 2)) for i in (0, 2)]
    columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    shifted = columns | {"features/fvd": columns["features/fvd"] + 0.2}
    assert columns["features/fvd"].shape == (4, 1, 3)
    torch.testing.assert_close(columns["features/fvd"][:, 0, 0], 2 * torch.tensor([0.2, 0.4, 0.6, 0.8]) - 1)
    assert distances(columns).keys() == {"fvd"}
    assert distances(columns)["fvd"] == pytest.approx(0, abs=1e-3)  # what mp4 loses
    assert distances(shifted)["fvd"] == pytest.approx(3 * 0.2**2, abs=5e-3)


def test_real_clips_are_read_once(network, clips):
    measured = of_folder(network, clips)
    first = measured.columns(torch.zeros(2, 3, 5, 16, 24), range(2))
    for file in clips.iterdir():
        file.unlink()
    again = measured.columns(torch.ones(2, 3, 5, 16, 24), range(2))
    assert torch.equal(first["real features/fvd"], again["real features/fvd"])
    assert not torch.equal(first["features/fvd"], again["features/fvd"])


def test_nothing_is_measured_without_real_clips_or_features(clips):
    assert distances_of(ValidationConfig(), SIZE, tiny_codec(), None, PROMPTS, CPU) is None
    assert distances_of(ValidationConfig(real_clips=str(clips)), SIZE, tiny_codec(), None, PROMPTS, CPU) is None


@pytest.mark.parametrize("scripted", [Single(), None])
def test_a_file_that_is_no_i3d(tmp_path, scripted):
    file = tmp_path / "other.pt"
    torch.jit.script(scripted).save(file) if scripted is not None else file.write_bytes(b"no network")
    with pytest.raises(UserError, match=r"--validation.i3d .*other.pt gives no .*must be I3D as TorchScript"):
        I3D.load(file, "--validation.i3d", CPU, (5, 16, 24), 2)


def test_too_few_frames_for_the_network(network):
    with pytest.raises(UserError, match=r"gives no features of 2 x 16 x 24 pixels .*ten frames"):
        I3D.load(network, "--validation.i3d", CPU, (2, 16, 24), 2)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_samples": 5}, "holds 4 videos, fewer than the 5 samples"),
        ({"i3d": "none.pt"}, "--validation.i3d none.pt"),
        ({"real_clips": "none"}, "--validation.real-clips none: no such file or folder"),
        ({"real_clips": ""}, "compares samples with real clips: add --validation.real-clips DIR"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_weights_are_read(network, clips, settings, said):
    config = ValidationConfig(**{"num_samples": 4, "real_clips": str(clips), "i3d": str(network)} | settings)
    with pytest.raises(UserError, match=said):
        check_distances(config, SIZE, PROMPTS)


def test_a_clip_that_is_too_short_is_named(network, clips):
    config = ValidationConfig(num_samples=4, real_clips=str(clips), i3d=str(network))
    with pytest.raises(UserError, match=r"0\.mp4: too short"):
        check_distances(config, VideoConfig(9, 16, 24, 8.0), PROMPTS)


@pytest.mark.slow
def test_a_run_measures_both_distances_to_clips_of_a_folder(network, clips, tmp_path, capsys):
    shown = ["--validate-every", "1", "--validation.real-clips", str(clips), "--validation.i3d", str(network)]
    run("dance_grpo", tmp_path / "run", *shown, "--validation.num-samples", "4")
    rows = [row for row in metrics_of(tmp_path / "run") if "validation/fvd" in row]
    assert len(rows) == 2 and all(math.isfinite(row["validation/fvd"] + row["validation/frechet"]) for row in rows)
    words = [*SMALL["dance_grpo"], *shown, "--validation.num-samples", "9", "--output", str(tmp_path / "more")]
    capsys.readouterr()
    assert main(words) == 2 and "fewer than the 9 samples" in capsys.readouterr().err
    assert not (tmp_path / "more").exists()
