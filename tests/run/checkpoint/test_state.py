"""Nothing sound is removed, nothing that is not finite is saved, and a full disk costs no step."""

import errno
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers import (
    ALONE,
    CPU,
    SMALL,
    assert_same,
    checkpoint_of,
    copy_of,
    files_of,
    fill_disk,
    finetune,
    metrics_of,
    run,
)

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import NotFiniteError
from unified_trainer.methods.finetune import FinetuneConfig
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.roles import learner
from unified_trainer.run.checkpoint import dcp as checkpoint
from unified_trainer.run.checkpoint import manifest
from unified_trainer.run.checkpoint.dcp import CheckpointError
from unified_trainer.run.checkpoint.manager import Keep, Saver
from unified_trainer.run.validation.report import Validation

STATE = {"a/weights/w": torch.ones(4), "a/updates": torch.tensor(3)}
SHARD = "a/weights/shard-00001-model-00001-of-00001.safetensors"


@pytest.fixture
def said():
    return []


@pytest.fixture
def saver(tmp_path, said):
    """Keeps the last checkpoint and the best one; it has saved step 1, the best, and steps 2 and 3."""
    with Saver(tmp_path / "checkpoints", ALONE, Keep(3, 1), said.append, asynchronous=False) as one:
        for step, reward in ((1, 9.0), (2, 1.0), (3, 2.0)):
            one.save(step, STATE, {"metrics": {"reward": reward}})
        yield one


def steps_in(root: Path) -> list[int]:
    return [manifest.step_of(folder) for folder in manifest.folders(root)]


# What is not ours, and what cannot be read.


def test_a_file_of_somebody_else_does_not_make_a_checkpoint_incomplete(tmp_path, saver, said):
    """Of a file browser, of NFS, of an archive from a Mac, of a user: the checkpoint is read, and stays."""
    folder = tmp_path / "checkpoints" / "step_3"
    for name in (".DS_Store", "a/weights/.DS_Store", ".nfs0001", "a/weights/._shard.safetensors", "a/notes.txt"):
        (folder / name).write_bytes(b"not ours")
    found, _, skipped = checkpoint.newest_sound(tmp_path, ALONE)
    loaded = {"a/weights/w": torch.zeros(4)}
    checkpoint.load(found, loaded, ALONE)
    assert found == folder and skipped == [] and loaded["a/weights/w"].tolist() == [1.0] * 4
    saver.save(4, STATE, {})
    assert steps_in(tmp_path / "checkpoints") == [1, 2, 3, 4] and said == []


@pytest.mark.parametrize("place", ["manifest.json", SHARD])
def test_a_checkpoint_that_cannot_be_read_now_is_left_as_it_is_and_said_once(tmp_path, saver, said, monkeypatch, place):
    before, folder = files_of(tmp_path / "checkpoints"), tmp_path / "checkpoints" / "step_2"
    original = Path.stat, Path.read_text

    def fail(file):
        if file == folder / place:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(file))

    monkeypatch.setattr(Path, "read_text", lambda self, *a, **k: (fail(self), original[1](self, *a, **k))[1])
    monkeypatch.setattr(Path, "stat", lambda self, **k: (fail(self), original[0](self, **k))[1])
    saver.forget(3)
    saver.forget(3)
    monkeypatch.undo()
    assert files_of(tmp_path / "checkpoints") == before
    (line,) = said
    assert line.startswith(f"warning: {folder} is left as it is: ") and "Stale file handle" in line


@pytest.mark.parametrize("spoil", ["cut", "absent"])
def test_a_manifest_that_shows_nothing_is_no_reason_to_remove(tmp_path, saver, said, spoil):
    file = tmp_path / "checkpoints" / "step_2" / "manifest.json"
    if spoil == "cut":
        file.write_text(file.read_text()[:-20])
    else:
        file.unlink()
    saver.forget(3)
    assert (file.parent / SHARD).is_file() and "step_2 is left as it is: manifest.json unreadable" in said[0]


