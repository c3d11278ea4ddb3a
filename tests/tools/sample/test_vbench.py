"""VBench's own program, of the package vbench 0.1.5, on the folders that the commands write.

VBENCH_PYTHON names the Python of an environment with it; without, the tests are skipped. `pip install --no-deps
vbench==0.1.5 opencv-python-headless decord scipy tqdm` beside torch and torchvision is enough for its dimension
temporal_flickering, which reads no network, and for subject_consistency with pixels in place of DINO's features.
"""

import json
import os
import subprocess
from pathlib import Path

import av
import pytest
import torch
from helpers import SMALL
from torch.nn.functional import interpolate, normalize
from transformers import ViTConfig

from unified_trainer.__main__ import main
from unified_trainer.basics.requests import Request
from unified_trainer.basics.types import Video
from unified_trainer.data.prompts import read_prompts
from unified_trainer.data.video_files import write_mp4
from unified_trainer.rewards.frame_consistency import of_features
from unified_trainer.rewards.pixels import temporal_flickering
from unified_trainer.rewards.subject_consistency import DINO
from unified_trainer.tools.sample.sample import of_prompts

PYTHON = os.environ.get("VBENCH_PYTHON", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="VBENCH_PYTHON names no Python with vbench")]
DIMENSION = "temporal_flickering"

# `vbench evaluate` starts vbench.launch.evaluate on each GPU; here it runs without joining GPUs.
PROGRAM = "import vbench.launch.evaluate as program; program.dist_init = lambda: None; program.main()"
# VBench's list of the videos of all dimensions that it finds.
FOUND = """
import sys, vbench
whole = vbench.VBench("cpu", vbench.__path__[0] + "/VBench_full_info.json", sys.argv[2])
whole.build_full_info_json(sys.argv[1], "all", whole.build_full_dimension_list())
"""
# VBench's subject_consistency of each video, where every 1009th number of an image stands for DINO's features of it.
SUBJECT = """
import json, sys, torch
from vbench.subject_consistency import subject_consistency
_, videos = subject_consistency(lambda image: image.flatten(1)[:, ::1009], sys.argv[1:], torch.device("cpu"), False)
print(json.dumps([video["video_results"] for video in videos]))
"""


def vbench(code: str, *words: object) -> str:
    """Run code in the environment of VBench, and return what it prints."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    asked = [PYTHON, "-c", code, *map(str, words)]
    done = subprocess.run(asked, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def full_info() -> Path:
    """The file of VBench's prompts."""
    return Path(vbench("import vbench; print(vbench.__path__[0])").splitlines()[-1]) / "VBench_full_info.json"


def test_vbench_finds_five_videos_of_each_of_its_prompts(full_info, tmp_path):
    """Two of the 946 prompts come twice, with other dimensions: both entries have the same five files."""
    prompts = read_prompts(full_info).prompts
    assert len(prompts) == 944
    (tmp_path / "videos").mkdir()
    for name in of_prompts([line for line in Request.of(prompts) for _ in range(5)], 5):
        (tmp_path / "videos" / f"{name}.mp4").touch()
    assert "WARNING" not in vbench(FOUND, tmp_path / "videos", tmp_path / "out")
    entries = json.loads((tmp_path / "out" / "all_full_info.json").read_text())
    assert [len(entry["video_list"]) for entry in entries] == [5] * 946


@pytest.mark.parametrize("command", ["sample", "evaluate"])
def test_vbench_measures_what_the_scorer_measures(full_info, tmp_path, command):
    """With the prompts of VBench, and with those that the names of the videos say."""
    entries = json.loads(full_info.read_text(encoding="utf-8"))
    prompts = [entry["prompt_en"] for entry in entries if DIMENSION in entry["dimension"]][:2]
    assert main([*SMALL["dance_grpo"], "--steps", "1", "--output", str(tmp_path / "run")]) == 0
    asked = ("--prompts", *prompts, "--prompt-names", "--output", str(tmp_path / "out"))
    more = ("--num-samples", "5") if command == "sample" else ("--samples", "5", "--resamples", "10")
    assert main([command, str(tmp_path / "run"), *asked, *more]) == 0
    (folder,) = (tmp_path / "out").rglob("videos")
    own = {f"{prompt}-{i}.mp4": flickering(folder / f"{prompt}-{i}.mp4") for prompt in prompts for i in range(5)}
    for mode in ("vbench_standard", "custom_input"):
        asked = ("--videos_path", folder, "--dimension", DIMENSION, "--mode", mode, "--output_path", tmp_path / mode)
        vbench(PROGRAM, *asked)
        (results,) = (tmp_path / mode).glob("*_eval_results.json")
        mean, videos = json.loads(results.read_text())[DIMENSION]
        measured = {Path(video["video_path"]).name: video["video_results"] for video in videos}
        assert measured == pytest.approx(own, abs=1e-6)
        assert mean == pytest.approx(sum(own.values()) / 10, abs=1e-6)


def test_vbench_shows_dino_the_images_of_the_scorer(tmp_path):
    """The scorer's resizing and measure, of videos of each orientation."""
    dino = DINO(ViTConfig(hidden_size=4, num_attention_heads=1, num_hidden_layers=0, patch_size=112))
    score = of_features(lambda images: normalize(dino.pixels(images).flatten(1)[:, ::1009], dim=-1), 2)
    files, own = [], []
    for height, width in ((240, 416), (416, 240), (256, 256), (224, 230)):
        files.append(tmp_path / f"{height}x{width}.mp4")
        small = torch.rand(5, 3, 6, 4, generator=torch.Generator().manual_seed(0))
        frames = interpolate(small, (height, width), mode="bilinear").movedim(1, -1)
        write_mp4((255 * frames).byte().numpy(), files[-1], 8)
        own.append(float(score(video_of(files[-1]), [""])))
    assert json.loads(vbench(SUBJECT, *files).splitlines()[-1]) == pytest.approx(own, abs=1e-6)


def flickering(file: Path) -> float:
    """The scorer's value of a video as it stands in its file."""
    return float(temporal_flickering(video_of(file)))


def video_of(file: Path) -> Video:
    with av.open(file) as container:
        frames = [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    return torch.stack(frames)[None].movedim(-1, 1) / 255
