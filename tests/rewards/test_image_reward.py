"""ImageReward in a Python of its own, by the file of docs/rewards.md, against its package image-reward 1.5.

IMAGE_REWARD_PYTHON names a Python with the packages of that page; without, the test is skipped. The network is the
published one but for its text encoder of two layers; all weights are random.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import CPU, REPO
from PIL import Image

from unified_trainer.rewards.base import RewardConfig, ScorerConfig
from unified_trainer.rewards.scorers import check_reward, load_scorers

PYTHON = os.environ.get("IMAGE_REWARD_PYTHON", "")
WITHOUT = "IMAGE_REWARD_PYTHON names no Python with image-reward"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason=WITHOUT)]

LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
MED_CONFIG = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 768,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "encoder_width": 1024,
    "add_cross_attention": True,
}
# All weights are parts of the same random numbers, so that the file is small.
WRITE = """
import sys, torch
from accelerate import init_empty_weights
from ImageReward.ImageReward import ImageReward
with init_empty_weights():
    shapes = {name: weight.shape for name, weight in ImageReward(sys.argv[1] + "/med_config.json").named_parameters()}
noise = 0.1 * torch.randn(2**23, generator=torch.Generator().manual_seed(0))
parts = {name: noise[17 * i :][: shape.numel()].view(shape) for i, (name, shape) in enumerate(shapes.items())}
torch.save(parts, sys.argv[1] + "/ImageReward.pt")
"""
SCORE = """
import json, sys, ImageReward
folder, prompts = sys.argv[1], json.loads(sys.argv[2])
model = ImageReward.load(folder + "/ImageReward.pt", device="cpu", med_config=folder + "/med_config.json")
scores = {file: model.score(prompt, file) for file, prompt in prompts.items()}
print(json.dumps(scores))
"""


def package(code: str, *words: object) -> str:
    """Run code in the environment of the package, and return the last line that it prints."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([PYTHON, "-c", code, *map(str, words)], env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return (done.stdout.splitlines() or [""])[-1]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The folder of the weights; the hub's cache holds a tokenizer of letters."""
    hub = tmp_path / "hf" / "hub" / "models--bert-base-uncased"
    for file, text in {
        "refs/main": "commit",
        "snapshots/commit/vocab.txt": "\n".join(VOCABULARY),
        "snapshots/commit/tokenizer_config.json": '{"do_lower_case": true}',
    }.items():
        (hub / file).parent.mkdir(parents=True, exist_ok=True)
        (hub / file).write_text(text)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "med_config.json").write_text(json.dumps(MED_CONFIG))
    package(WRITE, tmp_path / "weights")
    return tmp_path / "weights"


def test_the_file_of_the_guide_gives_the_packages_scores(folder, tmp_path):
    """The mean of the scores that the package gives the frames as PNG files."""
    (block,) = re.findall(r"```python\n# image_reward\.py\n(.*?)```", (REPO / "docs/rewards.md").read_text(), re.S)
    (tmp_path / "image_reward.py").write_text(block)
    kind = f"{tmp_path / 'image_reward.py'}:Score"
    own = ScorerConfig(kind=kind, python=PYTHON, path=str(folder), frames="all")
    config = RewardConfig(scorers={"image_reward": own})
    check_reward(config, 2)
    video = torch.rand(2, 3, 2, 240, 416, generator=torch.Generator().manual_seed(0))
    video[:, :, 1] *= 0.2
    prompts = ("a red circle", "snow")
    scores = load_scorers(config, CPU)[0]["image_reward"](video, prompts)
    asked = {}
    for number, frame in enumerate(video.movedim(2, 1).flatten(0, 1)):
        file = str(tmp_path / f"{number}.png")
        Image.fromarray((255 * frame).round().byte().movedim(0, -1).numpy()).save(file)
        asked[file] = prompts[number // 2]
    of_package = list(json.loads(package(SCORE, folder, json.dumps(asked))).values())
    assert scores.tolist() == pytest.approx([sum(of_package[:2]) / 2, sum(of_package[2:]) / 2], abs=1e-6)
    assert len({round(score, 4) for score in of_package}) == 4
