"""Relative paths in a run's config.yaml: they count from a folder in which the run was started or continued.

config.yaml keeps them as they were given, so that a run can be copied to a machine with the same files in another
place; environment.jsonl has the folders. A path that is found in the present folder is taken from there.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unified_trainer.basics.errors import MissingFileError, UserError
from unified_trainer.basics.input_files import parse_object, read_text, read_yaml

ENVIRONMENT = "environment.jsonl"
FOLDER = "folder"  # key in environment.jsonl: the working directory of a start
# Settings that are a file or folder, and those that may be path/to/file.py:NAME.
PATHS = re.compile(
    r"([\w.-]+\.)?path|reward\.([\w.-]+\.)?python|encoders\.cache|(validation\.)?prompts|validation\.(sets\.[\w-]+|real_clips|i3d)"
)
PINNED = re.compile(r"@[0-9a-f]{40}(/|$)")  # in a hub id, or a hub's file, of config.yaml
OBJECTS = re.compile(r"method|families|tracking\.custom|algorithm\.objective\.kind|reward\.([\w.-]+\.)?kind")


def located(settings: Mapping[str, Any], run: Path) -> dict[str, Any]:
    """Return flat settings of a run directory with each relative path that only its own folders have made absolute.

    The folder of the newest start that has the file counts. Paths that are found in the present folder, or nowhere,
    stay as they are.
    """
    folders = _folders(run)
    return {key: _located(key, value, folders) for key, value in settings.items()}


def as_typed(tree: Mapping[str, Any], typed: Mapping[str, Any], run: Path) -> dict[str, Any]:
    """Return nested settings with the paths that `located` made absolute as the flat settings `typed` have them."""
    found = located(typed, run)

    def put_back(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for name, value in values.items():
            key = f"{prefix}{name}"
            if isinstance(value, Mapping):
                tree[name] = put_back(value, f"{key}.")
            else:
                tree[name] = typed[key] if key in found and found[key] == value else value
        return tree

    return put_back(tree, "")


@contextmanager
def naming_origin(run: Path | None, way_out: str) -> Iterator[None]:
    """Say of a missing file that it is a relative path of config.yaml, where it was looked for, and what to do.

    `run` is the directory that the settings come from; without one nothing is said. `way_out` ends the message; {key}
    in it is the setting.
    """
    try:
        yield
    except UserError as error:  # also of the hub, which a relative path that is absent may look like an id of
        if run is None:
            raise
        lost = {key: place for key, place in _lost(run).items() if _names(str(error), place)}
        if not lost:
            raise
        key, place = max(lost.items(), key=lambda item: len(item[1]))
        folders = ", ".join(map(str, dict.fromkeys((Path.cwd(), *_folders(run)))))
        raise MissingFileError(
            f"{error}. {run / 'config.yaml'} has it as {key}: {place}, relative to the folder where the run was "
            f"started; looked for in {folders}. {way_out.format(key=key)}"
        ) from error


def _folders(run: Path) -> list[Path]:
    """Return the folders in which a run was started or continued, newest first; a line without one is passed over."""
    try:
        lines = read_text(run / ENVIRONMENT).splitlines()
    except UserError:
        return []  # a run without the file: all that is lost is where its paths count from
    folders: dict[Path, None] = {}
    for line in reversed(lines):
        try:
            folder = parse_object(line, ENVIRONMENT).get(FOLDER)
        except UserError:
            continue  # a torn line
        if isinstance(folder, str) and os.path.isabs(folder):
            folders[Path(folder)] = None
    return list(folders)


def _located(key: str, value: Any, folders: Sequence[Path]) -> Any:
    if isinstance(value, list):
        return [_located(key, part, folders) for part in value]
    place = _relative(key, value)
    if place and not os.path.exists(place):  # unlike Path.exists, it does not raise for a path that is too long
        for folder in folders:
            if os.path.exists(folder / place):
                return f"{folder / place}{value.removeprefix(place)}"
    return value


def _lost(run: Path) -> dict[str, str]:
    """Return the relative paths in config.yaml that are found nowhere, by setting; nested settings have dots."""
    lost: dict[str, str] = {}

    def visit(values: Mapping[str, Any], prefix: str) -> None:
        for name, value in values.items():
            if isinstance(value, Mapping):
                visit(value, f"{prefix}{name}.")
                continue
            for one in value if isinstance(value, list) else [value]:
                place = _relative(f"{prefix}{name}", one)
                if place and not any(os.path.exists(folder / place) for folder in (Path(), *_folders(run))):
                    lost[f"{prefix}{name}"] = place

    visit(read_yaml(run / "config.yaml"), "")
    return lost


def _names(message: str, place: str) -> bool:
    return re.search(rf"(?<![\w/.-]){re.escape(place)}(?![\w-])", message) is not None


def _relative(key: str, value: object) -> str:
    """Return the relative path in a setting's value, or "" if it holds none; tiny is the embedded world."""
    if not isinstance(value, str) or value in ("", "tiny") or os.path.isabs(value) or PINNED.search(value):
        return ""
    if PATHS.fullmatch(key):
        return value
    place = value.rpartition(":")[0]
    return place if OBJECTS.fullmatch(key) and place.endswith(".py") else ""
