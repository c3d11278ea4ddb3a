"""The folder that a command writes over several calls: a file in it says what is written and refuses anything else."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unified_trainer.checkpoint.run_lock import LOCK
from unified_trainer.errors import OutputExistsError
from unified_trainer.input_files import read_json


def check_output(folder: Path, about: str, what: str) -> None:
    """Raise OutputExistsError unless the folder is absent, empty, or holds the file `about`."""
    if not folder.exists() or (folder / about).is_file():
        return
    if not folder.is_dir() or any(file.name != LOCK for file in folder.iterdir()):
        raise OutputExistsError(f"{folder} exists and is no folder of {what}; choose another one or remove it")


def begin_output(folder: Path, about: str, settings: Mapping[str, Any], what: str) -> None:
    """Begin a folder by writing its file `about`; OutputExistsError if it holds anything of other settings.

    `what` names the content of such folders in messages.
    """
    check_output(folder, about, what)
    settings = json.loads(json.dumps(settings))
    if not (folder / about).is_file():
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
    building.write_text(text, encoding="utf-8")
    building.replace(file)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
