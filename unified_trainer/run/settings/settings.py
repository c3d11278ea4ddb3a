"""The settings of a run or the arguments of a command, as they are declared: type, range and default of each."""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from unified_trainer.basics.effects import Effect, effect_of
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import MAY_CHANGE, Range, range_of, reason

REQUIRED = inspect.Parameter.empty
# Arguments of a command that get flags of a run, unread: those with a dot, or all that are not the command's own.
RunFlags = Annotated[tuple[str, ...], tyro.conf.Suppress]
AllRunFlags = Annotated[tuple[str, ...], tyro.conf.Suppress, "all"]


@dataclass(frozen=True)
class Setting:
    """A value that a flag, or a key of a file, sets."""

    key: str  # student.learning_rate
    kind: Any  # type of the value, without the mark of its range
    default: Any  # REQUIRED if there is none
    owner: Callable[..., Any]  # class or function that declares it, and whose docstrings explain it
    positional: bool = False  # is given by its place instead of a flag
    limits: Range | None = None  # range of a number, or of each number of a tuple
    effect: Effect | None = None  # what is done with what a text names

    @property
    def switch(self) -> bool:
        """Whether it is set by a flag without a value."""
        return self.kind is bool

    @property
    def flag(self) -> str:
        return f"--{self.key.replace('_', '-')}"

    @property
    def shown(self) -> str:
        """Name of it in messages: --student.learning-rate, or RUN if it is given without a flag."""
        return self.key.upper() if self.positional else self.flag

    @property
    def off(self) -> str:
        """The flag that turns a switch off: --async-save has --no-async-save, --validation.ema --validation.no-ema."""
        section, dot, name = self.flag.removeprefix("--").rpartition(".")
        return f"--{section}{dot}no-{name}"

    @property
    def never_empty(self) -> bool:
        """Whether the empty text is no value: of a path it would be the present folder, and None has no text."""
        return self.kind is Path or type(None) in typing.get_args(self.kind)

    @property
    def variadic(self) -> bool:
        """Whether it takes any number of values."""
        return typing.get_origin(self.kind) is tuple and typing.get_args(self.kind)[1:] == (...,)


def settings_of(tree: Any, prefix: str = "") -> Iterator[Setting]:
    """Yield the settings of a tree of dataclasses, with the tree's values as defaults, or of a function's arguments."""
    if inspect.isfunction(tree):
        declared = _declared(tree)
        for name, argument in inspect.signature(tree).parameters.items():
            if argument.annotation in (RunFlags, AllRunFlags):
                continue
            positional = tyro.conf.Positional in typing.get_args(argument.annotation)
            kind, limits, _ = declared[name]
            yield Setting(name, kind, argument.default, tree, positional, limits)
        return
    owner: Any = type(tree)
    declared = _declared(owner)
    for field in dataclasses.fields(tree):
        value, key, (kind, limits, effect) = getattr(tree, field.name), f"{prefix}{field.name}", declared[field.name]
        if dataclasses.is_dataclass(value):
            yield from settings_of(value, f"{key}.")
        elif isinstance(value, dict) and dataclasses.is_dataclass(typing.get_args(kind)[-1]):
            for name, inner in value.items():
                yield from settings_of(inner, f"{key}.{name}.")
        elif isinstance(value, dict):
            for name, inner in value.items():
                yield Setting(f"{key}.{name}", typing.get_args(kind)[-1], inner, type(tree), effect=effect)
        else:
            yield Setting(key, kind, value, type(tree), limits=limits, effect=effect)


@functools.cache
def hints(owner: Any) -> dict[str, Any]:
    """Return the type of each field or argument, with its marks."""
    return typing.get_type_hints(owner, include_extras=True)


@functools.cache
def _declared(owner: Any) -> dict[str, tuple[Any, Range | None, Effect | None]]:
    """Return type, range and effect of each field or argument; a flag that is repeatable by a mark keeps its marks."""
    marked, bare = hints(owner), typing.get_type_hints(owner)
    repeatable = {name for name, kind in marked.items() if tyro.conf.UseAppendAction in typing.get_args(kind)}
    kinds = {name: kind if name in repeatable else bare[name] for name, kind in marked.items()}
    return {name: (kinds[name], range_of(kind), effect_of(kind)) for name, kind in marked.items()}


def may_change(tree: Any, key: str) -> bool:
    """Whether --resume may change a setting of a tree of dataclasses: its field, or a section above it, is marked."""
    for name in key.split("."):
        owner: Any = type(tree)
        if isinstance(tree, dict):
            tree = tree.get(name)
        elif name in hints(owner):
            if MAY_CHANGE in typing.get_args(hints(owner)[name]):
                return True
            tree = getattr(tree, name)
        else:
            return False
    return False


def check_ranges(tree: Any, file: str = "") -> None:
    """Raise UserError for the first number of a tree of dataclasses that is out of its range; `file` is its origin."""
    for setting in settings_of(tree):
        if why := reason(setting.limits, setting.default):
            raise UserError(f"{file}: {setting.key} {why}".removeprefix(": "))
