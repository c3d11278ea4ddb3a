"""Runs that name code of their own: made here, continued here, received, and with links among their files."""

import shutil
import sys
from pathlib import Path

import pytest
from helpers import SMALL

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.trust import Fact, asking, require

CODE = "def score(videos, prompts):\n    return videos[:, 0].flatten(1).mean(1)\n"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(CODE)
    return tmp_path


def test_a_python_for_a_scorer_of_this_package_is_named(capsys):
    """Its kind is no code, so nothing asks for trust."""
    words = [*SMALL["dance_grpo"], "--reward.python", sys.executable, "--output", "run"]
    assert main(words) == 2
    assert "reward.python is for scorers of files: reward.kind must be" in capsys.readouterr().err


def test_an_answer_that_cannot_be_written_is_asked_for_again(monkeypatch):
    """A command that was trusted asks nothing a second time."""
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    fact = Fact("reward.kind", "run", "own.py:score", "/own.py:score")
    with asking(["--trust", "--steps", "1"]) as words:
        assert words == ["--steps", "1"]
        require([fact])
    with asking(["--reward.kind", "own.py:score"]):
        require([fact])
    with asking([]), pytest.raises(UserError, match="add --trust"):
        require([fact])


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
    words += ["--encoders.cache", "cache", "--checkpoint-mirror", f"file://{home}/mirror"]
    assert main([*words, "--validate-every", "0"]) == 0
    assert main(["--resume", "run"]) == 0 and main(["--resume", "run", "--steps", "2"]) == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "another"))
    Path("own.py").write_text("raise SystemExit(9)\n")
    for command in (["--resume", "run", "--steps", "3"], ["--config", "run/config.yaml", "--output", "b"]):
        assert main(command) == 2
        assert "  reward.kind        run " in capsys.readouterr().err
    Path("own.py").write_text(CODE)
    assert main(["--resume", "run", "--steps", "3", "--trust"]) == 0
