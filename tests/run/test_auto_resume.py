"""--resume auto: a launcher gives one command line again and again, and the run goes on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
import yaml
from helpers import REPO, SMALL, assert_same, checkpoint_of, flags, metrics_of, read_until, refused

from unified_trainer.__main__ import main
from unified_trainer.run.settings.auto_resume import without_auto

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
from launch import under_torchrun
from warm_ray import quick_ranks

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def run_folder_with(tmp_path: Path, **settings: object) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({"method": "finetune", "steps": 1} | settings))
    return folder


def test_other_command_lines_stay():
    assert without_auto(["--resume", "runs/x", "--steps", "3"]) == ["--resume", "runs/x", "--steps", "3"]
    assert without_auto(["--resume=./auto"]) == ["--resume=./auto"]


@pytest.mark.parametrize("words", [["--resume", "auto"], ["--resume=auto"]])
def test_an_empty_folder_begins_and_a_run_continues(tmp_path, words):
    given = [
        "--method",
        "finetune",
        *words,
        "--config",
        "saved.yaml",
        "--output",
        str(tmp_path / "run"),
        "--steps",
        "3",
    ]
    begun = ["--method", "finetune", "--config", "saved.yaml", "--output", str(tmp_path / "run"), "--steps", "3"]
    assert without_auto(given) == begun
    folder = run_folder_with(tmp_path)
    kept = [word for word in begun if word not in ("--config", "saved.yaml")]
    assert without_auto(given) == [*kept, f"--resume={folder}"]


def test_a_hub_id_keeps_the_commit_of_the_beginning(tmp_path):
    """The hub may have moved on meanwhile; another model is still refused by --resume."""
    folder = run_folder_with(tmp_path, student={"path": f"team/model@{COMMIT}"}, critic={"path": f"team/c@{COMMIT}"})
    words = ["--student.path", "team/model", "--critic.path=other/c", "--output", str(folder), "--resume", "auto"]
    assert without_auto(words) == ["--critic.path=other/c", "--output", str(folder), f"--resume={folder}"]


def test_the_main_rank_decides_for_all(tmp_path, monkeypatch):
    """A shared disk may not show a new file at once."""
    store, words = dist.HashStore(), ["--output", str(tmp_path / "run"), "--resume", "auto"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert without_auto(words, store) == words[:2]
    folder = run_folder_with(tmp_path)
    monkeypatch.setenv("RANK", "1")
    assert without_auto(words, store) == words[:2]
    assert without_auto(words) == [*words[:2], f"--resume={folder}"]


def test_without_a_folder_it_is_refused(capsys):
    assert "--resume auto needs --output DIR" in refused(capsys, *SMALL["finetune"], "--resume", "auto")


@pytest.mark.slow
def test_the_same_command_goes_on_where_it_was(tmp_path, capsys):
    """Two starts of two steps each are one run of four, bit for bit; a start more has nothing to do."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([*SMALL["finetune"], "--steps", "4", "--output", str(whole)]) == 0
    for steps in ("2", "4", "4"):
        assert main([*SMALL["finetune"], "--steps", steps, "--output", str(parts), "--resume", "auto"]) == 0
    said = capsys.readouterr().out
    assert "continuing after step 2" in said and "is at step 4 of 4: nothing to do" in said
    assert_same(checkpoint_of(parts, 4), checkpoint_of(whole, 4))
    assert metrics_of(parts) == metrics_of(whole)


@pytest.mark.slow
def test_a_setting_that_changes_what_a_step_computes_is_still_refused(tmp_path, capsys):
    words = [*SMALL["finetune"], "--output", tmp_path / "run", "--resume", "auto"]
    assert main([*map(str, words)]) == 0
    said = refused(capsys, *words, "--seed", "5")
    assert f"--resume {tmp_path / 'run'} cannot change seed: 0 -> 5" in said


@pytest.mark.ranks
@pytest.mark.kill
def test_torchrun_starts_a_killed_run_again_and_it_goes_on(tmp_path):
    words = [*SMALL["finetune"], *flags({"steps": 5, "checkpoint-every": 1, "output": tmp_path / "run"})]
    started = under_torchrun(2, "--max-restarts", "1", "-m", "unified_trainer", *words, "--resume", "auto")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with quick_ranks() as variables, subprocess.Popen(started, cwd=REPO, env=variables, **pipes) as job:
        try:
            read_until(job, "step 2/5")
            ranks = {child.environ()["RANK"]: child for child in psutil.Process(job.pid).children()}
            os.kill(ranks["1"].pid, signal.SIGKILL)
            said = job.communicate(timeout=300)[0]
        finally:
            job.terminate()
    assert job.returncode == 0, said
    assert "continuing after step" in said and "step 5/5" in said, said
