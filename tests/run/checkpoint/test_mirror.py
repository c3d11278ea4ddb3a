"""A mirror belongs to one run. Its copies are complete or absent, and a run continues from them."""

import json
import os
import signal
import threading
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from helpers import ALONE, assert_same, checkpoint_of, copy_of, files_of

from unified_trainer.basics.errors import UserError
from unified_trainer.run.checkpoint import manifest, remote_folder
from unified_trainer.run.checkpoint.manager import Keep, Saver
from unified_trainer.run.checkpoint.mirror import Mirror, MirroringSaver, mirror_of, saver_of
from unified_trainer.run.checkpoint.remote_folder import RemoteFolder, checked_address
from unified_trainer.run.checkpoint.restore import restore


def state(value: float) -> dict[str, torch.Tensor]:
    return {"a/weights/w": torch.full((4,), value), "a/updates": torch.tensor(3)}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(remote_folder, "PAUSE", 0.0)


@pytest.fixture
def url():
    """A folder in the memory of this process."""
    yield "memory://bucket/fox"
    fsspec.filesystem("memory").store.clear()


def run_in(folder: Path, seed: int = 0) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(f"seed: {seed}\n")
    return folder


@pytest.fixture
def run(tmp_path) -> Path:
    return run_in(tmp_path / "run")


class Start:
    """A start of a run that saves steps."""

    def __init__(self, run: Path, url: str, *, keep: int = 2, new: bool = False) -> None:
        self.said: list[str] = []
        self._run, self._url, self._keep, self._new = run, url, keep, new

    def __enter__(self) -> MirroringSaver:
        self._mirror = mirror_of(self._url, self._run, ALONE, new=self._new)
        root = self._run / "checkpoints"
        mirror = self._mirror.__enter__()
        try:
            mirror.take()
        except UserError:
            self._mirror.__exit__(None, None, None)
            raise
        self._saver = saver_of(mirror, root, ALONE, Keep(self._keep), self.said.append, asynchronous=False)
        return self._saver.__enter__()

    def __exit__(self, *error) -> None:
        self._saver.__exit__(*error)
        self._mirror.__exit__(*error)

    @property
    def warnings(self) -> list[str]:
        return [line for line in self.said if "waiting" not in line]


def saved(one: MirroringSaver, step: int, value: float) -> None:
    """Save a step and wait for its copy, which keep_last would remove."""
    one.save(step, state(value), {"metrics": {}})
    one._copies[-1].result()


def log(run: Path, step: int, time: float) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "time": time, "train/loss": 0.5}) + "\n")


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


def of_run(folder: Path) -> dict[str, bytes]:
    """The files of a run directory but those of the mirror itself."""
    return {
        name: text for name, text in files_of(folder).items() if Path(name).name not in ("mirror.json", "kept.json")
    }


# Copies.


def test_the_copy_is_the_run_to_continue(run, url, tmp_path):
    with Start(run, url) as one:
        one.save(1, state(1.0), {"metrics": {}})
        one.record(1, {"metrics": {"reward": 2.0}})
    copied = back(url, tmp_path / "back")
    assert of_run(copied) == of_run(run)
    folder, metadata, _ = manifest.newest_sound(copied, ALONE)
    assert folder.name == "step_1" and metadata["metrics"] == {"reward": 2.0}


def test_a_folder_of_a_file_system_is_made(run, tmp_path):
    with Start(run, f"file://{tmp_path}/disk/fox") as one:
        one.save(1, state(1.0), {})
    assert of_run(tmp_path / "disk" / "fox") == of_run(run)


@pytest.mark.slow
def test_a_step_that_is_written_again_replaces_its_copy(run, url, tmp_path):
    """As after a guard went back; copies of checkpoints that are kept no longer stay."""
    for value in (1.0, 2.0):
        with Start(run, url, keep=1) as one:
            saved(one, 1, value)
            saved(one, 2, value)
    copied = back(url, tmp_path / "back")
    assert_same(checkpoint_of(copied, 2), checkpoint_of(run, 2))
    assert sorted(path.name for path in (copied / "checkpoints").iterdir()) == ["step_1", "step_2"]


def test_files_that_are_there_are_not_sent_again(run, url, monkeypatch):
    sent = []
    replace_put(monkeypatch, lambda put, there: sent.append(Path(there).name) or put())
    with Start(run, url) as one:
        one.save(1, state(1.0), {})
    first, sent[:] = list(sent), []
    with Start(run, url) as one:
        one.record(1, {"metrics": {"reward": 2.0}})
    assert len(first) == 2 and sent == []


