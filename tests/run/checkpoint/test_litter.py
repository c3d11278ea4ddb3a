"""What a kill leaves in a run directory goes with the next command that holds the lock, and nothing else does."""

import shutil
from pathlib import Path

import pytest
from helpers import ALONE, SMALL, files_of

from unified_trainer.__main__ import main
from unified_trainer.run.checkpoint.manager import Keep, to_remove
from unified_trainer.run.checkpoint.run_lock import claimed

STEPS = 3


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of three steps that kept every checkpoint."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    words = ["--steps", str(STEPS), "--checkpoint-every", "1", "--keep-last", str(STEPS), "--validate-every", "0"]
    assert main([*SMALL["finetune"], *words, "--output", str(folder)]) == 0
    return folder


def littered(folder: Path, outside: Path) -> None:
    """Put into a run directory what kills leave there, and links to a file and a folder outside of it."""
    for name in (".lock", ".lock.now.host.7", "config.tmp", "metrics.tmp", "checkpoints/.step_2.json"):
        (folder / name).write_text("process 1 on another machine")
    for name in (".step_3.tmp", ".step_1.old"):
        (folder / "checkpoints" / name / "student").mkdir(parents=True)
    outside.mkdir()
    (outside / "mine").write_text("mine")
    (folder / "report.tmp").symlink_to(outside / "mine")
    (folder / "checkpoints" / ".step_9.tmp").symlink_to(outside, target_is_directory=True)


@pytest.mark.slow
def test_a_command_that_finds_the_run_finished_removes_it(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    littered(run, tmp_path / "elsewhere")
    (run / "notes.tmp").write_text("mine")
    assert main(["--resume", str(run), "--trust"]) == 0  # for the link that lies in it
    assert files_of(run) == {**files_of(finished), "notes.tmp": b"mine"}
    assert not [*run.glob(".*"), *(run / "checkpoints").glob(".*")]
    assert files_of(tmp_path / "elsewhere") == {"mine": b"mine"}


def test_who_holds_the_lock_removes_it(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    littered(run, tmp_path / "elsewhere")
    (run / "notes.tmp").write_text("mine")
    with claimed(run, ALONE):
        left = {path.name for path in run.rglob("*")}
    assert left == {"notes.tmp", "checkpoints", ".lock"}
    assert (tmp_path / "elsewhere" / "mine").read_text() == "mine"


@pytest.mark.slow
def test_an_old_checkpoint_that_a_kill_left_goes(finished, tmp_path):
    """Killed between the rename that completes the last checkpoint and the removal of the one that it replaces."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    assert not to_remove(run / "checkpoints", Keep(STEPS)) and to_remove(run / "checkpoints", Keep(STEPS - 1))
    assert main(["--resume", str(run), "--keep-last", "2"]) == 0
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_2", "step_3"]


@pytest.mark.slow
def test_the_report_of_a_run_that_its_last_kill_finished_is_written(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    assert main(["--resume", str(run), "--report"]) == 0
    assert "<html" in (run / "report.html").read_text()


@pytest.mark.slow
def test_metrics_that_are_gone_are_said_and_those_that_are_no_file_refused(finished, tmp_path, capsys):
    run, more = tmp_path / "run", ["--steps", str(STEPS + 1)]
    shutil.copytree(finished, run)
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    before = files_of(run)
    assert main(["--resume", str(run), *more]) == 2
    assert "metrics.jsonl is no file: move it away" in capsys.readouterr().err and files_of(run) == before
    (run / "metrics.jsonl").rmdir()
    assert main(["--resume", str(run), *more]) == 0
    assert f"warning: {run}/metrics.jsonl is gone: its curves begin after step {STEPS}" in " ".join(
        capsys.readouterr().out.split()
    )
