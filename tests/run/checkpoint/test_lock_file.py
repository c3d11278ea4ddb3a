"""The lock of a run directory on file systems without flock: one holder, a heartbeat, and dead holders taken over."""

import errno
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from forked import forked_code
from helpers import ALONE, SMALL

from unified_trainer.__main__ import main
from unified_trainer.run.checkpoint import run_lock
from unified_trainer.run.checkpoint.run_lock import STALE, HeldError, LockFile, RunFolderError, claimed

OF_OTHERS = "process 1 on elsewhere (pid:[1])"


@pytest.fixture(params=[errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def without_flock(request, monkeypatch):
    """A file system on which flock fails."""

    def flock(descriptor: int, how: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(run_lock.fcntl, "flock", flock)


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def held_by(folder, identity: str, age: float, number: int = 1):
    """A lock file whose last heartbeat was `age` seconds ago."""
    folder.mkdir(exist_ok=True)
    file = folder / f".lock.{number}"
    file.write_text(identity)
    os.utime(file, (time.time() - age,) * 2)
    return file


def test_a_folder_has_one_owner(without_flock, tmp_path):
    run = tmp_path / "run"
    with claimed(run, ALONE) as note:
        assert re.match(r"no locks on the file system of .*run \(flock: .+\): \.lock\.1 with a heartbeat", note)
        assert names(run) == [".lock.1"]
        holder = rf"another run is writing into .*run \(process {os.getpid()} on .*, last heartbeat 0 s ago; .*lock\.1"
        with pytest.raises(RunFolderError, match=holder), claimed(run, ALONE):
            pass
        (run / "config.yaml").touch()
    with claimed(run, ALONE):
        pass
    assert names(run) == ["config.yaml"]


def test_with_flock_there_is_no_note(tmp_path):
    with claimed(tmp_path / "run", ALONE) as note:
        assert note == "" and names(tmp_path / "run") == [".lock"]


def test_another_machine_holds_it_until_its_heartbeat_is_old(tmp_path):
    held_by(tmp_path, OF_OTHERS, STALE - 5)
    with pytest.raises(HeldError, match=r"process 1 on elsewhere, last heartbeat 11[56] s ago"):
        LockFile(tmp_path)
    assert names(tmp_path) == [".lock.1"]
    held_by(tmp_path, OF_OTHERS, STALE + 5)
    lock = LockFile(tmp_path)
    assert lock.file.name == ".lock.2"
    lock.release()
    assert names(tmp_path) == []


def test_a_dead_process_of_this_machine_is_taken_over_at_once(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    held_by(tmp_path, run_lock._identity().replace(str(os.getpid()), str(process.pid), 1), 0)
    LockFile(tmp_path).release()
    held_by(tmp_path, f"process {process.pid} on {os.uname().nodename} (pid:[1])", 0)  # of another container
    with pytest.raises(HeldError):
        LockFile(tmp_path)


def test_an_old_file_of_someone_who_lives_again_wins(tmp_path, monkeypatch):
    """A holder that was suspended: its file is below the new one, which is given up."""
    first = held_by(tmp_path, OF_OTHERS, STALE + 5)
    create = run_lock._create

    def create_late(file, text):
        create(file, text)
        os.utime(first)

    monkeypatch.setattr(run_lock, "_create", create_late)
    with pytest.raises(HeldError, match="elsewhere"):
        LockFile(tmp_path)
    assert names(tmp_path) == [".lock.1"]


def test_the_heart_beats(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "HEARTBEAT", 0.01)
    renew, renewed = os.utime, threading.Semaphore(0)

    def noted(file, *times):
        renew(file, *times)
        renewed.release()

    monkeypatch.setattr(os, "utime", noted)
    lock = LockFile(tmp_path)
    assert renewed.acquire(timeout=60)
    renew(lock.file, (0, 0))
    assert renewed.acquire(timeout=60) and renewed.acquire(timeout=60)  # one of them began later
    assert time.time() - lock.file.stat().st_mtime < 60
    lock.release()
    assert not lock._thread.is_alive() and names(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_named(without_flock, tmp_path, monkeypatch):
    def full(file, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_lock, "_create", full)
    with pytest.raises(RunFolderError, match=r"cannot be written into \(No space left"), claimed(tmp_path, ALONE):
        pass


def race(folder, start, winners, done):
    start.wait(30)
    try:
        lock = LockFile(folder)
    except HeldError:
        winners.put(0)
    else:
        winners.put(1)
        done.wait(30)
        lock.release()


@pytest.mark.slow
@pytest.mark.parametrize("stale", [False, True])
def test_of_processes_that_race_one_wins(tmp_path, stale):
    """Four at a time, five times, for a free folder and for one whose holder is dead."""
    context = multiprocessing.get_context("fork")
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        if stale:
            held_by(folder, OF_OTHERS, STALE + 5)
        start, done, winners = context.Barrier(4), context.Event(), context.Queue()
        racers = [context.Process(target=race, args=(folder, start, winners, done)) for _ in range(4)]
        for racer in racers:
            racer.start()
        assert sum(winners.get(timeout=30) for _ in racers) == 1
        done.set()
        for racer in racers:
            racer.join()
        assert names(folder) == []


@pytest.mark.slow
def test_a_killed_owner_is_none(without_flock, tmp_path):

    def owner() -> None:
        LockFile(tmp_path)
        os.kill(os.getpid(), signal.SIGKILL)

    assert forked_code(owner) == -signal.SIGKILL and names(tmp_path) == [".lock.1"]
    with claimed(tmp_path, ALONE):
        assert names(tmp_path) == [".lock.1", ".lock.2"]
    assert names(tmp_path) == []


@pytest.mark.slow
def test_a_run_says_that_there_are_no_locks(without_flock, run_folder, capsys):
    assert main([*SMALL["finetune"], "--steps", "1", "--output", str(run_folder)]) == 0
    assert "no locks on the file system of" in capsys.readouterr().out
    assert not [name for name in names(run_folder) if name.startswith(".lock")]


def test_a_lock_that_fails_is_no_other_run(tmp_path, monkeypatch):
    """As on a network file system whose server is gone."""

    def flock(descriptor: int, how: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(run_lock.fcntl, "flock", flock)
    said = r"\.lock cannot be locked \(flock: Input/output error\): the file system of the folder fails"
    with pytest.raises(RunFolderError, match=said), claimed(tmp_path / "run", ALONE):
        pass
