"""The mirror of a run: its checkpoints, and what its continuation reads besides, in a folder of a remote storage.

`mirror.json` there names the run that the folder belongs to, and the start of it that copies. It is compared before
each copy: two runs, or two continuations of one, never write into one folder.
"""

import json
import secrets
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.own_files import write
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.run.checkpoint import manifest
from unified_trainer.run.checkpoint.manager import NoSaver, Saver
from unified_trainer.run.checkpoint.remote_folder import RemoteFolder

KEY = "--checkpoint-mirror"
OWNER, CONFIG, METRICS, CHECKPOINTS, KEPT = "mirror.json", "config.yaml", "metrics.jsonl", "checkpoints", "kept.json"
BESIDE = ("environment.jsonl", METRICS, "trackers.json", "wandb.json", "swanlab.json", CONFIG)  # a continuation reads


class Mirror:
    """A remote folder that belongs to this start of a run."""

    def __init__(self, address: str, run: Path, *, new: bool) -> None:
        """Open the folder for the run in the directory `run`; `take` is still to be called."""
        self.remote, self._run, self._new, self.note = RemoteFolder(address, KEY), run, new, ""
        self._before, self._record, self._copied = read(run / OWNER), dict[str, str](), False

    def take(self) -> None:
        """Make the folder this run's; UserError if it is another run's, or holds what this run would overwrite."""
        remote, run, new = self.remote, self._run, self._new
        if remote.local is not None and run.resolve() in (remote.local, *remote.local.parents):
            raise UserError(f"{KEY} {remote.shown} lies in the run directory {run}: name a folder outside it")
        owner, own = record_in(remote.read(OWNER)), record_in(self._before)
        place = {"folder": str(run.resolve()), "host": socket.gethostname()}
        self._record = {"run": own.get("run") or secrets.token_hex(8), "start": secrets.token_hex(8), **place}
        newest = next((step for step in reversed(steps_in(remote)) if listed(remote, step) is not None), None)
        used = newest is not None or remote.read(CONFIG) is not None
        elsewhere = used and not (owner and place.items() <= owner.items())
        if owner.get("run", own.get("run")) != own.get("run") or (new and used and not owner):
            raise self._refusal(owner, used=used)
        if elsewhere and newest is not None and not self._has_made(newest):
            raise UserError(
                f"{KEY} {remote.shown} holds step {newest}, which {run} lacks: it is another run's, or {run} is an "
                f"older copy. Continue that run with --resume {remote.shown}, or name another folder"
            )
        if elsewhere:
            self.note = f"{remote.shown} holds copies from another place; this run goes on with them"
        content = json.dumps(self._record).encode()
        write(run / OWNER, content)
        with suppress(FileExistsError):  # of a run that starts at this moment
            (remote.write if owner or used else remote.create)(OWNER, content)
        self.confirm()

    def confirm(self) -> None:
        """Raise UserError if the folder belongs to another run, or to another start of this one."""
        if (owner := record_in(self.remote.read(OWNER))) != self._record:
            raise self._refusal(owner, used=self._record["run"] == owner.get("run"))

    def _refusal(self, owner: Mapping[str, Any], *, used: bool) -> UserError:
        holder = f"the run in {owner.get('folder')} on {owner.get('host')}" if owner else f"no known run: no {OWNER}"
        way_out = f"continue that run with --resume {self.remote.shown}"
        if not used:
            way_out = f"remove {self.remote.shown}/{OWNER} if that run is gone and has copied nothing"
        return UserError(f"{KEY} {self.remote.shown} belongs to {holder}: name another folder, or {way_out}")

    def _has_made(self, step: int) -> bool:
        """Return whether this run made a copied step: it has the same checkpoint, or the time of it in its metrics."""
        if manifest.read(self._run / CHECKPOINTS / f"step_{step}")[0].get("files") == listed(self.remote, step):
            return True
        own, copied = (
            set((text or b"").splitlines()) for text in (read(self._run / METRICS), self.remote.read(METRICS))
        )
        made = {line for line in copied if line.startswith(b'{"step": %d, ' % step) and b'"train/' in line}
        return bool(made) and made <= own

    def copy(self, folder: Path, beside: Mapping[str, bytes], kept: list[int]) -> None:
        """Copy a checkpoint. The manifest comes last, and goes first where a step is copied again.

        `beside` are the files of the run directory, and `kept` the steps whose checkpoints it has, as of the end of the
        write. Later steps, which the run went back from, lose their manifest.
        """
        self.confirm()
        copied, text = f"{CHECKPOINTS}/{folder.name}", (folder / manifest.FILE).read_bytes()
        files = json.loads(text)["files"]
        if listed(self.remote, manifest.step_of(folder)) != files:
            self.remote.remove(f"{copied}/{manifest.FILE}")
            for name in files:
                self.remote.send(folder / name, f"{copied}/{name}")
            self.confirm()  # it may have taken long
        for step in steps_in(self.remote):
            if step > max(kept):
                self.remote.remove(f"{CHECKPOINTS}/step_{step}/{manifest.FILE}")
        for name, content in beside.items():
            self.remote.write(name, content)
        self.remote.write(f"{copied}/{KEPT}", json.dumps(dict.fromkeys(kept)).encode())
        self.remote.write(f"{copied}/{manifest.FILE}", text)
        self._copied = True

    def leave(self) -> None:
        """Give back a folder that nothing was copied into."""
        if self._copied or not self._record:
            return
        with suppress(UserError):
            self.confirm()
            if self.remote.read(CONFIG) is None:
                self.remote.remove(OWNER)
        if self._before is None and not (self._run / CONFIG).exists():
            (self._run / OWNER).unlink(missing_ok=True)


