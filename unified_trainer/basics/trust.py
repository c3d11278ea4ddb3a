"""The question about what received files would make the program do, and the answers that the user has given.

A run folder, a config, a recipe or a model folder of somebody else can name code, programs, servers and places to
write. Each such fact is agreed to by its setting on the command line or by --trust, and remembered by setting, place
and content in $XDG_STATE_HOME/unified_trainer/trusted or below ~/.local/state: never in the run folder, which may have
come with it. Outside a command, as in a Python program that imports this package, nothing is asked.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.secrets import masked

FLAG = "--trust"


@dataclass(frozen=True)
class Fact:
    """An effect that the value of a setting would have outside of the run."""

    setting: str  # reward.scorers.red.kind
    does: str  # run, read, write, contact or send
    value: str  # as it is written
    place: str  # what it names: an absolute path, an address, a name
    content: str = ""  # digest of what lies there, and of the values that it belongs to
    origin: str = ""  # file that the setting comes from
    asked: bool = True  # False: it is listed only

    @property
    def digest(self) -> str:
        """The hash by which an agreement to it is remembered."""
        parts = [self.setting, self.does, self.place, self.content]
        return hashlib.sha256(json.dumps(parts).encode(errors="surrogateescape")).hexdigest()


@dataclass
class _Command:
    """A command that runs now."""

    flags: dict[str, set[str]]  # the values of each setting that its command line sets
    trusts: bool
    agreed: set[str] = field(default_factory=set)  # digests: what cannot be remembered is not asked twice

    def agrees(self, fact: Fact) -> bool:
        """Whether the command line sets this value of this setting, or trusts everything."""
        return self.trusts or fact.value in self.flags.get(fact.setting, ())


_command: _Command | None = None  # None: nothing is asked


@contextmanager
def asking(words: Sequence[str]) -> Iterator[list[str]]:
    """Inside, received facts are asked about; yield the words of the command line without --trust, which agrees."""
    global _command
    before, flags, name = _command, dict[str, set[str]](), ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            name = setting_of(name)
        else:
            value = word
        flags.setdefault(name, set()).add(value)
    _command = _Command(flags, FLAG in words)
    try:
        yield [word for word in words if word != FLAG]
    finally:
        _command = before


def is_asking() -> bool:
    """Whether a command runs, in which received facts are asked about."""
    return _command is not None


def setting_of(flag: str) -> str:
    """Return the setting of a flag, with or without a value behind it: student.path of --student.path DIR."""
    return flag.partition(" ")[0].removeprefix("--").replace("-", "_")


def require(facts: Iterable[Fact]) -> None:
    """Raise UserError with a table of the facts that the user has not agreed to, and of what would be read."""
    if _command is None:
        return
    facts = list(facts)
    known = _command.agreed | _remembered()
    new = [fact for fact in facts if fact.asked and fact.digest not in known]
    if refused := [fact for fact in new if not _command.agrees(fact)]:
        read = [fact for fact in facts if fact.does == "read" and not fact.asked and not _command.agrees(fact)]
        raise UserError(_table([*refused, *read]))
    remember(new)


def remember(facts: Iterable[Fact]) -> None:
    """Note that the user has agreed to facts, such as those of a run of their own."""
    new = {fact.digest: fact for fact in facts if fact.asked}
    if _command is not None:
        _command.agreed |= new.keys()
    if not (new := {digest: fact for digest, fact in new.items() if digest not in _remembered()}):
        return
    with suppress(OSError):  # then it is asked again
        file = _file()
        file.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600), "a") as opened:
            for digest, fact in new.items():
                opened.write(f"{digest} {fact.setting!a}: {fact.does} {masked(fact.place)!a}\n")


def _table(facts: Sequence[Fact]) -> str:
    """Return the question; `facts` are its rows."""
    cells = [("setting", "does", "value", "from")]
    cells += [(fact.setting, fact.does, masked(fact.place), fact.origin) for fact in facts]
    rows = [[cell if cell.isprintable() else ascii(cell) for cell in row] for row in cells]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    head = f"{facts[0].setting} is not set by your command line, and you have not agreed to its value:"
    way_out = f"Nothing of this was done. Look at each line, then add {FLAG}, which is remembered until a value, its "
    way_out += "place or its content changes; or set the setting by a flag. Files that are only read need no agreement"
    return "\n  ".join([head, *lines, way_out])


def _remembered() -> set[str]:
    try:
        return {line.partition(" ")[0] for line in _file().read_text(encoding="utf-8").splitlines()}
    except (OSError, UnicodeDecodeError):
        return set()


def _file() -> Path:
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home) / "unified_trainer" / "trusted"
