"""A scorer outside the package: one file, named by a setting, with weights and prompts."""

import json
import re
from importlib import import_module
from pkgutil import iter_modules

import pytest
import torch
from helpers import CPU, REPO, SMALL, run
from safetensors.torch import save_file

from unified_trainer import rewards
from unified_trainer.__main__ import main
from unified_trainer.api import configure
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.plugins import load_object
from unified_trainer.rewards.base import RewardConfig, ScorerConfig, ScorerKind
from unified_trainer.rewards.scorers import KINDS, check_reward, load_scorers
from unified_trainer.run.settings.command_line import parse

# A user's file: a probe of the mean color with weights from a file, plus a bonus for the word "red".
PROBE = """
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from unified_trainer.basics.errors import MissingFileError
from unified_trainer.rewards.base import ScorerKind, check_path, of_images

WEIGHTS = "probe.safetensors"


@dataclass(frozen=True)
class Probe:
    color: torch.Tensor

    def __call__(self, images, prompts):
        asked = torch.tensor([float("red" in prompt) for prompt in prompts], device=images.device)
        return images.mean((2, 3)) @ self.color + asked


def load(config, device):
    file = Path(config.path) / WEIGHTS
    if not file.is_file():
        raise MissingFileError(f"{file} is missing")
    return of_images(Probe(load_file(file)["color"].to(device)), config.batch)


COLOR_PROBE = ScorerKind("color_probe", load, check_path, min_frames=2)


def brightness(videos, prompts):
    return videos.flatten(1).mean(1)


NUMBER = 1
"""
COLOR = torch.tensor([2.0, -1.0, 0.5])
VIDEO = torch.rand(2, 3, 5, 8, 8, generator=torch.Generator().manual_seed(0))
PROMPTS = ("a red circle", "a blue square")


@pytest.fixture
def probe(tmp_path):
    """The user's file, with its weights in the same folder."""
    save_file({"color": COLOR}, tmp_path / "probe.safetensors")
    file = tmp_path / "probe.py"
    file.write_text(PROBE)
    return file


@pytest.mark.slow
def test_a_scorer_with_weights_and_prompts_trains_a_step(probe, run_folder):
    own = ["--reward.scorers.own.kind", f"{probe}:COLOR_PROBE", "--reward.scorers.own.path", str(probe.parent)]
    bright = ["--reward.scorers.bright.kind", f"{probe}:brightness", "--reward.scorers.bright.weight", "0"]
    run("dance_grpo", run_folder, *own, "--reward.scorers.own.frames", "all", *bright, "--validate-every", "1")
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    names = set().union(*lines)
    assert {"train/reward/own", "validation/reward/own", "validation/reward/bright"} <= names
    assert "train/reward/bright" not in names  # held out


def test_its_scores_are_those_of_the_file(probe):
    config = RewardConfig(
        kind=f"{probe}:COLOR_PROBE",
        path=str(probe.parent),
        frames="all",
        scorers={"bright": ScorerConfig(kind=f"{probe}:brightness")},
    )
    check_reward(config, 5)
    scorers, features = load_scorers(config, CPU)
    expected = VIDEO.mean((2, 3, 4)) @ COLOR + torch.tensor([1.0, 0.0])
    torch.testing.assert_close(scorers["COLOR_PROBE"](VIDEO, PROMPTS), expected)
    torch.testing.assert_close(scorers["bright"](VIDEO, PROMPTS), VIDEO.flatten(1).mean(1))
    assert features is None


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("COLOR_PROBE", {"path": ""}, r"reward\.scorers\.own\.path must be the folder of a .*COLOR_PROBE scorer"),
        ("COLOR_PROBE", {"frames": "first"}, "needs at least 2 frames of a video, but sees 1"),
        ("COLOR_PROBE", {"device": "abacus"}, r"reward\.scorers\.own\.device 'abacus' is no device that torch knows"),
        ("brightness", {}, r"reward\.scorers\.own\.path .*brightness has no weights"),
        ("NUMBER", {}, r"reward\.scorers\.own\.kind .*NUMBER is a int; expected a function of videos"),
        ("Path", {}, r"reward\.scorers\.own\.kind .*Path is a type; expected a function of .*, a class with __call__"),
        ("COLOR_PROBE", {"top_fraction": 0.5}, r"own\.top_fraction: .*COLOR_PROBE does not score frames one by one"),
        ("COLOR_PROBE", {"settings": {"a": "1"}}, r"own\.settings\.a: .*COLOR_PROBE has no settings of its own"),
        ("brightness", {"path": "", "settings": {"a": "1"}}, r"own\.settings\.a: .*brightness has no settings of its"),
        ("missing", {}, r"reward\.scorers\.own\.kind .*probe\.py defines no missing"),
    ],
)
def test_wrong_settings_are_refused_before_a_weight_is_read(probe, name, changes, message):
    (probe.parent / "probe.safetensors").unlink()
    part = ScorerConfig(**({"kind": f"{probe}:{name}", "path": str(probe.parent), "frames": "all"} | changes))
    with pytest.raises(UserError, match=message):
        check_reward(RewardConfig(scorers={"own": part}), 5)