def test_a_torn_checkpoint_goes_and_that_is_said_unless_it_is_among_the_best(tmp_path, saver, said):
    for step in (1, 2):
        file = tmp_path / "checkpoints" / f"step_{step}" / SHARD
        file.write_bytes(file.read_bytes()[:-1])
    saver.forget(3)
    assert steps_in(tmp_path / "checkpoints") == [1, 3]
    root = tmp_path / "checkpoints"
    assert said[0].startswith(f"warning: {root / 'step_1'} is among the best and is left as it is: {SHARD}")
    assert said[1].startswith(f"removed {root / 'step_2'}, which was not written to its end: {SHARD} is missing or not")


def test_a_removal_that_is_interrupted_leaves_no_half_of_a_checkpoint(tmp_path, saver, said, monkeypatch):
    """NFS keeps files that somebody reads. The rest goes with the next save."""
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    checkpoint.remove(tmp_path / "checkpoints" / "step_2")
    monkeypatch.undo()
    assert steps_in(tmp_path / "checkpoints") == [1, 3]
    assert (tmp_path / "checkpoints" / ".step_2.old" / SHARD).is_file()
    saver.save(4, STATE, {})
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step_1", "step_3", "step_4"] and said == []


@pytest.mark.parametrize("name", ["step_\u00b2", "step_\u0664", "step_04", "step_", "step_4x"])
def test_a_folder_whose_name_is_no_number_is_no_checkpoint(tmp_path, saver, name):
    copy_of(tmp_path / "checkpoints" / "step_3", tmp_path / "checkpoints" / name)
    assert steps_in(tmp_path / "checkpoints") == [1, 2, 3]
    assert checkpoint.find(tmp_path)[0].name == "step_3"


# Finite.


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_not_finite_is_never_saved(tmp_path, saver, said, value, asynchronous):
    before = files_of(tmp_path)
    bad = STATE | {"a/optimizer/w/exp_avg": torch.tensor([0.0, value], dtype=torch.bfloat16)}
    one = Saver(tmp_path / "checkpoints", ALONE, Keep(3), said.append, asynchronous=asynchronous)
    with one, pytest.raises(NotFiniteError) as raised:
        one.save(4, bad, {})
    words = f"step 4 is not saved: a/optimizer/w/exp_avg holds NaN or inf; the newest checkpoint is {tmp_path}"
    assert str(raised.value).startswith(words) and files_of(tmp_path) == before and said == []


class OtherRank(Mesh):
    """A mesh with another rank, on which every flag is set."""

    def any(self, flag):
        return True


def test_all_ranks_refuse_what_one_of_them_finds(tmp_path):
    one = Saver(tmp_path / "checkpoints", OtherRank(CPU), Keep(3), print, asynchronous=False)
    with one, pytest.raises(NotFiniteError, match="a tensor of another rank holds NaN or inf; there is no checkpoint"):
        one.save(4, STATE, {})
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_that_diverges_ends_with_its_last_finite_checkpoint(run_folder, capsys, monkeypatch):
    """A step without bounds makes a weight infinite: the step before it is the newest, and the message says so."""
    words = ["--checkpoint-every", "1", "--student.max-grad-norm", "0", "--student.weight-decay", "0"]
    run("finetune", run_folder, *words)
    monkeypatch.setattr(learner, "learning_rate_factor", lambda config, updates: 6e37 / config.learning_rate)
    decay = ["--student.weight-decay", "5", "--allow", "student.weight-decay"]
    assert main(["--resume", str(run_folder), "--steps", "4", *decay]) == 2
    said = capsys.readouterr().err
    assert "step 2 is not saved: student/weights/" in said and f"{run_folder / 'checkpoints' / 'step_1'}." in said
    assert steps_in(run_folder / "checkpoints") == [1]


# Saved first, then validated.


def test_what_a_validation_measured_is_added_to_the_checkpoint(tmp_path, saver):
    before = checkpoint_of(tmp_path, 3)
    saver.record(3, {"metrics": {"reward": 10.0}, "validation_pending": False})
    folder, metadata, skipped = checkpoint.newest_sound(tmp_path, ALONE)
    assert folder.name == "step_3" and metadata["metrics"] == {"reward": 10.0} and skipped == []
    assert_same(checkpoint_of(tmp_path, 3), before)
    saver.save(4, STATE, {})
    saver.save(5, STATE, {})
    assert steps_in(tmp_path / "checkpoints") == [3, 4, 5]  # now it is the best