def test_steps_that_a_run_went_back_from_are_no_longer_restored(run, url, tmp_path):
    with Start(run, url) as one:
        for step in (1, 2, 3):
            saved(one, step, float(step))
        one.remove_after(2)
        one.record(2, {"metrics": {"reward": 2.0}})
    assert restore(url, tmp_path / "back").is_dir()
    assert [path.name for path in manifest.folders(tmp_path / "back" / "checkpoints")] == ["step_2"]


def test_training_does_not_wait_for_a_copy(run, url, monkeypatch):
    memory, begun, go = fsspec.filesystem("memory"), threading.Event(), threading.Event()
    replace_put(monkeypatch, lambda put, there: begun.set() or (go.wait() and put()))
    with Start(run, url) as one:
        one.save(1, state(1.0), {})
        begun.wait()
        assert not memory.exists("/bucket/fox/checkpoints/step_1/manifest.json")
        go.set()
    assert memory.exists("/bucket/fox/checkpoints/step_1/manifest.json")


def test_a_run_without_a_mirror_has_the_saver_alone(run):
    with mirror_of("", run, ALONE, new=False) as mirror:
        assert type(saver_of(mirror, run / "checkpoints", ALONE, Keep(1), print, asynchronous=False)) is Saver


# Faults.


@pytest.mark.parametrize("copies", [0, 1])
def test_a_copy_that_fails_is_a_warning_and_absent(run, url, tmp_path, monkeypatch, copies):
    """The first copy of a step, or one in place of an older one, loses its connection from its second file on."""
    if copies:
        with Start(run, url) as one:
            one.save(1, state(1.0), {})
    memory, sent = fsspec.filesystem("memory"), []

    def failing(put, there):
        sent.append(there)
        if len(sent) > 1:
            raise ConnectionError("the line to https://den:secret@host is cut")
        put()

    with monkeypatch.context() as faults:
        replace_put(faults, failing)
        with (start := Start(run, url)) as one:
            one.save(1, state(2.0), {})
    assert len(sent) == 1 + remote_folder.TRIES
    said, again = start.warnings
    assert "step_1 is not copied: --checkpoint-mirror memory://bucket/fox fails: ConnectionError: the line to" in said
    assert "secret" not in said and "the next checkpoint is tried again" in said
    assert again.startswith("warning: the mirror lacks the newest checkpoint: ") and "secret" not in again
    assert not memory.exists("/bucket/fox/checkpoints/step_1/manifest.json")
    with (start := Start(run, url)) as one:
        one.forget(1)  # as at the start of a run that continues
    assert not start.warnings
    assert of_run(back(url, tmp_path / "back")) == of_run(run)


def test_a_fault_of_a_moment_is_not_said(run, url, monkeypatch):
    sent = []
    replace_put(monkeypatch, lambda put, there: sent.append(there) or (put() if len(sent) % 2 else 1 / 0))
    with (start := Start(run, url)) as one:
        one.save(1, state(1.0), {})
    assert len(sent) == 3 and not start.warnings


def test_an_operation_that_hangs_is_given_up_and_comes_before_later_ones(tmp_path, url, monkeypatch):
    monkeypatch.setattr(remote_folder, "LIMIT", 0.05)
    store, go, done = RemoteFolder(url, "--resume"), threading.Event(), threading.Event()
    (tmp_path / "file").write_bytes(b"old")
    replace_put(monkeypatch, lambda put, there: go.wait() and (put() or done.set()))
    for _ in range(2):  # the second waits behind the first, and never runs
        with pytest.raises(UserError, match="--resume memory://bucket/fox fails: no answer in time"):
            store.send(tmp_path / "file", "file")
    go.set()
    done.wait()
    monkeypatch.setattr(remote_folder, "LIMIT", 60.0)
    store.write("file", b"new")
    assert store.read("file") == b"new"


@pytest.mark.parametrize(
    "address", ["memory://me:SECRET@host/x", "s3://bucket/x?token=SECRET", "simplecache::sftp://me:SEC/RET@host/x"]
)
def test_an_address_with_a_password_is_refused_and_not_repeated(run, address):
    for taking in (checked_address, RemoteFolder, lambda address, key: restore(address, run)):
        with pytest.raises(UserError, match="the address holds a password or a query") as refused:
            taking(address, "--checkpoint-mirror")
        assert "SEC" not in str(refused.value)


