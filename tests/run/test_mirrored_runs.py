"""Runs with a mirror on the command line: one owner, nothing secret, and a continuation on another machine."""

import json
import os
import shutil
import signal
from pathlib import Path

import fsspec
import pytest
import torch.distributed as dist
import yaml
from fsspec.implementations.local import LocalFileSystem
from helpers import SMALL, assert_same, checkpoint_of, files_of, metrics_of, refused

from unified_trainer.__main__ import main
from unified_trainer.run.checkpoint import remote_folder
from unified_trainer.run.settings.auto_resume import without_auto

pytestmark = pytest.mark.slow  # seconds together

WORDS = [*SMALL["finetune"], "--checkpoint-every", "1", "--validate-every", "0", "--student.ema-decay", "0.5"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """A run of three steps without a mirror."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert main([*WORDS, "--steps", "3", "--output", str(folder)]) == 0
    return folder


def assert_equal_runs(one: Path, other: Path) -> None:
    assert metrics_of(one) == metrics_of(other)
    for step in (2, 3):
        assert_same(checkpoint_of(one, step), checkpoint_of(other, step))


def test_a_run_goes_on_from_its_mirror_bit_for_bit(alone, tmp_path, monkeypatch, capsys):
    """By a relative address, into a folder with its name; `runs` lists the mirror."""
    monkeypatch.chdir(tmp_path)
    assert main([*WORDS, "--steps", "2", "--output", "first", "--checkpoint-mirror", "file://./store/fox"]) == 0
    assert yaml.safe_load(Path("first/config.yaml").read_text())["checkpoint_mirror"] == f"file://{tmp_path}/store/fox"
    shutil.rmtree("first")
    capsys.readouterr()
    assert main(["--resume", "file://./store/fox", "--steps", "3"]) == 0
    said = capsys.readouterr().out
    assert f"step 2 of file://{tmp_path}/store/fox is copied into runs/fox\n" in said
    assert "continuing after step 2\n" in said and "holds copies from another place; this run goes on" in said
    assert_equal_runs(tmp_path / "runs" / "fox", alone)
    assert_equal_runs(tmp_path / "store" / "fox", alone)
    for place, name in (("file://./store", "fox"), (f"file://{tmp_path}/store/fox", "fox")):
        assert main(["runs", place]) == 0
        (row,) = [line for line in capsys.readouterr().out.splitlines() if "finetune" in line]
        assert f" {name} " in row and "finished" in row and "3/3" in row
    assert "no run directory below it" in refused(capsys, "runs", "memory://nothing")


def test_another_run_is_refused_before_a_weight_is_read(alone, tmp_path, monkeypatch, capsys):
    mirror, other = f"file://{tmp_path}/fox", tmp_path / "other"
    assert main([*WORDS, "--steps", "1", "--output", str(tmp_path / "run"), "--checkpoint-mirror", mirror]) == 0
    shutil.copytree(alone, other)
    before = files_of(tmp_path)
    monkeypatch.setattr("unified_trainer.run.build.load_roles", None)
    for words in (["--resume", str(other), "--steps", "4"], [*WORDS, "--output", str(tmp_path / "new")]):
        said = refused(capsys, *words, "--checkpoint-mirror", mirror)
        assert f"--checkpoint-mirror {mirror} belongs to the run in {tmp_path / 'run'} on " in said
        assert f"name another folder, or continue that run with --resume {mirror}" in said
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("place", ["me:SECRETPW@host/x", "host/x?sig=SECRETPW"])
@pytest.mark.parametrize("words", [["--checkpoint-mirror"], ["--resume"], ["runs"]])
def test_a_password_is_refused_and_stored_nowhere(tmp_path, monkeypatch, capsys, words, place):
    monkeypatch.chdir(tmp_path)
    run = [] if words == ["runs"] else [*WORDS, "--output", "run"]
    said = refused(capsys, *run[: len(run) if words != ["--resume"] else 0], *words, f"memory://{place}")
    assert "the address holds a password or a query" in said and "SECRETPW" not in said
    assert not any(tmp_path.iterdir())


def test_a_saved_password_is_not_repeated_as_it_is_replaced(alone, tmp_path, capsys):
    """A run of an earlier version may have one."""
    run = Path(shutil.copytree(alone, tmp_path / "run"))
    file = run / "config.yaml"
    file.write_text(file.read_text().replace("checkpoint_mirror: ''", "checkpoint_mirror: memory://me:SECRETPW@host/x"))
    words = ["--resume", str(run), "--steps", "4", "--allow", "config"]
    assert "the address holds a password" in refused(capsys, *words)
    assert main([*words, "--checkpoint-mirror", ""]) == 0
    assert "SECRETPW" not in capsys.readouterr().out
    assert not any(b"SECRETPW" in text for text in files_of(run).values())


def test_the_main_rank_copies_for_all(tmp_path, monkeypatch):
    monkeypatch.setattr("unified_trainer.run.checkpoint.restore.restore", lambda address, output: output)
    store, words = dist.HashStore(), ["--steps", "3", "--output=here", "--resume", "s3://bucket/x"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert without_auto(words, store) == ["--steps", "3", "--resume=here"]
        monkeypatch.setattr("unified_trainer.run.checkpoint.restore.restore", None)


class Counted(LocalFileSystem):
    """A storage that kills the process in an operation that changes it, the one of a number."""

    protocol = "counted"
    left = -1

    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(str(path).removeprefix("counted://"))

    def _count(self, place: str = "", content: bytes = b"") -> None:
        Counted.left -= 1
        if Counted.left == 0:
            if place:
                Path(place).write_bytes(content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    def pipe_file(self, path, value, mode="overwrite", **more):
        self._count(path, value)
        super().pipe_file(path, value, mode, **more)

    def put_file(self, here, there, callback=None, **more):
        self._count(there, Path(here).read_bytes())
        super().put_file(here, there, callback, **more)

    def mv(self, path1, path2, recursive=True, **more):
        self._count()
        super().mv(path1, path2, recursive, **more)

    def rm_file(self, path):
        self._count()
        super().rm_file(path)


fsspec.register_implementation("counted", Counted, clobber=True)


def killed(words: list[str], dies_at: int) -> int:
    """Run the program in a copy of this process; the exit code, minus a signal."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        Counted.left = dies_at
        os._exit(main(words))
    finally:
        os._exit(99)


@pytest.mark.kill
def test_killed_in_an_operation_of_its_mirror_a_run_goes_on_elsewhere(alone, tmp_path, request, unchecked):
    """From what the mirror holds, or from the beginning if that is nothing: bit for bit. Every one with --kills."""
    every = 1 if request.config.getoption("--kills") else 9
    number, code, begun = 2, -signal.SIGKILL, 0
    while code:
        first, mirror, there = (tmp_path / f"{name}{number}" for name in ("first", "mirror", "there"))
        words = [*WORDS, "--steps", "2", "--output", str(first), "--checkpoint-mirror", f"counted://{mirror}"]
        code = killed(words, number)
        assert code in (0, -signal.SIGKILL)
        resumed = ["--resume", f"file://{mirror}", "--output", str(there), "--steps", "3"]
        if main(resumed) == 2:  # nothing was copied yet
            assert not list((mirror / "checkpoints").glob("*/manifest.json")) and not begun
            resumed = ["--resume", str(first), "--steps", "3"] if (first / "config.yaml").exists() else words
            there = first
            assert main([*resumed, "--steps", "3", "--checkpoint-mirror", f"file://{mirror}"]) == 0
        else:
            begun += 1
        assert_equal_runs(there, alone)
        assert_equal_runs(mirror, alone)
        number += every
    assert begun > 1


def test_the_end_of_a_run_says_again_that_copies_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(remote_folder, "PAUSE", 0.0)

    def full(self, here, there, callback=None, **more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Counted, "put_file", full)
    words = [*WORDS, "--steps", "2", "--output", str(tmp_path / "run")]
    assert main([*words, "--checkpoint-mirror", f"counted://{tmp_path}/fox"]) == 0
    said = capsys.readouterr().out
    assert "step_1 is not copied: --checkpoint-mirror counted://" in said and "No space left on device" in said
    assert said.splitlines()[-1].startswith("warning: the mirror lacks the newest checkpoint: ")
    assert json.loads((tmp_path / "run" / "mirror.json").read_text())["folder"] == str(tmp_path / "run")
