"""Objects from outside this package: package.module:NAME or path/to/file.py:NAME in settings, or entry points.

A package that is installed beside this one offers methods, model families, scorers and policy objectives by name, as
entry points of the groups unified_trainer.methods, .families, .scorers and .objectives.
"""

import functools
import hashlib
import importlib
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from unified_trainer.basics.errors import MissingFileError, UserError, working_on
from unified_trainer.basics.read_code import FromBytes, ReadModules, closure, modules_of
from unified_trainer.basics.trust import Fact, is_asking, remember, require, setting_of

OWN = "unified_trainer."  # beginning of the modules of this package
INSTALLED = {
    *map(os.path.abspath, (*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()))
}


@dataclass(frozen=True)
class Code:
    """The code that package.module:NAME or path/to/file.py:NAME names: what would be executed, as bytes."""

    spec: str
    place: str  # file or folder, and NAME
    files: Mapping[str, bytes]  # with the modules of its own folder that it imports
    folder: str  # place on the module path; "" for an installed package, whose other modules are the user's own

    @classmethod
    def read(cls, spec: str) -> "Code":
        """Read it without executing anything; of a module that is not there no file is found."""
        place, _, name = spec.rpartition(":")
        if place.endswith(".py"):
            file = os.path.abspath(place)
            return cls(spec, f"{file}:{name}", closure([file], os.path.dirname(file)), os.path.dirname(file))
        top, *rest = place.split(".")
        try:
            found = importlib.util.find_spec(top)  # the whole name would execute its package
        except ValueError:  # __main__
            found = None
        if found is None or not (found.has_location or found.submodule_search_locations):
            return cls(spec, f"module {place}:{name} ({'not found' if found is None else found.origin})", {}, "")
        if found.has_location and found.origin:
            folder = Path(found.origin).parents[found.submodule_search_locations is not None]
        else:  # a folder without __init__.py
            folder = Path(next(iter(found.submodule_search_locations or ()))).parent
        starts = modules_of(str(folder / top)) or modules_of(str(folder.joinpath(top, *rest)))
        own = str(folder.absolute()) not in INSTALLED
        files = closure(starts, str(folder)) if own else {file: Path(file).read_bytes() for file in sorted(starts)}
        return cls(spec, f"{folder.joinpath(top, *rest)}:{name}", files, str(folder.absolute()) if own else "")

    def fact(self, setting: str, value: str = "", origin: str = "") -> Fact:
        """Return what its setting would do; `value` is the setting's own text, if it is a name for the code."""
        return Fact(setting, "run", value or self.spec, self.place, digest_of(self.files), origin)


def digest_of(files: Mapping[str, bytes]) -> str:
    """Return the SHA-256 of files with their paths."""
    whole = hashlib.sha256()
    for file, content in files.items():
        whole.update(f"{file} {len(content)}\n".encode(errors="surrogateescape") + content)
    return whole.hexdigest()


def installed(kind: Literal["methods", "families", "scorers", "objectives"]) -> dict[str, str]:
    """Return what installed packages offer, by name, as package.module:NAME."""
    return _installed(kind, tuple(sys.path))


@functools.cache
def _installed(kind: str, _: tuple[str, ...]) -> dict[str, str]:
    """Read what all packages of an import path declare, which takes 30 ms."""
    return {point.name: point.value for point in entry_points(group=f"unified_trainer.{kind}")}


def agreed_bytes(file: str, key: str, value: str = "") -> bytes:
    """Return the content of a file that holds a program; UserError unless the user agrees to just this content."""
    content, place = Path(file).read_bytes(), os.path.abspath(file)
    require([Fact(setting_of(key), "run", value or file, place, digest_of({place: content}))])
    return content


def agreed_code(spec: str, key: str, value: str = "") -> Code:
    """Return code that may run; UserError unless the user agrees. `value` is the setting's own text, if another."""
    code = Code.read(spec)
    require([code.fact(setting_of(key), value)])
    return code


def agree_to_scorer(kind: str, key: str) -> None:
    """Note that the command line names a scorer's code by another flag than that of its setting `key`."""
    if ":" in (spec := installed("scorers").get(kind, kind)):
        remember([Code.read(spec).fact(key, kind)])


def load_object(spec: str, key: str, value: str = "") -> Any:
    """Return the object that `spec` names; `key` is the setting it comes from, and `value` its text if it is another.

    A module is imported. A file is executed once per process, under a module name that depends on its path alone, so
    that its objects are the same for every spec that names it. The bytes that the user agreed to are executed, those of
    the modules beside a file too. Raise UserError if the form is wrong, if the code is not agreed to, or if the file,
    the module or the name is missing; an exception inside the file or module keeps its traceback, which ends with the
    setting.
    """
    place, _, name = spec.rpartition(":")
    is_file = place.endswith(".py")
    if not (name.isidentifier() and (is_file or all(part.isidentifier() for part in place.split(".")))):
        raise UserError(f"{key} {spec!r} must be package.module:NAME or path/to/file.py:NAME")
    if not spec.startswith(OWN):
        code = agreed_code(spec, key, value)
        if code.folder:
            _SETTINGS[code.folder] = key, value or spec
            _MODULES.add(code.files if is_asking() else {}, code.folder)
    with working_on(f"{key} {spec}"):
        module = _execute(Path(place), key, code.files) if is_file else _import(place, key)
    try:
        return vars(module)[name]
    except KeyError as error:
        raise UserError(f"{key} {spec!r}: {place} defines no {name}") from error


def _unread(file: str, folder: str) -> bytes:
    """Return the content of a module that no import statement names, such as one that is imported by a function."""
    return agreed_bytes(file, *_SETTINGS[folder])


_MODULES = ReadModules(_unread)
_SETTINGS: dict[str, tuple[str, str]] = {}  # the setting, and its text, by which a folder's modules are imported


def _import(place: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports something that is not
        raise UserError(
            f"{key}: no module {error.name}; install its package, or put its folder on PYTHONPATH"
        ) from error


def _execute(file: Path, key: str, files: Mapping[str, bytes]) -> ModuleType:
    if (content := files.get(os.path.abspath(file))) is None:
        raise MissingFileError(f"{key} {file}: no such file")
    digest = hashlib.sha256(str(file.resolve()).encode()).hexdigest()
    name = f"unified_trainer_plugin_{file.stem}_{digest[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    loader = FromBytes(name, os.path.abspath(file), content)
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None  # it has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look their module up
    try:
        loader.exec_module(module)
    except Exception:
        del sys.modules[name]
        raise
    return module