def test_an_address_of_a_folder_here_is_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for address in ("file://./mm", "mm", f"{tmp_path}/mm", f"file://{tmp_path}/mm"):
        assert checked_address(address, "") == f"file://{tmp_path}/mm"
    for address in ("", "memory://mm", "s3://me@host/x", "sftp://me@host:22/x"):
        assert checked_address(address, "") == address


# Owners.


def test_a_folder_that_cannot_be_used_is_refused(run, url, tmp_path):
    with pytest.raises(UserError, match=r"--checkpoint-mirror fox://den fails: ValueError: Protocol not known: fox"):
        Start(run, "fox://den").__enter__()
    with pytest.raises(UserError, match="lies in the run directory"):
        Start(run, f"file://{run}/copies").__enter__()
    assert not (run / "mirror.json").exists()


def test_another_run_is_refused_and_changes_nothing(run, url, tmp_path):
    with Start(run, url) as one:
        one.save(1, state(1.0), {})
    before, other = files_of(back(url, tmp_path / "before")), run_in(tmp_path / "other", seed=9)
    Saver(other / "checkpoints", ALONE, Keep(2), print, asynchronous=False).save(1, state(2.0), {})
    for new in (True, False):
        with pytest.raises(UserError, match=rf"fox belongs to the run in {run} on .*--resume memory://bucket/fox"):
            Start(other, url, new=new).__enter__()
    assert files_of(back(url, tmp_path / "after")) == before and not (other / "mirror.json").exists()


@pytest.mark.parametrize("same", [True, False])
def test_a_copy_of_an_earlier_version_has_no_owner_and_is_compared(run, url, tmp_path, same):
    with Start(run, url) as one:
        one.save(1, state(1.0), {})
    fsspec.filesystem("memory").rm_file("/bucket/fox/mirror.json")
    (run / "mirror.json").unlink()
    with pytest.raises(UserError, match=r"belongs to no known run: no mirror.json: name .*--resume memory"):
        Start(run_in(tmp_path / "new"), url, new=True).__enter__()
    if same:
        with (start := Start(run, url)) as one:
            one.save(2, state(2.0), {})
        assert not start.warnings
    else:
        with pytest.raises(UserError, match=r"holds step 1, which .*other lacks: it is another run's"):
            Start(run_in(tmp_path / "other"), url).__enter__()


def test_of_runs_that_start_together_one_gets_the_folder(tmp_path):
    """Threads take it at once; the owner is who finds his own name there in the end."""
    url, runs, gate, got = f"file://{tmp_path}/mm", [tmp_path / str(i) for i in range(8)], threading.Barrier(8), []

    def begin(run: Path) -> None:
        run.mkdir()
        gate.wait()
        try:
            one = Mirror(url, run, new=True)
            one.take()
            got.append((run, one))
        except UserError as error:
            assert "belongs to the run in" in str(error)
            one.leave()

    threads = [threading.Thread(target=begin, args=(run,)) for run in runs]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    ((winner, context),) = got
    assert json.loads((tmp_path / "mm" / "mirror.json").read_text())["folder"] == str(winner)
    assert [run for run in runs if (run / "mirror.json").exists()] == [winner]
    context.leave()
    assert not (tmp_path / "mm" / "mirror.json").exists()  # nothing was copied: another run may have it


def test_a_storage_that_creates_a_file_twice_is_looked_at_again(run, tmp_path, url, monkeypatch):
    """Each finds its own name at once. After loading, the first one finds the other."""
    read = RemoteFolder.read
    monkeypatch.setattr(RemoteFolder, "create", RemoteFolder.write)
    with mirror_of(url, run, ALONE, new=True) as first:
        first.take()
        early = ["mirror.json"]  # at which the second one looks before the first has written

        def look(self, name: str) -> bytes | None:
            if name in early:
                early.remove(name)
                return None
            return read(self, name)

        monkeypatch.setattr(RemoteFolder, "read", look)
        with mirror_of(url, run_in(tmp_path / "other"), ALONE, new=True) as second:
            second.take()
            with pytest.raises(UserError, match=f"belongs to the run in {tmp_path / 'other'}"):
                first.confirm()


