"""Objects from outside this package: package.module:NAME or path/to/file.py:NAME in settings, or entry points.

A package that is installed beside this one offers methods, model families and scorers by name, as entry points of the
groups unified_trainer.methods, unified_trainer.families and unified_trainer.scorers.
"""

import hashlib
import importlib
import importlib.util
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from unified_trainer.basics.errors import MissingFileError, UserError, working_on
from unified_trainer.basics.moves import naming_moves
from unified_trainer.basics.trust import check_code


def installed(kind: Literal["methods", "families", "scorers"]) -> dict[str, EntryPoint]:
    """Return what installed packages offer, by name; `load` of an entry point imports it."""
    return {point.name: point for point in entry_points(group=f"unified_trainer.{kind}")}


def load_object(spec: str, key: str) -> Any:
    """Return the object that `spec` names; `key` is the setting it comes from, for messages.

    A module is imported. A file is executed once per process, under a module name that depends on its path alone, so
    that its objects are the same for every spec that names it. Raise UserError if the form is wrong, if the code is not
    trusted, or if the file, the module or the name is missing; an exception inside the file or module keeps its
    traceback, which ends with the setting.
    """
    place, _, name = spec.rpartition(":")
    is_file = place.endswith(".py")
    if not (name.isidentifier() and (is_file or all(part.isidentifier() for part in place.split(".")))):
        raise UserError(f"{key} {spec!r} must be package.module:NAME or path/to/file.py:NAME")
    check_code(spec, key)
    with working_on(f"{key} {spec}"), naming_moves():
        module = _execute(Path(place), key) if is_file else _import(place, key)
    try:
        return vars(module)[name]
    except KeyError as error:
        raise UserError(f"{key} {spec!r}: {place} defines no {name}") from error


def _import(place: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports something that is not
        raise UserError(
            f"{key}: no module {error.name}; install its package, or put its folder on PYTHONPATH"
        ) from error


def _execute(file: Path, key: str) -> ModuleType:
    if not file.is_file():
        raise MissingFileError(f"{key} {file}: no such file")
    digest = hashlib.sha256(str(file.resolve()).encode()).hexdigest()
    name = f"unified_trainer_plugin_{file.stem}_{digest[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # the file is there
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception:
        del sys.modules[name]
        raise
    return module
