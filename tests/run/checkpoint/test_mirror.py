"""Copies of checkpoints in a remote folder are complete or absent, and a run continues from one that is copied back."""

import threading
from pathlib import Path

import fsspec
import pytest
import torch
from helpers import ALONE, files_of

from unified_trainer.basics.errors import UserError
from unified_trainer.run.checkpoint import manifest
from unified_trainer.run.checkpoint.manager import Keep, Saver
from unified_trainer.run.checkpoint.mirror import MirroringSaver, check_mirror, saver_of


def state(value: float) -> dict[str, torch.Tensor]:
    return {"a/weights/w": torch.full((4,), value), "a/updates": torch.tensor(3)}


@pytest.fixture
def url():
    """A folder in the memory of this process."""
    yield "memory://bucket/fox"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def run(tmp_path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("seed: 0\n")
    return folder


def saver(run: Path, url: str, said: list[str] | None = None, keep: int = 2) -> MirroringSaver:
    say = [].append if said is None else said.append
    return MirroringSaver(url, run / "checkpoints", ALONE, Keep(keep), say, asynchronous=False)


def replace_put(monkeypatch, replacement) -> None:
    """Let `replacement` send the files: it gets what sends one, and the file's place."""
    kind = type(fsspec.filesystem("memory"))  # each thread has its own object of it
    put = kind.put_file
    monkeypatch.setattr(kind, "put_file", lambda self, here, there: replacement(lambda: put(self, here, there), there))


def back(url: str, to: Path) -> Path:
    """Copy the remote folder to this machine."""
    files, place = fsspec.core.url_to_fs(url)
    for file in files.find(place):
        copy = to / Path(file).relative_to(place)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(files.cat_file(file))
    return to


def test_the_copy_is_the_run_to_continue(run, url, tmp_path):
    with saver(run, url) as one:
        one.save(1, state(1.0), {"metrics": {}})
        one.record(1, {"metrics": {"reward": 2.0}})
    copied = back(url, tmp_path / "back")
    assert files_of(copied) == files_of(run)
    folder, metadata, _ = manifest.newest_sound(copied, ALONE)
    assert folder.name == "step_1" and metadata["metrics"] == {"reward": 2.0}


def test_a_folder_of_a_file_system_is_made(run, tmp_path):
    with saver(run, f"file://{tmp_path}/disk/fox") as one:
        one.save(1, state(1.0), {})
    assert files_of(tmp_path / "disk" / "fox") == files_of(run)


def test_a_step_that_is_written_again_replaces_its_copy(run, url, tmp_path):
    """As after a guard went back; copies of checkpoints that are kept no longer stay."""
    for value in (1.0, 2.0):
        with saver(run, url, keep=1) as one:
            one.save(1, state(value), {})
            one.save(2, state(value), {})
    copied = back(url, tmp_path / "back") / "checkpoints"
    assert files_of(copied / "step_2") == files_of(run / "checkpoints" / "step_2")
    assert sorted(path.name for path in copied.iterdir()) == ["step_1", "step_2"]


def test_files_that_are_there_are_not_sent_again(run, url, monkeypatch):
    sent = []
    replace_put(monkeypatch, lambda put, there: sent.append(Path(there).name) or put())
    with saver(run, url) as one:
        one.save(1, state(1.0), {})
    first, sent[:] = list(sent), []
    with saver(run, url) as one:
        one.record(1, {"metrics": {"reward": 2.0}})
    assert "config.yaml" in first and len(first) > 2 and sent == ["config.yaml"]


@pytest.mark.parametrize("copies", [0, 1])
def test_a_copy_that_fails_is_a_warning_and_absent(run, url, tmp_path, monkeypatch, copies):
    """The first copy of a step, or one in place of an older one, loses its connection at its second file."""
    if copies:
        with saver(run, url) as one:
            one.save(1, state(1.0), {})
    memory, said, sent = fsspec.filesystem("memory"), [], []

    def failing(put, there):
        sent.append(there)
        if len(sent) == 2:
            raise ConnectionError("the line to https://den:secret@host is cut")
        put()

    replace_put(monkeypatch, failing)
    with saver(run, url, said) as one:
        one.save(1, state(2.0), {})
    said = [line for line in said if "waiting" not in line]
    assert len(said) == 1 and "step_1 is not copied to memory://bucket/fox: ConnectionError: the line to" in said[0]
    assert "secret" not in said[0] and "the next checkpoint is tried again" in said[0]
    assert not memory.exists("/bucket/fox/checkpoints/step_1/manifest.json")
    with saver(run, url, again := []) as one:
        one.forget(1)  # as at the start of a run that continues
    assert not any("not copied" in line for line in again)
    assert files_of(back(url, tmp_path / "back")) == files_of(run)


def test_training_does_not_wait_for_a_copy(run, url, monkeypatch):
    memory, begun, go = fsspec.filesystem("memory"), threading.Event(), threading.Event()
    replace_put(monkeypatch, lambda put, there: begun.set() or (go.wait() and put()))
    with saver(run, url) as one:
        one.save(1, state(1.0), {})
        begun.wait()
        assert not memory.exists("/bucket/fox/checkpoints/step_1/manifest.json")
        go.set()
    assert memory.exists("/bucket/fox/checkpoints/step_1/manifest.json")


def test_a_run_without_a_mirror_has_the_saver_alone(run):
    with saver_of("", run / "checkpoints", ALONE, Keep(1), print, asynchronous=False) as one:
        assert type(one) is Saver


def test_a_folder_that_cannot_be_used_is_refused(run, url):
    check_mirror("", ALONE, new=True)
    check_mirror(url, ALONE, new=True)
    with saver(run, url) as one:
        one.save(1, state(1.0), {})
    check_mirror(url, ALONE, new=False)
    with pytest.raises(UserError, match="--checkpoint-mirror memory://bucket/fox already holds the copy of a run"):
        check_mirror(url, ALONE, new=True)
    with pytest.raises(UserError, match=r"--checkpoint-mirror fox://den cannot be read \(Protocol not known: fox"):
        check_mirror("fox://den", ALONE, new=True)
