"""When checkpoints are written and kept: asynchronously, on a full disk, and into a folder that another run locked."""

import errno
import os
import shutil
import signal
import subprocess
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from forked import forked_code
from helpers import (
    ALONE,
    SMALL,
    assert_same,
    checkpoint_of,
    files_of,
    metrics_of,
    run,
)
from torch.distributed.checkpoint import staging

from unified_trainer.__main__ import main
from unified_trainer.run.checkpoint import dcp as checkpoint
from unified_trainer.run.checkpoint import manifest
from unified_trainer.run.checkpoint.dcp import CheckpointError, DiskFull
from unified_trainer.run.checkpoint.manager import Keep, Saver
from unified_trainer.run.checkpoint.run_lock import RunFolderError, claimed
from unified_trainer.run.settings.config import TrackingConfig
from unified_trainer.run.tracking.tracker import Tracker


def state(value: float = 1.0, size: int = 4) -> dict[str, torch.Tensor]:
    return {"a/weights/w": torch.full((size,), value), "a/updates": torch.tensor(3)}


def steps_in(root: Path) -> list[int]:
    return [manifest.step_of(folder) for folder in manifest.folders(root)]


def saver(root: Path, keep: Keep | None = None, said: list[str] | None = None, *, asynchronous: bool = False) -> Saver:
    return Saver(root, ALONE, keep or Keep(2), [].append if said is None else said.append, asynchronous=asynchronous)


# What stays.


@pytest.mark.parametrize("keep", [1, 2])
def test_only_the_last_are_kept(tmp_path, keep):
    with saver(tmp_path, Keep(keep)) as one:
        for step in (8, 9, 10):
            one.save(step, state(), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"step_{step}" for step in (8, 9, 10)[-keep:])


@pytest.mark.parametrize(("order", "stay"), [("highest", [2, 4, 6]), ("lowest", [1, 3, 6])])
def test_the_best_are_kept_besides(tmp_path, order, stay):
    """The best of what a validation measured at that very step; 5 and 6 have none."""
    with saver(tmp_path, Keep(1, 2, "accuracy", order)) as one:
        for step, accuracy in enumerate([0.1, 0.9, 0.2, 0.8, None, None], start=1):
            one.save(
                step, state(), {"metrics": {} if accuracy is None else {"accuracy": accuracy, "reward": -accuracy}}
            )
    assert steps_in(tmp_path) == stay


def test_the_best_are_known_after_a_resume(tmp_path):
    """From the manifests: a saver remembers nothing."""
    for step, accuracy in ((1, 0.9), (2, 0.1), (3, 0.5)):
        with saver(tmp_path, Keep(1, 1, "accuracy")) as one:
            one.save(step, state(), {"metrics": {"accuracy": accuracy}})
    assert steps_in(tmp_path) == [1, 3]


@pytest.mark.slow
def test_what_is_best_must_be_measured(run_folder, capsys):
    words = [*SMALL["finetune"], "--output", str(run_folder), "--keep-best", "1"]
    assert main([*words, "--validate-every", "0"]) == 2
    assert "keep_best 1 needs validations" in capsys.readouterr().err and not run_folder.exists()
    assert main([*words, "--validate-every", "1", "--best-metric", "beauty"]) == 2
    assert "best_metric beauty is not measured; have" in capsys.readouterr().err
    assert not (run_folder / "checkpoints").exists()


@pytest.mark.slow
def test_a_run_keeps_its_best(run_folder):
    words = ["--steps", "3", "--checkpoint-every", "1", "--validate-every", "1", "--keep-last", "1", "--keep-best", "1"]
    run("finetune", run_folder, *words, "--best-is", "lowest", "--student.learning-rate", "1e-3")
    rewards = {row["step"]: row["validation/reward"] for row in metrics_of(run_folder) if "validation/reward" in row}
    best = min(range(1, 4), key=lambda step: rewards[step])
    assert steps_in(run_folder / "checkpoints") == sorted({best, 3})
    metadata = checkpoint.find(f"{run_folder}@{best}")[1]
    assert metadata["metrics"]["reward"] == rewards[best] and metadata["method"] == "Finetune"


# Asynchronous writes.


@contextmanager
def held_up(monkeypatch):
    """The writing waits in its thread until the event that this gives is set."""
    gate = threading.Event()
    original = checkpoint.save

    def wait_and_save(*arguments):
        assert gate.wait(60)
        return original(*arguments)

    monkeypatch.setattr(checkpoint, "save", wait_and_save)
    yield gate
    gate.set()


def test_what_is_written_is_the_state_at_the_time_of_the_call(tmp_path, monkeypatch):
    """Training moves the weights while they are being written: the copy does not follow."""
    weights = state(1.0)
    with held_up(monkeypatch) as gate, saver(tmp_path / "checkpoints", asynchronous=True) as one:
        one.save(1, weights, {})
        weights["a/weights/w"].fill_(2.0)
        weights["a/updates"].fill_(9)
        assert not (tmp_path / "checkpoints").exists()
        gate.set()
        one.wait()
    held = checkpoint_of(tmp_path, 1)
    assert held["a/weights/w"].tolist() == [1.0] * 4 and int(held["a/updates"]) == 3


