"""Python code and programs that settings name: a command runs what its command line names, and what is trusted.

A run folder, a recipe or a config file of somebody else can name code of its own. The user's trust is remembered by the
code's content, in $XDG_STATE_HOME/unified_trainer/trusted or below ~/.local/state: never in the run folder, which may
have come with it. Outside a command, as in a Python program that imports this package, nothing is asked.
"""

import hashlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from unified_trainer.basics.errors import UserError

FLAG = "--trust"
OWN = "unified_trainer."  # beginning of the modules of this package
_words: set[str] | None = None  # of the command line; None: everything may run


@contextmanager
def asking(words: Sequence[str]) -> Iterator[list[str]]:
    """Inside, only trusted code runs; yield the words of the command line without --trust, which trusts all of it."""
    global _words
    before = _words
    _words = {part for word in words for part in (word, word.partition("=")[2])}
    try:
        yield [word for word in words if word != FLAG]
    finally:
        _words = before


def check_code(spec: str, key: str) -> None:
    """Raise UserError unless the code of file.py:NAME or package.module:NAME may run; `key` is its setting.

    A module is trusted where it lies: one of the same name in another folder is asked about.
    """
    place = spec.rpartition(":")[0]
    if not place.endswith(".py"):
        if place and not spec.startswith(OWN):
            found = importlib.util.find_spec(place.partition(".")[0])  # the whole name would execute its package
            where = f"module {place} of {found.origin if found else 'no folder'}"
            _check(spec, key, where, where.encode(), spec in (_words or ()))
        return
    with suppress(OSError):  # a file that is missing is another error
        _check(spec, key, str(Path(place).absolute()), Path(place).read_bytes(), _is_named(spec))


def check_program(path: str, key: str) -> None:
    """Raise UserError unless a program, such as another Python, may run; `key` is its setting."""
    place = os.path.abspath(path) if os.sep in path else path
    _check(path, key, place, f"program {place}".encode(), _is_named(path))


def _check(spec: str, key: str, place: str, content: bytes, named: bool) -> None:
    if _words is None:
        return
    digest = hashlib.sha256(content).hexdigest()
    if digest in _remembered():
        return
    if not (named or FLAG in _words):
        raise UserError(
            f"{key} {spec} is code that a saved setting names and this command line does not: look at {place}, and add "
            f"{FLAG} to run it, now and later"
        )
    with suppress(OSError):  # then it is asked again
        file = _file()
        file.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600), "a") as opened:
            opened.write(f"{digest} {place!a}\n")


def _is_named(spec: str) -> bool:
    """Whether the command line names the same file, and the same object of it."""

    def placed(text: str) -> tuple[str, str]:
        place, colon, name = text.rpartition(":")
        return (os.path.abspath(place), name) if colon else (os.path.abspath(text), "")

    return placed(spec) in {placed(word) for word in _words or ()}


def _remembered() -> set[str]:
    try:
        return {line.partition(" ")[0] for line in _file().read_text(encoding="utf-8").splitlines()}
    except (OSError, UnicodeDecodeError):
        return set()


def _file() -> Path:
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home) / "unified_trainer" / "trusted"
