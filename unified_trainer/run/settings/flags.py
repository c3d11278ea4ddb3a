"""Settings as flags: words of a command line, or values of a file, applied to a tree of dataclasses or a function.

Every error is one line with the name of the flag, or of the file and its key.
"""

import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import reason
from unified_trainer.basics.suggestions import RANKS, nearest, replacement
from unified_trainer.run.settings.settings import REQUIRED, AllRunFlags, RunFlags, Setting, check_ranges, settings_of

TRUTHS = ("true", "false", "yes", "no", "on", "off", "1", "0")  # what a switch might be given, and does not take
DASHES = re.compile(r"[\u2010-\u2015\u2212]+-?|-(?=[A-Za-z])")  # in place of the two hyphens of a flag
HYPHEN = re.compile(r"-[^-\d.]")  # begins a word that looks like a flag
UNIONS = (typing.Union, types.UnionType)
WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Path: "a path"}
# The words for true, false and nothing in a type of several kinds of values, as YAML has them.
SPELLINGS: dict[type, dict[str, Any]] = {
    bool: dict.fromkeys(("true", "yes", "on"), True) | dict.fromkeys(("false", "no", "off"), False),
    type(None): dict.fromkeys(("none", "null")),
}


class UnknownFlagError(UserError):
    """A flag, or the key of a file, that is no setting."""

    def __init__(self, name: str, key: str, known: Mapping[str, "Setting"]) -> None:
        self.name, self.key = name, key  # as it was written, and as a key such as student.learning_rate
        below = [one for one in known if one.startswith(f"{key}.")]
        shown = [known[one].shown if name.startswith("-") else one for one in below[:1] or nearest(key, known)]
        if instead := "" if below else replacement(key):
            super().__init__(f"{name} is gone: {instead}")
        elif below:
            super().__init__(f"{name} is a group of settings: name one of them, such as {shown[0]}")
        else:
            way_out = f"did you mean {' or '.join(shown)}?" if shown else "--help-all lists all there are"
            super().__init__(f"{name} is not known; {way_out}")


