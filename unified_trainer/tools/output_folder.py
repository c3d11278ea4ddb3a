"""The folders that commands write: over several calls, with a file that says what is in them, or whole at the end."""

import fcntl
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unified_trainer.basics.errors import OutputExistsError, writing
from unified_trainer.basics.input_files import read_json
from unified_trainer.basics.own_files import without_link
from unified_trainer.basics.terminal import say
from unified_trainer.run.checkpoint.run_lock import LOCK


def check_empty(folder: Path) -> None:
    """Raise OutputExistsError unless the folder is absent or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputExistsError(f"{folder} exists and is not an empty folder; choose another one or remove it")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a new folder that takes the place `out`, absent or empty, once all of it is written.

    It is built in a folder `.OUT-xxxxxxxx` beside it. Such folders of processes that were killed are removed and said:
    nothing locks them, and they hold nothing else.
    """
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        for left_over in sorted(out.parent.glob(f".{glob.escape(out.name)}-????????")):
            if left_over.is_dir() and [path.name for path in left_over.iterdir()] == [out.name]:
                with _locked(left_over) as free:
                    if free:
                        shutil.rmtree(left_over, ignore_errors=True)
                said = "removed" if free else "another process may be writing"
                say(f"{said} {left_over}, which is not finished")
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch, _locked(Path(scratch)):
            folder = Path(scratch, out.name)
            folder.mkdir()
            yield folder
            folder.replace(out)


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Make a hard link where the file system allows one, else a copy; symbolic links (a hub cache) are followed."""
    try:
        os.link(Path(source).resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


def check_output(folder: Path, about: str, what: str) -> None:
    """Raise OutputExistsError unless the folder is absent, empty, or holds the file `about`."""
    if not folder.exists() or (folder / about).is_file():
        return
    if not folder.is_dir() or any(not file.name.startswith(LOCK) for file in folder.iterdir()):
        raise OutputExistsError(f"{folder} exists and is no folder of {what}; choose another one or remove it")


def begin_output(folder: Path, about: str, settings: Mapping[str, Any], what: str, *, empty: bool = False) -> None:
    """Begin a folder by writing its file `about`; OutputExistsError if it holds anything of other settings.

    `what` names the content of such folders in messages. One that is `empty`, with nothing in it that depends on
    settings, is begun again.
    """
    check_output(folder, about, what)
    settings = json.loads(json.dumps(settings))
    if empty or not (folder / about).is_file():
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / about, json.dumps(settings, indent=1) + "\n")
        return
    held = read_json(folder / about)
    if differing := [key for key in settings if held.get(key) != settings[key]]:
        key = differing[0]
        raise OutputExistsError(
            f"{folder} holds other {what}: their {key} is {_short(held.get(key))}, now {_short(settings[key])}; "
            "choose another folder"
        )


def write_text(file: Path, text: str) -> None:
    """Write a text file atomically."""
    building = file.with_suffix(file.suffix + ".tmp")
    with writing(file):
        without_link(building).write_text(text, encoding="utf-8")
        building.replace(file)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder; False if another process holds the lock, or if the file system has no locks."""
    opened, free = os.open(folder, os.O_RDONLY), True
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        free = False
    try:
        yield free
    finally:
        os.close(opened)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