def test_pinned_copies_are_used_again_until_the_tensors_have_other_names(tmp_path, monkeypatch):
    """As on an accelerator, without its pinned memory: a validation under way adds its weights to some checkpoints."""
    create = staging._create_cpu_state_dict
    monkeypatch.setattr(staging, "_create_cpu_state_dict", lambda tensors, pin_memory: create(tensors))
    with saver(tmp_path / "checkpoints", Keep(9), asynchronous=True) as one:
        one._stager = staging.BlockingAsyncStager(cache_staged_state_dict=True)
        for step, more in enumerate(({}, {"b/weights/w": torch.ones(2)}, {}, {})):
            one.save(step, state(float(step)) | more, {})
        one.wait()
        copies = one._stager.state_dict_cache
        one.save(4, state(4.0), {})
        assert one._stager.state_dict_cache is copies
    for step in range(5):
        held = checkpoint_of(tmp_path, step)
        assert held["a/weights/w"].tolist() == [float(step)] * 4 and ("b/weights/w" in held) == (step == 1)


def test_the_end_waits_for_what_is_being_written(tmp_path, monkeypatch):
    with held_up(monkeypatch) as gate, saver(tmp_path, asynchronous=True) as one:
        one.save(1, state(), {})
        threading.Timer(0.2, gate.set).start()
    assert steps_in(tmp_path) == [1]


def test_a_save_that_failed_is_an_error_at_the_next_step(tmp_path):
    """Not silence: the folder cannot be made because a file has its name."""
    (tmp_path / "checkpoints").write_text("in the way")
    with saver(tmp_path / "checkpoints", asynchronous=True) as one:
        one.check()
        one.save(1, state(), {})
        with pytest.raises(CheckpointError, match=r"checkpoints cannot be written \(File exists\)"):
            while not all(save.done() for save in one._pending):
                one.check()
            one.check()
        one.check()  # told once


def test_a_fault_that_is_not_the_disks_is_an_error_too(tmp_path):
    with saver(tmp_path, asynchronous=True) as one:
        one.save(1, {"a/weights/w": torch.ones(2), "a/weights": torch.ones(2)}, {"metrics": object()})
        with pytest.raises(TypeError, match="not JSON serializable"):
            one.wait()
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_asynchronous_and_synchronous_saves_are_equal(tmp_path):
    moving = [
        "--steps",
        "3",
        "--checkpoint-every",
        "1",
        "--student.ema-decay",
        "0.5",
        "--student.learning-rate",
        "1e-3",
    ]
    run("finetune", tmp_path / "a", *moving)
    run("finetune", tmp_path / "b", *moving, "--async-save")
    for step in (2, 3):
        assert_same(checkpoint_of(tmp_path / "b", step), checkpoint_of(tmp_path / "a", step))
    assert main(["--resume", str(tmp_path / "b"), "--steps", "4", "--no-async-save"]) == 0


# A full disk.


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MiB, where this process may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("no right to mount a tmpfs; the next test fills a disk without one")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(disk: Path, leave: int) -> Path:
    """A file that leaves so many bytes free."""
    filler = disk / "filler"
    filler.write_bytes(bytes(max(0, shutil.disk_usage(disk).free - leave)))
    return filler


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("announced", [True, False])
def test_a_full_disk_is_said_and_leaves_the_last_checkpoint(small_disk, monkeypatch, asynchronous, announced):
    """Found before the write, or only when a write fails: the run goes on, and saves again once there is space."""
    said: list[str] = []
    root = small_disk / "checkpoints"
    with saver(root, said=said, asynchronous=asynchronous) as one:
        one.save(1, state(1.0, 2**18), {})
        one.wait()
        filler = fill(small_disk, leave=2**19)
        before = files_of(root)
        if not announced:  # as if the space went between the look and the write
            monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 0, 2**40))
        one.save(2, state(2.0, 2**18), {})
        one.wait()
        assert files_of(root) == before  # nothing half-written is left either
        assert said == [said[0]] and said[0].startswith("warning: step 2 is not saved: no space for a checkpoint in")
        assert ("MiB free" in said[0]) == announced
        filler.unlink()
        one.save(3, state(3.0, 2**18), {})
        one.finish(3)
    assert steps_in(root) == [1, 3]
    assert checkpoint.newest_sound(small_disk, ALONE)[0].name == "step_3"


