"""Settings as flags: words of a command line, or values of a file, applied to a tree of dataclasses or a function.

tyro converts the values. Names are looked up before it, and what it refuses is looked at once more, so that every error
is one line with the name of the flag, or of the file and its key.
"""

import contextlib
import dataclasses
import functools
import inspect
import io
import re
import types
import typing
from collections.abc import Mapping, Sequence
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
BOX = re.compile(r"[\u2500-\u257f]+|-{4,}")  # frames around tyro's messages
UNIONS = (typing.Union, types.UnionType)
OUTLINE = "Given"  # name of a class that has the given settings of a section
WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Path: "a path"}
# Of a type of several kinds of values: the words for true, false and nothing, as YAML has them, and as tyro reads them.
SPELLINGS: dict[type, dict[str, str]] = {
    bool: dict.fromkeys(("true", "yes", "on"), "True") | dict.fromkeys(("false", "no", "off"), "False"),
    type(None): dict.fromkeys(("none", "null"), "None"),
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
    words = _spelled(words, known)
    given, stray = _look_up(words, known)
    for flag in given:
        if flag.values == [""] and flag.setting.never_empty:
            name = f"{file}: {flag.setting.key}" if file else flag.name
            raise UserError(f"{name} needs a value: {described(flag.setting.kind)}")
    try:
        if inspect.isfunction(tree):
            bind = functools.wraps(tree)(lambda *args, **options: functools.partial(tree, *args, **options))
            bound = _tyro(bind, words)
        else:
            bound = _with_given(tree, {flag.setting.key: flag.setting for flag in given}, words)
    except _RefusedError as error:
        raise UserError(_reason(given, stray, known, file) or f"{file}: {error}".removeprefix(": ")) from None
    if not inspect.isfunction(tree):
        check_ranges(bound, file)
        return bound
    for name, value in inspect.signature(tree).bind(*bound.args, **bound.keywords).arguments.items():
        if name in known and (why := reason(known[name].limits, value)):
            raise UserError(f"{known[name].shown} {why}")
    return bound


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


def _spelled(words: Sequence[str], known: Mapping[str, Setting]) -> list[str]:
    """Return the words with true, false and nothing, as values of a type of several kinds, in tyro's spelling."""
    spelled, kind = list[str](), None
    for word in words:
        name, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if name:
            setting = known.get(name[2:].replace("-", "_"))
            kind = setting.kind if setting else None
        spelled.append(f"{name}{equals}{_spelling(kind, value)}")
    return spelled


def _spelling(kind: Any, value: str) -> str:
    parts = typing.get_args(kind) if typing.get_origin(kind) in UNIONS else ()
    if {str, Path} & {*parts} or value in (choice for part in parts for choice in choices(part)):
        return value
    return next((SPELLINGS[part][value.lower()] for part in parts if value.lower() in SPELLINGS.get(part, ())), value)


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


class _RefusedError(Exception):
    """tyro's message for words that it refuses."""


@dataclass(frozen=True)
class _Given:
    """A setting with the words that follow its flag."""

    setting: Setting
    name: str  # the flag as it is written
    values: list[str]


def _with_given(tree: Any, given: Mapping[str, Setting], words: Sequence[str]) -> Any:
    """Return a tree with the settings that the words give; tyro, which takes a millisecond for each, sees no others."""
    return _replaced(tree, _tyro(_outline(tree, given), words)) if words else tree


def _outline(tree: Any, given: Mapping[str, Setting], prefix: str = "") -> type:
    """Return a class with the given settings of a tree as fields, and classes of those of its sections."""
    fields: list[tuple[str, Any, Any]] = []
    for name, inner in _parts(tree).items():
        # Without a help text tyro would look for one in the source of the class.
        key, marked = f"{prefix}{name}", tyro.conf.arg(name=name.replace("_", "-"), help="")
        if key in given:
            default = dataclasses.field(default_factory=functools.partial(_same, inner))
            fields.append((_field(name), Annotated[_text_last(given[key].kind), marked], default))
        elif any(one.startswith(f"{key}.") for one in given):
            fields.append((_field(name), Annotated[_outline(inner, given, f"{key}."), marked], dataclasses.field()))
    return dataclasses.make_dataclass(OUTLINE, fields, kw_only=True)


def _text_last(kind: Any) -> Any:
    """Return a type of several kinds of values with texts and paths behind the others, whose words they take too."""
    if typing.get_origin(kind) not in UNIONS:
        return kind
    return typing.Union[*sorted(typing.get_args(kind), key=(str, Path).__contains__)]


def _replaced(tree: Any, values: Any) -> Any:
    """Return a tree with the values of an object of its outline."""
    parts = {}
    for name, inner in _parts(tree).items():
        if _field(name) in vars(values):
            value = vars(values)[_field(name)]
            parts[name] = _replaced(inner, value) if type(value).__name__ == OUTLINE else value
    return {**tree, **parts} if isinstance(tree, dict) else dataclasses.replace(tree, **parts)


def _parts(tree: Any) -> dict[str, Any]:
    """Return what a dataclass or a dictionary of a tree holds, by name."""
    return (
        tree
        if isinstance(tree, dict)
        else {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    )


def _field(name: str) -> str:
    """Return a field's name: a scorer may be called by a number or by a word of Python."""
    return f"given_{name.replace('-', '_')}"


def _same(value: Any) -> Any:
    return value


def _tyro(kind: Any, words: Sequence[str]) -> Any:
    said = io.StringIO()
    unread = (tyro.conf.HelptextFromCommentsOff,)  # else it reads every class's source again, for help that is ours
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return tyro.cli(kind, args=words, add_help=False, config=unread)
    except SystemExit:
        raise _RefusedError(" ".join(BOX.sub(" ", said.getvalue()).split())) from None


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


def _reason(flags: Sequence[_Given], stray: Sequence[str], known: Mapping[str, Setting], file: str) -> str:
    """Return in words what is wrong with flags whose names are right; "" if that cannot be said."""
    for flag in flags:
        setting, shown = flag.setting, " ".join(flag.values)
        if setting.switch and flag.values:
            return f"{flag.name} takes no value, not {shown!r}: write {setting.flag} or {setting.off}"
        if not setting.switch and not _fits(setting.kind, flag.values):
            name = f"{file}: {setting.key}" if file else flag.name
            if not flag.values:
                return f"{name} needs a value: {described(setting.kind)}"
            return f"{name} must be {described(setting.kind)}, not {shown!r}"
        if hyphen := [value for value in flag.values if re.match(r"-[^\d.]", value)]:
            return f"{flag.name}: a value that begins with a hyphen is written {flag.name}={hyphen[0]}"
    if stray and not any(setting.positional for setting in known.values()):
        return f"{stray[0]!r} belongs to no flag"
    places = [setting.key.upper() for setting in known.values() if setting.positional]
    if len(stray) > len(places):
        return f"{stray[len(places)]!r} is one word too many: without a flag there is only {' '.join(places)}"
    seen = {flag.setting.key for flag in flags}
    missing = places[len(stray) :]
    missing += [s.flag for s in known.values() if s.default is REQUIRED and not s.positional and s.key not in seen]
    return f"{', '.join(missing)} must be given; --help says how" if missing else ""


def _fits(kind: Any, values: Sequence[str]) -> bool:
    """Whether tyro takes the values for one setting of this type."""
    words = [f"--value={values[0]}"] if len(values) == 1 else ["--value", *values]
    try:
        _tyro(dataclasses.make_dataclass("OneSetting", [("value", kind)]), words)
    except _RefusedError:
        return False
    return True
