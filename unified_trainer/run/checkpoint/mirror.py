"""Copies of checkpoints in a remote folder, of any kind that fsspec knows: s3://, gs://, az://, sftp://, file://."""

import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import fsspec

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.secrets import masked
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.run.checkpoint import manifest
from unified_trainer.run.checkpoint.manager import NoSaver, Saver

CONFIG = "config.yaml"
BESIDE = (CONFIG, "metrics.jsonl")  # files of the run directory that are copied with each checkpoint


def check_mirror(url: str, mesh: Mesh, *, new: bool) -> None:
    """Raise UserError if the folder cannot be read, or, for a `new` run, holds the copy of another one."""
    if not url or not mesh.is_main:
        return
    key = f"--checkpoint-mirror {masked(url)}"
    try:
        files, place = fsspec.core.url_to_fs(url)
        taken = files.exists(f"{place}/{CONFIG}")
    except Exception as error:  # each storage has its own
        raise UserError(
            f"{key} cannot be read ({masked(str(error))}): install its package, look at URL and login, or leave it out"
        ) from error
    if new and taken:
        raise UserError(f"{key} already holds the copy of a run: copy it back and --resume it, or name another folder")


def saver_of(url: str, root: Path, *arguments: Any, never: bool = False, **options: Any) -> Saver:
    """Return a `Saver` of these arguments, which also copies checkpoints where a URL is given, or `never` saves."""
    if never:
        return NoSaver(root, *arguments, **options)
    return MirroringSaver(url, root, *arguments, **options) if url else Saver(root, *arguments, **options)


class MirroringSaver(Saver):
    """A saver whose complete checkpoints a thread of the main rank copies into a remote folder, laid out as the run's.

    A copy is complete or, without its manifest, absent: that comes last, and goes first where a step is copied again.
    A failure is a printed warning. Nothing else is removed there.
    """

    def __init__(self, url: str, root: Path, *arguments: Any, **options: Any) -> None:
        """Take the URL of the folder, which credentials of its kind's own open, and the arguments of `Saver`."""
        super().__init__(root, *arguments, **options)
        self._url = url
        self._copier = ThreadPoolExecutor(1, "mirror")
        self._copies: list[Future[None]] = []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the copies too, unless KeyboardInterrupt (a second Ctrl-C) ends the run."""
        super().__exit__(kind, error, trace)
        if kind is not KeyboardInterrupt and any(not copy.done() for copy in self._copies):
            self._say(f"waiting for the copies of checkpoints to {masked(self._url)}")
        self._copier.shutdown(wait=kind is not KeyboardInterrupt, cancel_futures=kind is KeyboardInterrupt)

    def forget(self, step: int) -> None:
        """Remove what need not be kept, as each write ends; then copy the checkpoint of this step, if there is one."""
        super().forget(step)
        folder = self._root / f"step_{step}"
        if self._mesh.is_main and folder.is_dir():
            self._copies = [copy for copy in self._copies if not copy.done()]
            self._copies.append(self._copier.submit(self._copy, folder))

    def _copy(self, folder: Path) -> None:
        try:
            text = (folder / manifest.FILE).read_bytes()
            files, place = fsspec.core.url_to_fs(self._url)
            copied = f"{place}/checkpoints/{folder.name}"
            listed = json.loads(text)["files"]
            if _listed(files, f"{copied}/{manifest.FILE}") != listed:
                if files.exists(f"{copied}/{manifest.FILE}"):
                    files.rm_file(f"{copied}/{manifest.FILE}")
                _put(files, folder, copied, list(listed))
            files.pipe_file(f"{copied}/{manifest.FILE}", text)
            run = self._root.parent
            _put(files, run, place, [name for name in BESIDE if (run / name).is_file()])
        except Exception as error:  # noqa: BLE001  (each storage has its own)
            self._say(
                f"warning: {folder} is not copied to {masked(self._url)}: {type(error).__name__}: "
                f"{masked(str(error))}. Training continues; the next checkpoint is tried again. Raise keep_last if "
                "checkpoints are removed before they are copied"
            )


def _listed(files: Any, file: str) -> Any:
    """Return the files that a copied manifest lists; None without one, or for one that was cut off."""
    try:
        return json.loads(files.cat_file(file)).get("files")
    except (FileNotFoundError, ValueError):
        return None


def _put(files: Any, folder: Path, place: str, names: Sequence[str]) -> None:
    for name in names:
        files.makedirs(f"{place}/{name}".rpartition("/")[0], exist_ok=True)
        files.put_file(str(folder / name), f"{place}/{name}")