@pytest.mark.slow
def test_a_missing_weight_file_ends_the_run_with_one_line(probe, run_folder, capsys):
    (probe.parent / "probe.safetensors").unlink()
    own = ["--reward.scorers.own.kind", f"{probe}:COLOR_PROBE", "--reward.scorers.own.path", str(probe.parent)]
    frames = ["--reward.scorers.own.frames", "all"]
    assert main([*SMALL["dance_grpo"], *own, *frames, "--output", str(run_folder)]) == 2
    assert "probe.safetensors is missing" in capsys.readouterr().err


def test_every_kind_of_the_package_is_found_under_its_name():
    modules = (import_module(found.name) for found in iter_modules(rewards.__path__, f"{rewards.__name__}."))
    defined = {id(kind): kind for module in modules for kind in vars(module).values() if isinstance(kind, ScorerKind)}
    assert {kind.name: kind for kind in defined.values()} == dict(KINDS)
    assert "color_probe" not in KINDS and KINDS.get("color_probe") is None


# Objects named by module or file.


def test_a_file_is_executed_once_and_a_module_is_imported(tmp_path):
    file = tmp_path / "thing.py"
    file.write_text("class Thing: ...\n\n\ndef other(): ...\n")
    thing = load_object(f"{file}:Thing", "key")
    assert load_object(f"{tmp_path}/../{tmp_path.name}/thing.py:Thing", "key") is thing
    assert thing.__module__.startswith("unified_trainer_plugin_thing_")
    assert load_object("unified_trainer.rewards.pixels:saturation", "key") is load_object(
        "unified_trainer.rewards.pixels:saturation", "other"
    )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("thing", "key 'thing' must be package.module:NAME or path/to/file.py:NAME"),
        ("thing.py:", "must be package.module:NAME"),
        ("a-b:NAME", "must be package.module:NAME"),
        ("absent.py:NAME", "key absent.py: no such file"),
        ("no_such_package.part:NAME", "key: no module no_such_package; install its package"),
        ("unified_trainer.absent:NAME", "key: no module unified_trainer.absent"),
        ("unified_trainer.basics.plugins:NAME", "unified_trainer.basics.plugins defines no NAME"),
    ],
)
def test_a_missing_object_names_its_key(spec, message):
    with pytest.raises(UserError, match=message):
        load_object(spec, "key")


@pytest.mark.parametrize(
    ("text", "error"), [("1 / 0\n", ZeroDivisionError), ("import absent_of_all\n", ModuleNotFoundError)]
)
def test_an_error_inside_a_file_keeps_its_traceback(tmp_path, text, error):
    file = tmp_path / "broken.py"
    file.write_text(text)
    for _ in range(2):  # also the second time: a module that failed is forgotten
        with pytest.raises(error) as caught:
            load_object(f"{file}:NAME", "key")
        assert not isinstance(caught.value, UserError) and str(caught.traceback[-1].path) == str(file)
        assert caught.value.__notes__ == [f"while working on key {file}:NAME"]


def test_a_scorer_whose_package_is_missing_may_have_a_python_of_its_own(tmp_path):
    (tmp_path / "broken.py").write_text("import absent_of_all\n")
    kind = f"{tmp_path / 'broken.py'}:score"
    with pytest.raises(ModuleNotFoundError) as caught:
        check_reward(RewardConfig(scorers={"own": ScorerConfig(kind=kind)}), 5)
    setting, hint = caught.value.__notes__
    assert setting == f"while working on reward.scorers.own.kind {kind}"
    assert hint.startswith("install absent_of_all here, or set reward.scorers.own.python")


def test_the_scorer_of_the_guide(tmp_path):
    """The file of docs/rewards.md is a scorer as it stands: the mean red channel, negative for other prompts."""
    (block,) = re.findall(r"```python\n# red\.py\n(.*?)```", (REPO / "docs/rewards.md").read_text(), re.S)
    (tmp_path / "red.py").write_text(block)
    score = load_object(f"{tmp_path / 'red.py'}:score", "--reward.kind")
    videos = torch.rand(2, 3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    means = videos[:, 0].flatten(1).mean(1)
    torch.testing.assert_close(score(videos, ["a red circle", "a blue one"]), means * torch.tensor([1.0, -1.0]))


@pytest.mark.slow
def test_a_scorer_of_another_kind_does_not_get_the_path_of_the_recipes_scorer(tmp_path, monkeypatch):
    """The command of docs/extend.md on the default recipe, which sets the path of its own scorer."""
    (words,) = re.findall(r"`--reward\.kind (my_reward\.py:score)`", (REPO / "docs/extend.md").read_text())
    (tmp_path / "my_reward.py").write_text("def score(videos, prompts):\n    return videos.flatten(1).mean(1)\n")
    (tmp_path / "mine.yaml").write_text(f"reward: {{kind: '{words}'}}\n")
    monkeypatch.chdir(tmp_path)
    method = ("--method", "dance_grpo")
    for flags in (("--reward.kind", words), (f"--reward.kind={words}",), ("--config", "mine.yaml")):
        reward = parse([*method, *flags]).reward
        assert (reward.kind, reward.path, reward.frames) == (words, "", "every")
        check_reward(reward, 17)
    assert configure("tiny", "dance_grpo", {"reward": {"kind": words}}).reward.path == ""
    assert parse([*method, "--reward.kind", "hpsv3"]).reward.path == "tiny"
    own = parse([*method, "--reward.kind", words, "--reward.path", "tiny"]).reward
    with pytest.raises(UserError, match=r"reward\.path tiny: my_reward\.py:score has no weights; leave it out"):
        check_reward(own, 17)
