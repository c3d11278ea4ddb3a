"""Code that a saved setting names runs only if the command line names it, or if the user has trusted it."""

import shutil
import sys
from pathlib import Path

import pytest
from helpers import SMALL

from unified_trainer.__main__ import main
from unified_trainer.basics import trust
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.plugins import load_object
from unified_trainer.basics.trust import asking, check_code, check_program
from unified_trainer.rewards.base import ScorerConfig
from unified_trainer.rewards.scorers import scorer_kind

CODE = "def score(videos, prompts):\n    return videos[:, 0].flatten(1).mean(1)\n"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(CODE)
    return tmp_path


def refused(spec: str, *words: str) -> bool:
    with asking(words):
        try:
            check_code(spec, "reward.kind")
        except UserError as error:
            assert "add --trust to run it" in str(error)
            return True
    return False


@pytest.mark.parametrize("spec", ["own.py:score", "./own.py:score", "os:system"])
def test_code_that_is_not_named_is_refused_and_not_executed(spec):
    assert refused(spec) and refused(spec, "--reward.kind", "other.py:score") and not trust._file().exists()
    with asking([]), pytest.raises(UserError, match=r"reward\.kind .* is code that a saved setting names"):
        load_object(spec, "reward.kind")


@pytest.mark.parametrize(
    "words",
    [
        ["--trust"],
        ["--reward.kind", "own.py:score"],
        ["--reward.kind=own.py:score"],
        ["--reward.kind", "{home}/own.py:score"],
    ],
)
def test_code_that_is_named_or_trusted_once_runs_from_then_on(home, words):
    """Until it changes; where it lies does not matter."""
    assert not refused("own.py:score", *(word.format(home=home) for word in words))
    assert not refused("own.py:score") and trust._file().stat().st_mode & 0o077 == 0
    shutil.copyfile("own.py", "copy.py")
    assert not refused("copy.py:score")
    Path("own.py").write_text(CODE + "\n")
    assert refused("own.py:score")


def test_a_module_is_trusted_in_its_folder(home, monkeypatch):
    (home / "other").mkdir()
    for folder in (home, home / "other"):
        (folder / "own_module.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(home))
    assert refused("own_module:score") and not refused("own_module:score", "--reward.kind", "own_module:score")
    assert not refused("own_module:score")
    monkeypatch.syspath_prepend(str(home / "other"))
    assert refused("own_module:score") and "own_module" not in sys.modules


def test_a_python_for_a_scorer_of_this_package_is_named(capsys):
    """Its kind is no code, so nothing asks for trust."""
    words = [*SMALL["dance_grpo"], "--reward.python", sys.executable, "--output", "run"]
    assert main(words) == 2
    assert "reward.python runs scorers of files: reward.kind must be" in capsys.readouterr().err


def test_this_package_and_a_program_in_python_are_not_asked_about():
    assert not refused("unified_trainer.methods.dmd2:DMD2")
    check_code("own.py:score", "reward.kind")
    with asking(["--trust"]) as words:
        assert words == []


def test_another_python_is_asked_about():
    with asking([]), pytest.raises(UserError, match=r"reward\.python \S+python\S* is code that a saved setting names"):
        check_program(sys.executable, "reward.python")
    with asking(["--reward.python", sys.executable, "--reward.kind", "own.py:score"]):
        scorer_kind(ScorerConfig(kind="own.py:score", python=sys.executable), "reward", 1.0)
    with asking([]):
        check_program(sys.executable, "reward.python")


def test_a_home_that_cannot_be_written_is_asked_again(monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    assert not refused("own.py:score", "--trust") and refused("own.py:score")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert main([*SMALL["dance_grpo"], "--output", str(folder), "--report"]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        ".lock",
        "environment.jsonl",
        "metrics.jsonl",
        "metrics.tmp",
        "config.tmp",
        "report.tmp",
        "checkpoints/.step_2.json",
        "validation/step_2/samples.jsonl",
        "validation/step_2/contact_sheet.png",
        "validation/step_2/0.mp4",
    ],
)
def test_a_link_in_a_received_run_is_not_written_through(home, finished, name):
    """The run ends with one line, or goes on beside the link."""
    (home / "own").write_text("mine")
    shutil.copytree(finished, "run")
    place = home / "run" / name
    place.unlink(missing_ok=True)
    place.parent.mkdir(exist_ok=True, parents=True)
    place.symlink_to(home / "own")
    assert main(["--resume", "run", "--steps", "2"]) in (0, 2)
    assert (home / "own").read_text() == "mine"


@pytest.mark.slow
def test_a_received_run_asks_before_its_code_runs(home, capsys, monkeypatch):
    """On the machine that made it no command asks; elsewhere each does, and nothing has run."""
    words = [*SMALL["dance_grpo"], "--reward.kind", "own.py:score", "--reward.path", "", "--output", "run"]
    assert main([*words, "--validate-every", "0"]) == 0
    assert main(["--resume", "run"]) == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "another"))
    Path("own.py").write_text("raise SystemExit(9)\n")
    for command in (["--resume", "run", "--steps", "2"], ["--config", "run/config.yaml", "--output", "b"]):
        assert main(command) == 2
        assert "own.py:score is code that a saved setting names" in capsys.readouterr().err
    Path("own.py").write_text(CODE)
    assert main(["--resume", "run", "--steps", "2", "--trust"]) == 0