def test_a_checkpoint_without_room_for_its_validation_stays_whole(tmp_path, saver, said, monkeypatch):
    before = files_of(tmp_path)
    fill_disk(monkeypatch, ".step_3.json")
    saver.record(3, {"metrics": {"reward": 10.0}})
    assert files_of(tmp_path) == before
    assert said[0].startswith(
        "warning: the checkpoint of step 3 lacks its validation, which --resume repeats: no space"
    )


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2])
def test_a_validation_that_fails_costs_no_step_and_is_repeated(tmp_path, monkeypatch, step):
    """In the middle of the run or at its end; metrics and manifests are those of the run without a failure."""
    words = ["--steps", "2", "--checkpoint-every", "1", "--validate-every", "1", "--validation.num-videos", "0"]
    straight, failed = tmp_path / "straight", tmp_path / "failed"
    run("finetune", straight, *words)
    original = Validation.finish

    def fail(self, folder, number):
        if number == step:
            raise RuntimeError("the scorer broke")
        return original(self, folder, number)

    monkeypatch.setattr(Validation, "finish", fail)
    with pytest.raises(RuntimeError, match="the scorer broke"):
        main([*SMALL["finetune"], *words, "--output", str(failed)])
    assert manifest.read(failed / "checkpoints" / f"step_{step}")[0]["validation_pending"]
    monkeypatch.undo()
    assert main(["--resume", str(failed)]) == 0
    assert metrics_of(failed) == metrics_of(straight)
    for number in (1, 2):
        found = [manifest.read(each / "checkpoints" / f"step_{number}")[0] for each in (failed, straight)]
        told = [{key: value for key, value in one.items() if key not in ("files", "crc32")} for one in found]
        assert told[0] == told[1] and told[0]["validation_pending"] is False and told[0]["metrics"]
        assert_same(checkpoint_of(failed, number), checkpoint_of(straight, number))
    assert main(["--resume", str(failed)]) == 0  # nothing to do


# A full disk.

FOR_PEOPLE = (("environment.jsonl", "0.mp4"), ("contact_sheet.png",))
NEEDED = {  # what there is no space for: what the message says
    ".lock": "cannot be written into (No space left on device)",
    "config.tmp": "no space to write {run}/config.yaml",
    "metrics.jsonl": "no space to write {run}",
    "checkpoints": "step 1 could not be saved: free space in",
    "manifest.json": "step 1 could not be saved: free space in",
}
ONE_STEP = [*SMALL["finetune"], "--validate-every", "1", "--validation.num-videos", "1", "--steps", "1"]


@pytest.mark.slow
@pytest.mark.parametrize("names", FOR_PEOPLE)
def test_a_run_goes_on_without_what_people_read(run_folder, monkeypatch, capsys, names):
    """Each validation says so once: the one before the first step, and the one after it."""
    fill_disk(monkeypatch, *names)
    assert main([*ONE_STEP, "--output", str(run_folder)]) == 0
    said = capsys.readouterr().out
    assert said.count("warning: ") == 1 + len(names) and all(name in said for name in names)
    assert checkpoint.newest_sound(run_folder, ALONE)[1]["validation_pending"] is False
    assert len(metrics_of(run_folder)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDED)
def test_a_run_without_space_for_what_resuming_needs_is_one_error(run_folder, monkeypatch, capsys, name):
    fill_disk(monkeypatch, name)
    assert main([*ONE_STEP, "--output", str(run_folder)]) == 2
    said = capsys.readouterr().err
    assert NEEDED[name].format(run=run_folder) in said and "Traceback" not in said and said.count("error:") == 1
    with pytest.raises(CheckpointError):
        checkpoint.find(run_folder)


def test_a_state_of_the_trainer_that_is_not_finite_is_named(tmp_path):
    """The trainer's own tensors, by the name that a checkpoint has for them."""
    trainer = finetune(FinetuneConfig(batch_size=2, micro_batch=1))
    next(iter(trainer.roles["student"].weights.values())).data.fill_(math.inf)
    one = Saver(tmp_path, ALONE, Keep(1), print, asynchronous=False)
    with one, pytest.raises(NotFiniteError, match="step 1 is not saved: student/weights/"):
        one.save(1, trainer.tensors(), trainer.metadata({}))