def split(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each flag of a command line as it is written, with the words after it; the first flag is "", for none."""
    parts: list[tuple[str, list[str]]] = [("", [])]
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            parts.append((name, [value] if equals else []))
        else:
            parts[-1][1].append(word)
    return parts


def apply(tree: Any, words: Sequence[str], file: str = "") -> Any:
    """Return a tree of dataclasses with the flags applied, or a function bound to its arguments.

    `file` is where the settings come from, if not from a command line. Raise UserError, or UnknownFlagError, for a name
    or value that cannot be. A function with an argument of RunFlags gets the flags with a dot, unread; one with
    AllRunFlags gets each flag that is not its own.
    """
    if inspect.isfunction(tree):
        for argument in inspect.signature(tree).parameters.values():
            if argument.annotation in (RunFlags, AllRunFlags):
                own, of_run = _divided(tree, words, every=argument.annotation == AllRunFlags)
                if of_run:
                    return functools.partial(apply(tree, own), **{argument.name: tuple(of_run)})
    known = {setting.key: setting for setting in settings_of(tree)}
    given, stray = _look_up(words, known)
    for flag in given:
        if flag.values == [""] and flag.setting.never_empty:
            name = f"{file}: {flag.setting.key}" if file else flag.name
            raise UserError(f"{name} needs a value: {described(flag.setting.kind)}")
    values: dict[str, Any] = {}
    for flag in given:
        key, value = flag.setting.key, _value_of(flag, words, file)
        repeatable = typing.get_origin(flag.setting.kind) is Annotated
        values[key] = (*values.get(key, ()), value) if repeatable else value
    if not inspect.isfunction(tree):
        if stray:
            raise UserError(f"{stray[0]!r} belongs to no flag")
        bound = _replaced(tree, values)
        check_ranges(bound, file)
        return bound
    values |= _by_place(stray, known)
    if missing := [one.shown for one in known.values() if one.default is REQUIRED and one.key not in values]:
        raise UserError(f"{', '.join(missing)} must be given; --help says how")
    for key, value in values.items():
        if why := reason(known[key].limits, value):
            raise UserError(f"{known[key].shown} {why}")
    return functools.partial(tree, **values)


def _divided(tree: Any, words: Sequence[str], *, every: bool) -> tuple[list[str], list[str]]:
    """Return the words of a command, and the flags of a run with the words after each.

    The latter have a dot, such as --teacher.path; with `every` they are all flags that the command does not declare.
    """
    known = {flag for setting in settings_of(tree) for flag in (setting.flag, setting.off)} if every else set()
    (_, first), *flags = split(words)
    own, of_run = list(first), []
    for name, values in flags:
        (of_run if "." in name or (every and name not in known) else own).extend([name, *values])
    return own, of_run


def words_of(values: Mapping[str, Any], known: Mapping[str, Setting], file: str) -> list[str]:
    """Write the values of a file as flags; UserError, naming file and key, for a key or value that cannot be one."""
    words: list[str] = []
    for name, value in values.items():
        key = name.replace("-", "_")
        if key not in known:
            raise UnknownFlagError(f"{file}: {name}", key, known)
        setting = known[key]
        optional = type(None) in typing.get_args(setting.kind)
        if setting.switch and isinstance(value, bool):
            words.append(setting.flag if value else setting.off)
        elif setting.switch or (value is None and not optional):
            given = "empty" if value is None else repr(value)
            raise UserError(f"{file}: {key} must be {described(setting.kind)}, not {given}")
        elif value is False and "off" in typing.get_args(setting.kind):
            words.append(f"{setting.flag}=off")  # which YAML reads as false
        elif isinstance(value, (list, tuple)):
            words += [setting.flag, *map(str, value)]
        else:
            words.append(f"{setting.flag}={value}")
    return words


def described(kind: Any) -> str:
    """Return in words which values a type has."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return described(of_one_flag(kind))
    if named := choices(kind):
        return f"one of {', '.join(map(str, named))}"
    if origin is tuple:
        count = "values" if inner[1:] == (...,) else f"{len(inner)} values"
        return f"{count} separated by spaces, each {described(inner[0])}"
    if inner:
        return " or ".join(described(part) for part in inner if part is not type(None))
    return WORDS.get(kind) or f"of type {kind}"


def choices(kind: Any) -> tuple[Any, ...]:
    """Return the values of a Literal or of a union of such; () for other types."""
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return inner
    if typing.get_origin(kind) not in UNIONS:
        return ()
    parts = [choices(member) for member in inner if member is not type(None)]
    return tuple(choice for part in parts for choice in part) if all(parts) else ()


def of_one_flag(kind: Any) -> Any:
    """Return the type of the values after one flag, of an annotated type: a repeatable flag takes one at a time."""
    inner, *marks = typing.get_args(kind)
    return typing.get_args(inner)[0] if tyro.conf.UseAppendAction in marks else inner


@dataclass(frozen=True)
class _Given:
    """A setting with the words that follow its flag."""

    setting: Setting
    name: str  # the flag as it is written
    values: list[str]


def _value_of(flag: _Given, words: Sequence[str], file: str) -> Any:
    """Return the value that a flag gives its setting; UserError for one that cannot be."""
    setting = flag.setting
    if setting.switch:
        if flag.values:
            shown = " ".join(flag.values)
            raise UserError(f"{flag.name} takes no value, not {shown!r}: write {setting.flag} or {setting.off}")
        return flag.name.removeprefix("--").replace("-", "_") == setting.key
    if hyphen := [value for value in flag.values if HYPHEN.match(value) and value in words]:
        raise UserError(f"{flag.name}: a value that begins with a hyphen is written {flag.name}={hyphen[0]}")
    return _converted(flag.values, setting.kind, f"{file}: {setting.key}" if file else flag.name)


def _converted(words: Sequence[str], kind: Any, name: str) -> Any:
    """Return the value of a type that words give; UserError, which begins with `name`, if they give none."""
    try:
        return _value(kind, words)
    except (ValueError, LookupError):
        must = f"must be {described(kind)}, not {' '.join(words)!r}" if words else f"needs a value: {described(kind)}"
        raise UserError(f"{name} {must}") from None


def _value(kind: Any, words: Sequence[str]) -> Any:
    """Do as `_converted`; ValueError or LookupError if the words give no value."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _value(of_one_flag(kind), words)
    if origin in UNIONS:
        texts = {str, Path} & {*inner}  # come last, because they take the words of the others too
        for part in sorted(inner, key=lambda part: (part in texts, typing.get_origin(part) is not Literal)):
            if not texts or part not in SPELLINGS or words in (["True"], ["False"], ["None"]):
                with suppress(ValueError, LookupError):
                    return _value(part, words)
        raise ValueError(words)
    if origin is tuple:
        kinds = [inner[0]] * len(words) if inner[1:] == (...,) else inner
        return tuple(_value(part, [word]) for part, word in zip(kinds, words, strict=True))
    (word,) = words
    if origin is Literal:
        return {str(choice): choice for choice in inner}[word]
    return SPELLINGS[kind][word.lower()] if kind in SPELLINGS else kind(word)


def _replaced(tree: Any, values: Mapping[str, Any]) -> Any:
    """Return a tree of dataclasses and dictionaries with other values by their keys, such as student.learning_rate."""
    parts: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        name, _, rest = key.partition(".")
        parts.setdefault(name, {})[rest] = value
    held = tree if isinstance(tree, dict) else vars(tree)
    new = {name: own[""] if "" in own else _replaced(held[name], own) for name, own in parts.items()}
    return tree | new if isinstance(tree, dict) else dataclasses.replace(tree, **new)


def _by_place(words: Sequence[str], known: Mapping[str, Setting]) -> dict[str, Any]:
    """Return the values of the settings that are given without a flag; the last one may take any number of words."""
    places, values, rest = [setting for setting in known.values() if setting.positional], dict[str, Any](), [*words]
    if stray := [word for word in words if HYPHEN.match(word) or not places]:
        raise UserError(f"{stray[0]!r} belongs to no flag")
    for setting in places:
        own, rest = (rest, []) if setting.variadic else (rest[:1], rest[1:])
        if own:
            values[setting.key] = _converted(own, setting.kind, setting.shown)
    if rest:
        shown = " ".join(setting.shown for setting in places)
        raise UserError(f"{rest[0]!r} is one word too many: without a flag there is only {shown}")
    return values


def _look_up(words: Sequence[str], known: Mapping[str, Setting]) -> tuple[list[_Given], list[str]]:
    """Return the settings that the words name, and words that belong to no flag.

    Raise UnknownFlagError for a flag that does not exist.
    """
    for word in words:
        if word == "--":
            raise UserError("-- stands alone: write a flag, such as --steps")
        rest = DASHES.sub("", word, count=1)
        if DASHES.match(word) and rest.partition("=")[0].replace("-", "_") in known:
            raise UserError(f"{word} must begin with two hyphens: write --{rest}")
    (_, stray), *flags = split(words)
    given = [_Given(_find(name, known), name, values) for name, values in flags]
    if any(setting.positional for setting in known.values()):  # a word that a flag does not take is one of those
        for flag in given:
            taken = len(flag.values) if flag.setting.variadic else 0 if flag.setting.switch else 1
            if not (flag.setting.switch and flag.values[:1] and flag.values[0].lower() in TRUTHS):
                stray += flag.values[taken:]
                del flag.values[taken:]
    return given, stray


def _find(name: str, known: Mapping[str, Setting]) -> Setting:
    """Return the setting of a flag, which may be written with underscores, or turn a switch off."""
    key = name.removeprefix("--").replace("-", "_")
    section, dot, last = key.rpartition(".")
    if key in known:
        if known[key].positional:
            raise UserError(f"{name} is no flag: {key.upper()} is given without one")
        return known[key]
    turned_off = known.get(f"{section}{dot}{last.removeprefix('no_')}")
    if turned_off is not None and turned_off.switch:
        return turned_off
    if key.startswith("no_") and key[3:] in known and known[key[3:]].switch:
        raise UserError(f"{name} is not known; did you mean {known[key[3:]].off}?")
    if last in RANKS:
        raise UserError(
            f"{name} is not known; torchrun sets the number of ranks: torchrun --shutdown-timeout 900 --nproc-per-node "
            "N -m unified_trainer"
        )
    raise UnknownFlagError(name, key, known)
