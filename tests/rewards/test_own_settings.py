"""Settings of a scorer's own: from flags, files and resumed runs to typed values, in this process and in another."""

import re
import sys
import traceback
from dataclasses import dataclass

import pytest
import torch
from helpers import CPU, REPO, SMALL, metrics_of, run

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import read_yaml
from unified_trainer.rewards.base import RewardConfig, ScorerConfig, of_images
from unified_trainer.rewards.own_settings import ScorerSettings, by_form, typed
from unified_trainer.rewards.scorers import check_reward, load_scorers
from unified_trainer.run.settings.command_line import parse
from unified_trainer.run.settings.config import save

pytestmark = pytest.mark.slow

# A user's file: a scorer with declared settings.
FILE = """
from dataclasses import dataclass
from typing import Literal

import torch

from unified_trainer.basics.errors import UserError
from unified_trainer.rewards.base import of_images
from unified_trainer.rewards.own_settings import ScorerSettings


@dataclass(frozen=True)
class Level(ScorerSettings):
    target: float
    channel: Literal["red", "green", "blue"] = "red"
    power: int = 1
    inverse: bool = False
    word: str = "circle"
    per_frame = True

    def check(self, config, key, frames):
        if self.power < 1:
            raise UserError(f"{key}.settings.power must be at least 1")

    def load(self, config, device):
        channel = ["red", "green", "blue"].index(self.channel)
        sign = 1 if self.inverse else -1

        def score(images, prompts):
            asked = torch.tensor([float(self.word in prompt) for prompt in prompts])
            return asked + sign * (images[:, channel].flatten(1).mean(1) - self.target).abs() ** self.power

        return of_images(score, config.batch, config.top_fraction)


"""
# Another one, which needs nothing of the package: it runs in any Python.
PLAIN = """
class Plain:
    def __init__(self, settings):
        self.gain = settings["settings"]["gain"]
        assert settings["settings"]["name"] == "x" and type(self.gain) is float

    def __call__(self, videos, prompts):
        return [self.gain * float(video.mean()) for video in videos]


def broken(videos, prompts):
    return {}[prompts[0]]
"""
VIDEO = torch.rand(2, 3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
PROMPTS = ("a red circle", "a blue square")


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path / "mine.py"


@pytest.fixture
def plain(tmp_path):
    (tmp_path / "plain.py").write_text(PLAIN)
    return tmp_path / "plain.py"


def scored(config: ScorerConfig):
    reward = RewardConfig(scorers={"mine": config})
    check_reward(reward, 4)
    return load_scorers(reward, CPU)[0]["mine"](VIDEO, PROMPTS)


def test_declared_settings_are_typed(file):
    given = {"target": "0.25", "channel": "blue", "power": "2", "inverse": "True", "word": "square"}
    config = ScorerConfig(kind=f"{file}:Level", frames="all", settings=given)
    expected = ((VIDEO[:, 2].flatten(2).mean(2) - 0.25) ** 2).mean(1) + torch.tensor([0.0, 1.0])
    torch.testing.assert_close(scored(config), expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"reward\.scorers\.mine\.settings\.target must be given: Level has no default"),
        ({"target": "high"}, r"mine\.settings\.target must be a number, not 'high'"),
        ({"target": "inf"}, r"mine\.settings\.target must be a finite number, not inf"),
        ({"target": "1", "power": "1.5"}, r"mine\.settings\.power must be a whole number, not '1.5'"),
        ({"target": "1", "inverse": "maybe"}, r"mine\.settings\.inverse must be true or false, not 'maybe'"),
        ({"target": "1", "channel": "pink"}, r"mine\.settings\.channel must be one of red, green, blue, not 'pink'"),
        ({"target": "1", "powr": "2"}, r"mine\.settings 'powr' is not known; did you mean power"),
        ({"target": "1", "power": "0"}, r"mine\.settings\.power must be at least 1"),
    ],
)
def test_wrong_settings_are_refused(file, given, message):
    config = ScorerConfig(kind=f"{file}:Level", settings=given)
    with pytest.raises(UserError, match=message):
        check_reward(RewardConfig(scorers={"mine": config}), 4)


