"""Python modules that are executed from bytes which were read before, never from a .pyc beside their file.

Only the standard library is imported, and Python 3.8 suffices: a scorer's own Python uses this file too.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any


class FromBytes(SourceFileLoader):
    """Executes the source that it is given; what lies in the file by now, or in its cache, is not looked at."""

    def __init__(self, name: str, file: str, content: bytes) -> None:
        super().__init__(name, file)
        self.content = content

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.content, self.path)


class ReadModules:
    """Finds the modules that lie in the folders of a user's code, whose bytes were read."""

    def __init__(self, unread: Callable[[str, str], bytes]) -> None:
        """`unread` returns the content of another file of a folder, given both, or raises to refuse it."""
        self.files: dict[str, bytes] = {}
        self.folders: set[str] = set()  # places on the module path
        self._unread = unread

    def add(self, files: Mapping[str, bytes], folder: str) -> None:
        """Import the modules of a folder from the bytes of these files from now on; others are `unread`."""
        self.files.update(files)
        self.folders.add(folder)
        if self not in sys.meta_path:  # before the finder that would take a .pyc, behind those of the interpreter
            places = [place for place, finder in enumerate(sys.meta_path) if finder is PathFinder]
            sys.meta_path.insert(places[0] if places else len(sys.meta_path), self)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return what Python's own finder does for a module of these folders, with a loader of bytes; else None."""
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or not spec.has_location or not spec.origin:
            return None
        file = folder = os.path.abspath(spec.origin)
        for _ in range(name.count(".") + 1 + (spec.submodule_search_locations is not None)):
            folder = os.path.dirname(folder)
        if folder not in self.folders:
            return None
        content = self.files[file] if file in self.files else self._unread(file, folder)
        if file.endswith(".py"):
            spec.loader, spec.cached = FromBytes(name, file, content), None
        return spec


def closure(files: Iterable[str], folder: str) -> dict[str, bytes]:
    """Read files with all modules of their folder that import statements name, and so on; none is executed.

    A package counts whole, also its compiled modules. A file that is missing or cannot be read is left out.
    """
    found: dict[str, bytes] = {}
    todo = [os.path.abspath(file) for file in files]
    while todo:
        file = todo.pop()
        if file in found or not os.path.isfile(file):
            continue
        with open(file, "rb") as opened:
            found[file] = opened.read()
        for name in _imported(found[file]) if file.endswith(".py") else ():
            todo += modules_of(os.path.join(folder, name))
    return dict(sorted(found.items()))


def modules_of(place: str) -> list[str]:
    """Return the files of a module: `place` with the endings of modules, and all modules of a package of this name."""
    endings = (".py", *EXTENSION_SUFFIXES)
    files = [place + ending for ending in endings if os.path.isfile(place + ending)]
    if os.path.isfile(os.path.join(place, "__init__.py")):
        for folder, _, names in os.walk(place):
            files += [os.path.join(folder, name) for name in names if name.endswith(endings)]
    return files


def _imported(source: bytes) -> set[str]:
    """Return the first parts of the names that a source imports; none of one that Python cannot parse."""
    try:
        nodes = [*ast.walk(ast.parse(source))]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names} - {""}
