"""Modules of this package that lay elsewhere before: code of a user's own that imports one is told where it is now."""

import ast
import linecache
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb

from unified_trainer.basics.errors import UserError

PACKAGE = Path(__file__).parents[1]
OWN = PACKAGE.name


@contextmanager
def naming_moves() -> Iterator[None]:
    """Turn an import inside that asks for a place which a module or a name has left into a UserError."""
    try:
        yield
    except ImportError as error:
        file = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)][-1]
        found = _outdated("".join(linecache.getlines(file)))
        if not any(f"{OWN}.{old}".startswith(error.name or "?") for old in found):
            raise
        place = Path(file)
        shown = place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place
        raise UserError(f"{shown} imports {'; and '.join(found.values())}") from error


def moves() -> dict[str, str]:
    """Return what became of former modules, and of names as module:NAME, both without the package's own name."""
    table = tomllib.loads((PACKAGE / "assets" / "moves.toml").read_text(encoding="utf-8"))
    moved = {}
    for place, before in table["modules"].items():
        for old in before.split():
            within = f"{place}.{old.rpartition('.')[2]}"
            path = PACKAGE / within.replace(".", "/")
            is_there = path.is_dir() or path.with_suffix(".py").is_file()
            moved[old] = f"{OWN}.{old}, which is {OWN}.{within if is_there else place} now"
    for place, before in table["names"].items():
        for old in before.split():
            module, _, name = old.partition(":")
            moved[old] = f"{name} of {OWN}.{module}, which is in {OWN}.{place} now"
    for before, instead in table["gone"].items():
        moved |= {old: f"{OWN}.{old}, which is gone: {instead}" for old in before.split()}
    return moved


def _outdated(source: str) -> dict[str, str]:
    """Return what became of the former modules and names that a program imports, in its order."""
    known, found = moves(), {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            asked = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            asked = [(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        for module, name in asked:
            inner = module.removeprefix(OWN).removeprefix(".")
            if module.partition(".")[0] == OWN:
                keys = (f"{inner}:{name}", f"{inner}.{name}".removeprefix("."), inner)
                found |= {key: known[key] for key in [key for key in keys if key in known][:1]}
    return found