def test_the_owner_is_compared_before_each_copy(run, url, tmp_path):
    """A copy of the run elsewhere goes on with the mirror: the first one trains on, and copies nothing more."""
    with (first := Start(run, url)) as one:
        saved(one, 1, 1.0)
        other = copy_of(run, tmp_path / "other")
        with (second := Start(other, url)) as two:
            two.save(2, state(2.0), {})
        before = files_of(back(url, tmp_path / "before"))
        one.save(2, state(3.0), {})
    assert files_of(back(url, tmp_path / "after")) == before and not second.warnings
    said, again = first.warnings
    assert f"step_2 is not copied: --checkpoint-mirror {url} belongs to the run in {other} on" in said
    assert "the mirror lacks the newest checkpoint" in again
    with pytest.raises(UserError, match=r"holds step 2, which .* lacks: it is another run's, or .* is an older copy"):
        Start(copy_of(run, tmp_path / "third"), url).__enter__()


def test_a_run_that_is_ahead_of_its_mirror_goes_on_elsewhere(run, url, tmp_path):
    """Its checkpoint of the copied step is gone; the time of the step in metrics.jsonl says that it is the same run."""
    log(run, 1, 5.25)
    with Start(run, url) as one:
        one.save(1, state(1.0), {})
    ahead = copy_of(run, tmp_path / "ahead")
    log(ahead, 2, 6.5)
    saver = Saver(ahead / "checkpoints", ALONE, Keep(1), print, asynchronous=False)
    saver.save(2, state(2.0), {})
    fork = copy_of(ahead, tmp_path / "fork")
    (fork / "metrics.jsonl").write_text("")
    log(fork, 1, 5.75)
    with pytest.raises(UserError, match=r"holds step 1, which .*fork lacks"):
        Start(fork, url).__enter__()
    with Start(ahead, url) as one:
        one.forget(2)
    assert of_run(ahead).items() <= files_of(back(url, tmp_path / "back")).items()


def test_a_start_that_fails_gives_the_folder_back(tmp_path, url):
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(UserError, match="no weights"), mirror_of(url, run, ALONE, new=True) as mirror:
        mirror.take()
        raise UserError("no weights")
    assert not any(run.iterdir()) and not fsspec.filesystem("memory").exists("/bucket/fox/mirror.json")


# Restoring.


def test_a_mirror_is_restored_with_the_checkpoints_that_the_run_had(run, url, tmp_path):
    with Start(run, url) as one:
        for step in (1, 2, 3):
            saved(one, step, float(step))
    restored = restore(url, tmp_path / "restored")
    assert of_run(restored) == of_run(run) and len(manifest.folders(restored / "checkpoints")) == 2
    before = files_of(restored)
    assert restore(url, restored) == restored and files_of(restored) == before
    with Start(restored, url) as one:  # goes on with the mirror
        one.save(4, state(4.0), {})
    with pytest.raises(UserError, match=r"holds step 4, which .*older lacks"):
        Start(copy_of(run, tmp_path / "older"), url).__enter__()


def test_a_folder_with_another_run_or_newer_steps_is_not_restored_into(run, url, tmp_path):
    with Start(run, url) as one:
        one.save(1, state(1.0), {})
    saver = Saver(run / "checkpoints", ALONE, Keep(2), print, asynchronous=False)
    saver.save(2, state(2.0), {})
    other = run_in(tmp_path / "other")
    for folder, why in (
        (run, f"{run} is at step 2, and --resume {url} at step 1: continue the newer one with --resume {run}"),
        (other, f"{other} holds another run than --resume {url}: name another folder with --output"),
    ):
        before = files_of(folder)
        with pytest.raises(UserError) as refused:
            restore(url, folder)
        assert why in str(refused.value) and files_of(folder) == before
    with pytest.raises(UserError, match="--resume memory://bucket/none holds no complete copy of a run"):
        restore("memory://bucket/none", tmp_path / "none")