def test_the_scorer_of_the_guide(tmp_path):
    """The file of docs/rewards.md is a scorer as it stands."""
    (block,) = re.findall(r"```python\n# bright\.py\n(.*?)```", (REPO / "docs/rewards.md").read_text(), re.S)
    (tmp_path / "bright.py").write_text(block)
    kind = f"{tmp_path / 'bright.py'}:Bright"
    config = ScorerConfig(kind=kind, frames="all", top_fraction=0.25, settings={"target": "0.4"})
    best = -((VIDEO.mean((1, 3, 4)) - 0.4) ** 2).amin(1)
    torch.testing.assert_close(scored(config), best)
    with pytest.raises(UserError, match=r"mine\.settings\.target must be from 0 to 1, not 4"):
        check_reward(RewardConfig(scorers={"mine": ScorerConfig(kind=kind, settings={"target": "4"})}), 4)


def test_a_field_of_another_type_is_refused():
    @dataclass(frozen=True)
    class Listed(ScorerSettings):
        words: list = ()

    with pytest.raises(UserError, match=r"key\.settings\.words is declared as .*list"):
        typed(Listed, {"words": "a"}, "key")


def test_a_class_that_is_no_dataclass_says_so():
    class Forgotten(ScorerSettings):
        gain: float = 1.0

    with pytest.raises(UserError, match=r"key\.kind: Forgotten is no dataclass; write @dataclass"):
        typed(Forgotten, {"gain": "2"}, "key")


def test_a_class_without_load_says_so():
    with pytest.raises(NotImplementedError, match="ScorerSettings must define load"):
        ScorerSettings().load(ScorerConfig(), CPU)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("3", 3), ("-2", -2), ("0.5", 0.5), ("1e-3", 0.001), (".5", 0.5), ("007", "007"), ("True", True)],
        *[("false", False), ("nan", "nan"), ("1_000", "1_000"), ("a b", "a b"), ("", "")],
    ],
)
def test_a_value_without_a_declared_type_is_read_by_its_form(text, value):
    assert by_form(text) == value and type(by_form(text)) is type(value)


@pytest.mark.parametrize("own_python", ["", pytest.param(sys.executable, marks=pytest.mark.slow)])
def test_a_plain_class_is_called_with_them(plain, own_python):
    """In this process and in a Python of its own: the file is the same."""
    config = ScorerConfig(kind=f"{plain}:Plain", python=own_python, frames="all", settings={"gain": "2.5", "name": "x"})
    torch.testing.assert_close(scored(config), 2.5 * VIDEO.flatten(1).mean(1))


def test_a_function_in_another_python_takes_none(plain):
    config = ScorerConfig(kind=f"{plain}:broken", python=sys.executable, settings={"gain": "1"})
    with pytest.raises(UserError, match=r"mine\.settings\.gain: only a class takes settings"):
        scored(config)


# From the command line and back.


def test_flags_and_files_give_the_same_settings(tmp_path):
    """Values stay texts, so that 007 and 1e-3 come back from config.yaml as they were."""
    flags = [
        "--reward.settings.code",
        "007",
        "--reward.scorers.a.settings.low-bound=-1",
        "--reward.scorers.a.kind",
        "b",
    ]
    run = parse([*flags, "--reward.scorers.a.settings.rate", "1e-3"])
    assert run.reward.settings == {"code": "007"}
    assert run.reward.scorers["a"].settings == {"low_bound": "-1", "rate": "1e-3"}
    assert run.reward.named()["hpsv3"].settings == {"code": "007"}
    save(run, tmp_path / "config.yaml")
    again = parse(["--config", str(tmp_path / "config.yaml"), "--reward.scorers.a.settings.rate", "2"])
    assert again.reward.settings == run.reward.settings
    assert again.reward.scorers["a"].settings == {"low_bound": "-1", "rate": "2"}
    text = "reward: {scorers: {a: {kind: b, settings: {number: 3, truth: yes, word: up}}}}"
    (tmp_path / "own.yaml").write_text(text)
    read = parse(["--config", str(tmp_path / "own.yaml")]).reward.scorers["a"].settings
    assert read == {"number": "3", "truth": "True", "word": "up"}