@pytest.mark.parametrize("earlier", [True, False])
def test_the_last_step_must_be_saved(small_disk, earlier):
    """The error says what --resume would begin with, and no line promises further training."""
    said: list[str] = []
    with saver(small_disk / "checkpoints", said=said) as one:
        if earlier:
            one.save(3, state(1.0, 2**18), {})
        fill(small_disk, leave=2**19)
        one.save(4, state(1.0, 2**18), {})
        one.save(5, state(1.0, 2**18), {}, last=True)
        begins = "goes on from step 3" if earlier else "has no checkpoint and starts over"
        with pytest.raises(DiskFull, match=rf"free space in .* then --resume {small_disk}, which {begins}$"):
            one.finish(5)
    assert ["Training continues" in line for line in said] == [True, False]


def test_a_disk_without_room_for_a_checkpoint_is_said_at_the_start(tmp_path, monkeypatch):
    """Before the folder is there, of tensors and of what is written besides them; to the byte."""
    said: list[str] = []
    needed = 4 * 2**18 + 8 + 2**20
    with saver(tmp_path / "run" / "checkpoints", said=said) as one:
        for free in (needed, needed - 1):
            asked = lambda path, free=free: shutil._ntuple_diskusage(2**40, 0, free)  # noqa: E731
            monkeypatch.setattr(shutil, "disk_usage", asked)
            one.look_for_room(state(1.0, 2**18))
            assert bool(said) == (free < needed)
    assert said == [said[0]] and "it takes 2.0 MiB, 2.0 MiB are free. Without more space no step" in said[0]
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_space_and_quota_are_the_same_another_fault_is_not(tmp_path, monkeypatch, number):
    """Where nothing can be mounted: the system call that fails is stood in for, nothing of ours is."""
    checkpoint.save(tmp_path, 1, state(), ALONE)

    def refuse(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(CheckpointError) as raised:
        checkpoint.save(tmp_path, 2, state(), ALONE)
    assert isinstance(raised.value, DiskFull) == (number != errno.EIO)
    assert os.strerror(number) in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


@pytest.mark.slow
def test_metrics_wait_for_space(small_disk, capsys):
    """The run's own lines too: a disk that is full to the last byte costs none of them."""
    with Tracker(small_disk, TrackingConfig(), {}, 3, 0, True) as tracker:
        tracker.log(1, {"a": 1.0})
        with (small_disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
            while filler.write(bytes(4096)):
                pass
        for step in range(2, 400):
            tracker.log(step, {"a": 1.0})
        (small_disk / "filler").unlink()
    assert "no space for" in capsys.readouterr().out
    assert [row["step"] for row in metrics_of(small_disk)] == list(range(1, 400))


# One run, one folder.


def test_a_folder_has_one_owner(tmp_path):
    with claimed(tmp_path / "run", ALONE):
        holder = rf"another run is writing into .*run \(process {os.getpid()} on"
        with pytest.raises(RunFolderError, match=holder), claimed(tmp_path / "run", ALONE):
            pass
        (tmp_path / "run" / "config.yaml").touch()
    with claimed(tmp_path / "run", ALONE):
        pass
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]


def test_nothing_stays_of_a_run_that_wrote_nothing(tmp_path):
    with claimed(tmp_path / "runs" / "a", ALONE):
        assert (tmp_path / "runs" / "a").is_dir()
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_a_killed_owner_is_none(tmp_path):
    """SIGKILL leaves the file and not the lock."""

    def owner() -> None:
        with claimed(tmp_path / "run", ALONE):
            os.kill(os.getpid(), signal.SIGKILL)

    assert forked_code(owner) == -signal.SIGKILL and (tmp_path / "run" / ".lock").exists()
    with claimed(tmp_path / "run", ALONE):
        pass


@pytest.mark.slow
def test_two_runs_into_one_folder(run_folder, capsys):
    """The second is refused while the first one runs, whether it starts or resumes, and changes no file."""
    run("finetune", run_folder)
    with claimed(run_folder, ALONE):
        before = files_of(run_folder)
        for second in (
            [*SMALL["finetune"], "--output", str(run_folder)],
            ["--resume", str(run_folder), "--steps", "2"],
        ):
            assert main(second) == 2
            assert f"another run is writing into {run_folder} (process {os.getpid()} on" in capsys.readouterr().err
        assert files_of(run_folder) == before
    assert not (run_folder / ".lock").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path, capsys):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(disk)], capture_output=True).returncode:
        disk.chmod(0o500)
        if os.access(disk, os.W_OK):
            pytest.skip("neither a read-only mount nor permissions bind this process")
        words = "Permission denied"
    else:
        words = "Read-only file system"
    try:
        assert main([*SMALL["finetune"], "--output", str(disk / "run")]) == 2
    finally:
        subprocess.run(["umount", str(disk)], capture_output=True)
        disk.chmod(0o700)
    said = capsys.readouterr().err
    assert f"{disk / 'run'} cannot be written into ({words}); choose another --output" in said


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert main([*SMALL["finetune"], "--output", str(tmp_path / "file")]) == 2
    assert f"{tmp_path / 'file'} cannot be written into (File exists)" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"