def test_a_damaged_copy_is_skipped_and_names_of_other_folders_are_refused(run, url, tmp_path, capsys):
    with Start(run, url) as one:
        for step in (1, 2, 3):
            saved(one, step, float(step))
    memory = fsspec.filesystem("memory")
    (shard,) = memory.glob("/bucket/fox/checkpoints/step_3/a/weights/*")
    memory.pipe_file(shard, memory.cat_file(shard)[:-1] + b"?")
    written = json.loads(memory.cat_file("/bucket/fox/checkpoints/step_2/manifest.json"))
    del written["crc32"]
    written["files"]["../../../../evil"] = {"bytes": 1, "crc32": 1}
    memory.pipe_file("/bucket/fox/checkpoints/step_2/manifest.json", manifest.as_text(written).encode())
    restored = restore(url, tmp_path / "restored")
    said = capsys.readouterr().out
    assert "skipped step 3" in said and "its checksum is not the manifest's" in said
    assert "skipped step 2" not in said  # it is no manifest
    assert_same(checkpoint_of(restored, 1), state(1.0))
    assert [path.name for path in manifest.folders(restored / "checkpoints")] == ["step_1"]


# Kills.


class Mortal(LocalFileSystem):
    """A storage that kills the process in the middle of an operation that changes it, the one of a number."""

    protocol = "mortal"
    left = -1

    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(str(path).removeprefix("mortal://"))

    def _half(self, place: str, content: bytes) -> None:
        Mortal.left -= 1
        if Mortal.left == 0:
            Path(place).write_bytes(content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    def _before(self) -> None:
        Mortal.left -= 1
        if Mortal.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def pipe_file(self, path, value, mode="overwrite", **more):
        self._half(path, value)
        super().pipe_file(path, value, mode, **more)

    def put_file(self, here, there, callback=None, **more):
        self._half(there, Path(here).read_bytes())
        super().put_file(here, there, callback, **more)

    def mv(self, path1, path2, recursive=True, **more):
        self._before()
        super().mv(path1, path2, recursive, **more)

    def rm_file(self, path):
        self._before()
        super().rm_file(path)

    def makedirs(self, path, exist_ok=False):
        self._before()
        super().makedirs(path, exist_ok)


fsspec.register_implementation("mortal", Mortal, clobber=True)


def life(run: Path, url: str, dies_at: int) -> int:
    """Steps 1 to 3 in a process of its own, of which step 2 is written twice; the exit code, minus a signal."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        Mortal.left = dies_at
        with Start(run_in(run), url, new=True) as one:
            for number, (step, value) in enumerate([(1, 1.0), (2, 2.0), (2, 2.5), (3, 3.0)]):
                log(run, step, number)
                saved(one, step, value)
        code = 0
    finally:
        os._exit(code)


@pytest.mark.slow
def test_killed_at_every_operation_a_mirror_holds_a_whole_checkpoint(tmp_path, unchecked, capsys):
    """Bit for bit, with the settings, and with the metrics up to it; and its run goes on with the mirror."""
    states = {1: [state(1.0)], 2: [state(2.0), state(2.5)], 3: [state(3.0)]}
    newest = []
    for number in range(1, 200):
        run, mirror = tmp_path / f"run{number}", tmp_path / f"mirror{number}"
        code = life(run, f"mortal://{mirror}", number)
        try:
            restored = restore(f"file://{mirror}", tmp_path / f"back{number}")
        except UserError as error:
            assert "holds no complete copy of a run" in str(error)
            newest.append(0)
        else:
            assert "skipped" not in capsys.readouterr().out  # no manifest of files that are not there
            folder, _, skipped = manifest.newest_sound(restored, ALONE)
            newest.append(step := manifest.step_of(folder))
            assert not skipped and (restored / "config.yaml").read_text() == "seed: 0\n"
            assert any(
                all(torch.equal(own[key], one[key]) for key in one)
                for own in [checkpoint_of(restored, step)]
                for one in states[step]
            )
            steps = [json.loads(line)["step"] for line in (restored / "metrics.jsonl").read_text().splitlines()]
            assert sorted({*steps})[:step] == list(range(1, step + 1)), number
        with (start := Start(run, f"file://{mirror}")) as one:
            one.save(4, state(4.0), {})
        assert not start.warnings
        assert_same(checkpoint_of(mirror, 4), state(4.0))
        if code == 0:
            break
        assert code == -signal.SIGKILL
    first = newest.index(2)
    back = newest.index(1, first)  # while step 2 is written again, the step before it is the newest
    forth = newest.index(2, back)
    assert code == 0 and number > 30 and newest[:first] == sorted(newest[:first])
    assert {*newest[back:forth]} == {1} and newest[forth:] == sorted(newest[forth:]) and newest[-1] == 3