@pytest.mark.parametrize("value", ["[1, 2]", "", "{deep: 1}"])
def test_a_setting_is_a_scalar(tmp_path, value):
    file = tmp_path / "own.yaml"
    file.write_text(f"reward: {{scorers: {{a: {{kind: b, settings: {{word: {value}}}}}}}}}")
    with pytest.raises(UserError, match=r"own\.yaml: reward\.scorers\.a\.settings\.word"):
        parse(["--config", str(file)])


def test_a_run_trains_resumes_and_validates_with_them(file, plain, run_folder, capsys):
    own = ["--reward.scorers.mine.kind", f"{file}:Level", "--reward.scorers.mine.settings.target", "0.25"]
    held_out = ["--reward.scorers.held.kind", f"{plain}:Plain", "--reward.scorers.held.settings.gain", "2.5"]
    held_out += ["--reward.scorers.held.settings.name", "x"]
    run("dance_grpo", run_folder, *own, *held_out, "--reward.scorers.held.weight", "0", "--validate-every", "1")
    shown = " ".join(re.sub("[^ -~]", " ", capsys.readouterr().out).split())
    assert "scorer mine target 0.25, first frame, scale 1, weight 1" in shown
    assert read_yaml(run_folder / "config.yaml")["reward"]["scorers"]["mine"]["settings"] == {"target": "0.25"}
    run_again = ["--resume", str(run_folder), "--steps", "2"]
    assert main(run_again) == 0
    train, validation = ({"train/reward/mine"}, {"validation/reward/mine", "validation/reward/held"})
    found = set().union(*metrics_of(run_folder))
    assert train | validation <= found and "train/reward/held" not in found
    assert main([*run_again, "--reward.scorers.mine.settings.target", "0.5"]) == 2
    assert "cannot change reward.scorers.mine.settings.target: '0.25' -> '0.5'" in capsys.readouterr().err


def test_a_failure_names_the_file_the_scorer_and_the_prompts(plain, run_folder):
    with pytest.raises(KeyError) as caught:
        main([*SMALL["dance_grpo"], "--reward.scorers.mine.kind", f"{plain}:broken", "--output", str(run_folder)])
    shown = "".join(traceback.format_exception(caught.value))
    assert f'File "{plain}", line' in shown and "while working on scorer mine, prompts '" in shown


# Aggregation over frames.


@pytest.mark.parametrize(("fraction", "frames"), [(1.0, 10), (0.3, 3), (0.25, 2), (0.01, 1), (0.99, 10)])
def test_the_highest_frames_are_averaged(fraction, frames):
    video = torch.rand(3, 3, 10, 2, 2, generator=torch.Generator().manual_seed(1))
    of_frames = video.mean((1, 3, 4))
    scorer = of_images(lambda images, prompts: images.mean((1, 2, 3)), 4, fraction)
    expected = of_frames.sort().values[:, -frames:].mean(1)
    torch.testing.assert_close(scorer(video, ["a", "b", "c"]), expected)


def test_the_setting_reaches_a_scorer_of_images(file):
    settings = {"target": "0.25"}
    config = ScorerConfig(kind=f"{file}:Level", frames="all", top_fraction=0.5, settings=settings)
    of_frames = 1 - (VIDEO[0, 0].flatten(1).mean(1) - 0.25).abs()
    torch.testing.assert_close(scored(config)[0], of_frames.sort().values[2:].mean())