@contextmanager
def mirror_of(address: str, run: Path, mesh: Mesh, *, new: bool) -> Iterator[Mirror | None]:
    """Open the mirror of the run in the directory `run`; None without an address, and on ranks that copy nothing."""
    if not address or not mesh.is_main:
        yield None
        return
    mirror = Mirror(address, run, new=new)
    try:
        yield mirror
    finally:
        mirror.leave()


def saver_of(mirror: Mirror | None, root: Path, *arguments: Any, never: bool = False, **options: Any) -> Saver:
    """Return a `Saver` of these arguments, which also copies checkpoints where a run has a mirror, or `never` saves."""
    if never:
        return NoSaver(root, *arguments, **options)
    return Saver(root, *arguments, **options) if mirror is None else MirroringSaver(mirror, root, *arguments, **options)


class MirroringSaver(Saver):
    """A saver whose complete checkpoints a thread of the main rank copies into the mirror.

    A failure is a printed warning, and again at the end if no later copy succeeded. No copy is removed there.
    """

    def __init__(self, mirror: Mirror, root: Path, *arguments: Any, **options: Any) -> None:
        """Take the mirror, and the arguments of `Saver`."""
        super().__init__(root, *arguments, **options)
        self._mirror, self._lacks = mirror, ""  # why the mirror lacks the newest checkpoint
        self._copier = ThreadPoolExecutor(1, "mirror")
        self._copies: list[Future[None]] = []

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Wait for the copies too, unless KeyboardInterrupt (a second Ctrl-C) ends the run."""
        super().__exit__(kind, *rest)
        if kind is not KeyboardInterrupt and any(not copy.done() for copy in self._copies):
            self._say(f"waiting for the copies of checkpoints to {self._mirror.remote.shown}")
        self._copier.shutdown(wait=kind is not KeyboardInterrupt, cancel_futures=kind is KeyboardInterrupt)
        if self._lacks:
            self._say(f"warning: the mirror lacks the newest checkpoint: {self._lacks}")

    def forget(self, step: int) -> None:
        """Remove what need not be kept, as each write ends; then copy the checkpoint of this step, if there is one."""
        super().forget(step)
        folder, run = self._root / f"step_{step}", self._root.parent
        if self._mesh.is_main and folder.is_dir():
            beside = {name: content for name in BESIDE if (content := read(run / name)) is not None}
            kept = [manifest.step_of(path) for path in manifest.folders(self._root)]
            self._copies = [copy for copy in self._copies if not copy.done()]
            self._copies.append(self._copier.submit(self._copy, folder, beside, kept))

    def _copy(self, folder: Path, beside: Mapping[str, bytes], kept: list[int]) -> None:
        try:
            self._mirror.copy(folder, beside, kept)
        except (UserError, OSError) as error:  # OSError: the checkpoint was removed meanwhile
            self._lacks = f"{folder} is not copied: {error}"
            self._say(
                f"warning: {self._lacks}. Training continues; the next checkpoint is tried again. Raise keep_last if "
                "checkpoints are removed before they are copied"
            )
        else:
            self._lacks = ""


def steps_in(remote: RemoteFolder) -> list[int]:
    """Return the steps that a mirror has a folder for, lowest first."""
    return sorted(int(match[1]) for name in remote.names(CHECKPOINTS) if (match := manifest.STEP.fullmatch(name)))


def listed(remote: RemoteFolder, step: int) -> dict[str, Any] | None:
    """Return the files that a copied manifest lists; None without one, or for one that lists no files below it."""
    files = record_in(remote.read(f"{CHECKPOINTS}/step_{step}/{manifest.FILE}")).get("files")
    below = isinstance(files, dict) and all(
        isinstance(entry, dict)
        and {"bytes": int, "crc32": int} == {key: type(value) for key, value in entry.items()}
        and not name.startswith("/")
        and ".." not in name.split("/")
        for name, entry in files.items()
    )
    return files if below else None


def record_in(content: bytes | None) -> dict[str, Any]:
    """Return an object of JSON, an empty one for none or one that was cut off."""
    try:
        record = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def read(file: Path) -> bytes | None:
    """Return the content of a file of the run directory, None without one."""
    try:
        return file.read_bytes()
    except (FileNotFoundError, IsADirectoryError):
        return None
