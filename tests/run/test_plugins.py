"""What an installed package offers by name: methods, model families and scorers, as entry points."""

import json
import shutil
import sys

import pytest
import torch
from helpers import SMALL, WAN

from unified_trainer.__main__ import COMMANDS, main
from unified_trainer.basics.errors import UserError
from unified_trainer.methods.finetune import Finetune
from unified_trainer.models.wan.family import WAN as WAN_FAMILY
from unified_trainer.rewards.base import ScorerConfig
from unified_trainer.rewards.scorers import scorer_kind
from unified_trainer.run.registry import FAMILIES, add_families, family_of, method_named
from unified_trainer.tools.overview import overview

POINTS = """\
[unified_trainer.methods]
own_finetune = own_package:OwnFinetune
wrong = own_package:score

[unified_trainer.families]
OwnPipeline = own_package:OWN

[unified_trainer.scorers]
own_score = own_package:score
"""
CODE = """\
import dataclasses
from unified_trainer.methods.finetune import Finetune
from unified_trainer.models.wan.family import WAN

class OwnFinetune(Finetune):
    pass

OWN = dataclasses.replace(WAN, pipelines=("OwnPipeline",))

def score(videos, prompts):
    return videos[:, 0].flatten(1).mean(1)
"""
FAMILY = """\
import dataclasses
from unified_trainer.models.wan.family import WAN
OWN = dataclasses.replace(WAN, pipelines=("Own{}",))
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with entry points, as pip leaves it."""
    (tmp_path / "own_package.py").write_text(CODE)
    about = tmp_path / "own_package-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("own_package", None)


def model_of(folder, pipeline: str):
    """A model folder of this pipeline class, without networks."""
    folder.mkdir()
    index = json.loads((WAN / "model_index.json").read_text()) | {"_class_name": pipeline}
    (folder / "model_index.json").write_text(json.dumps(index))
    return str(folder)


def test_a_method_of_an_installed_package_has_a_name(package):
    method = method_named("own_finetune")
    assert method.__name__ == "OwnFinetune" and issubclass(method, Finetune)
    page = overview(COMMANDS, 100)
    assert "own_finetune" in page and "Of an installed package: own_package:OwnFinetune." in page
    with pytest.raises(UserError, match="did you mean own_finetune"):
        method_named("own_finetun")
    with pytest.raises(UserError, match="--method wrong is not a subclass"):
        method_named("wrong")


def test_a_family_of_an_installed_package_is_found_by_the_class_of_the_model_folder(package, tmp_path, monkeypatch):
    monkeypatch.setattr("unified_trainer.run.registry.FAMILIES", dict(FAMILIES))
    family, folder = family_of("student", model_of(tmp_path / "model", "OwnPipeline"))
    assert family.pipelines == ("OwnPipeline",) and family.model == WAN_FAMILY.model and folder == tmp_path / "model"
    with pytest.raises(
        UserError,
        match="AbsentPipeline is no pipeline of diffusers",
    ):
        family_of("student", model_of(tmp_path / "absent", "AbsentPipeline"))


def test_a_scorer_of_an_installed_package_has_a_name(package):
    kind = scorer_kind(ScorerConfig(kind="own_score"), "reward.scorers.x", 1.0)
    scorer = kind.load(ScorerConfig(kind="own_score"), None)
    videos = torch.rand(2, 3, 1, 4, 4)
    assert torch.equal(scorer(videos, ("a", "b")), videos[:, 0].flatten(1).mean(1)) and kind.name == "own_score"
    with pytest.raises(UserError, match=r"have .*, own_score, or path/to/file.py:NAME"):
        scorer_kind(ScorerConfig(kind="absent"), "reward.scorers.x", 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["plan", "preprocess"])
def test_commands_know_families_outside_the_package(tmp_path, command):
    folder, index = tmp_path / "own_model", json.loads((WAN / "model_index.json").read_text())
    shutil.copytree(WAN, folder)
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": f"Own{command}"}))
    (tmp_path / "family.py").write_text(FAMILY.format(command))
    (tmp_path / "prompts.txt").write_text("a red circle\n")
    words = {
        "plan": ["--method", "finetune", "--student.path", str(folder), "--recipe", "tiny"],
        "preprocess": [str(tmp_path / "prompts.txt"), str(tmp_path / "out"), "--model", str(folder)],
    }
    words["preprocess"] += ["--recipe", "tiny"]
    assert main([command, *words[command]]) == 2  # no family has this pipeline
    assert main([command, *words[command], "--families", f"{tmp_path}/family.py:OWN"]) == 0
    del FAMILIES[f"Own{command}"]


@pytest.mark.slow
def test_commands_take_the_family_of_a_run_from_another_place(tmp_path, capsys):
    folder, index = tmp_path / "own_model", json.loads((WAN / "model_index.json").read_text())
    shutil.copytree(WAN, folder)
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "Ownmoved"}))
    (tmp_path / "family.py").write_text(FAMILY.format("moved"))
    run = [*SMALL["finetune"], "--steps", "1", "--student.path", str(folder), "--recipe", "tiny"]
    assert main([*run, "--output", str(tmp_path / "run"), "--families", f"{tmp_path}/family.py:OWN"]) == 0
    del FAMILIES["Ownmoved"]
    (tmp_path / "family.py").rename(tmp_path / "moved.py")
    words = {
        "sample": ["sample", str(tmp_path / "run"), "--prompts", "a", "--output", str(tmp_path / "videos")],
        "export": ["export", str(tmp_path / "run"), str(tmp_path / "out")],
    }
    for command in words.values():
        assert main(command) == 2 and "family.py" in capsys.readouterr().err
        assert main([*command, "--families", f"{tmp_path}/moved.py:OWN"]) == 0
        del FAMILIES["Ownmoved"]


def test_families_must_be_families(package, monkeypatch):
    monkeypatch.setattr("unified_trainer.run.registry.FAMILIES", dict(FAMILIES))
    with pytest.raises(UserError, match="--families own_package:score is a function"):
        add_families(["own_package:score"])
    add_families(["own_package:OWN"])
    assert set(sys.modules["unified_trainer.run.registry"].FAMILIES) == {*FAMILIES, "OwnPipeline"}
