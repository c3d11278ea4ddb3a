"""Settings of a scorer's own: the dataclass that declares them, and how texts become its values."""

import dataclasses
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import range_of, reason
from unified_trainer.basics.secrets import revealed
from unified_trainer.basics.suggestions import must_know
from unified_trainer.rewards.base import Scorer, ScorerConfig, ScorerKind

WORDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
WHOLE = re.compile(r"[+-]?(?:0|[1-9]\d*)")
DECIMAL = re.compile(r"[+-]?(?:(?:0|[1-9]\d*)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
TRUTHS = {"true": True, "false": False}
S = TypeVar("S")


@dataclass(frozen=True)
class ScorerSettings:
    """The settings of a scorer's own, and the scorer that is made of them.

    A dataclass derived from this one is a kind of scorer. Its fields are the settings: of type str, int, float or bool,
    or a Literal of texts; a number has a range of unified_trainer.basics.ranges. A field without a default must be
    given.
    """

    min_frames: ClassVar[int] = 1  # frames of a video that a score needs
    # patterns of the files that it reads of a repository on the hub; () for a kind whose path is no hub id
    files: ClassVar[tuple[str, ...]] = ()
    per_frame: ClassVar[bool] = False  # whether it scores images and reads `config.top_fraction`
    own_timeout: ClassVar[bool] = False  # whether its calls end by themselves, so that reward.timeout does not count
    apart: ClassVar[bool] = False  # whether it scores in another process, which samples need not wait for
    # whether it compares the samples of a prompt with each other: a call of training then has whole groups
    of_groups: ClassVar[bool] = False
    of_latents: ClassVar[bool] = False  # whether it reads clean latents, [b, channels, frames, height, width]

    def check(self, config: ScorerConfig, key: str, frames: int) -> None:
        """Raise UserError, naming the key, for settings that cannot be; called before any weight is read."""

    def load(self, config: ScorerConfig, device: torch.device) -> Scorer:
        """Return the function of videos and prompts that scores; called once, and may read weights."""
        raise NotImplementedError(f"{type(self).__name__} must define load(self, config, device)")


def kind_of(name: str, declared: type[ScorerSettings]) -> ScorerKind:
    """Return the kind of scorer that a dataclass of settings is."""

    def check(config: ScorerConfig, key: str, frames: int) -> None:
        typed(declared, config.settings, key).check(config, key, frames)

    def load(config: ScorerConfig, device: torch.device) -> Scorer:
        return typed(declared, config.settings, name).load(config, device)

    return ScorerKind(
        name,
        load,
        check,
        min_frames=declared.min_frames,
        files=declared.files,
        per_frame=declared.per_frame,
        own_settings=True,
        own_timeout=declared.own_timeout,
        apart=declared.apart,
        of_groups=declared.of_groups,
        of_latents=declared.of_latents,
        declared=declared,
    )


def typed(declared: type[S], given: Mapping[str, str], key: str) -> S:
    """Return an object of a dataclass with the given values; UserError names the setting of `key` that is wrong."""
    if "__dataclass_params__" not in vars(declared):  # else its fields would silently be no settings
        raise UserError(
            f"{key}.kind: {declared.__name__} is no dataclass; write @dataclass(frozen=True) above the class"
        )
    fields = {field.name: field for field in dataclasses.fields(declared)}  # type: ignore[arg-type]
    kinds, marked = typing.get_type_hints(declared), typing.get_type_hints(declared, include_extras=True)
    for name in given:
        must_know(f"{key}.settings", name, list(fields) or ["no setting"])
    required = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing := [f"{key}.settings.{name}" for name in required if not given.get(name)]:
        raise UserError(f"{', '.join(missing)} must be given: {declared.__name__} has no default for it")
    values = {name: _value(kinds[name], revealed(f"{key}.settings.{name}", text), f"{key}.settings.{name}")
              for name, text in given.items()}  # fmt: skip
    for name, value in values.items():
        if why := reason(range_of(marked[name]), value):
            raise UserError(f"{key}.settings.{name} {why}")
    return declared(**values)


def by_form(text: str) -> str | int | float | bool:
    """Return the value that a text without a declared type looks like: 3, 0.5, true, or the text itself."""
    if WHOLE.fullmatch(text):
        return int(text)
    if DECIMAL.fullmatch(text):
        return float(text)
    return TRUTHS.get(text.lower(), text)


def for_class(config: ScorerConfig, device: torch.device) -> dict[str, Any]:
    """Return what a scorer that is a plain class is called with, in this process or in a Python of its own."""
    own = {name: by_form(revealed(f"settings.{name}", text)) for name, text in config.settings.items()}
    given = {"path": config.path, "precision": config.precision, "batch": config.batch, "device": str(device)}
    return {**given, "settings": own}


def _value(kind: Any, text: str, where: str) -> Any:
    if typing.get_origin(kind) is Literal:
        named = typing.get_args(kind)
        if text not in named:
            raise UserError(f"{where} must be one of {', '.join(map(str, named))}, not {text!r}")
        return text
    if kind not in WORDS:
        raise UserError(
            f"{where} is declared as {kind}; a setting is a {', '.join(k.__name__ for k in WORDS)} or Literal"
        )
    read: dict[Any, Callable[[str], Any]] = {str: str, int: int, float: float, bool: lambda one: TRUTHS[one.lower()]}
    try:
        return read[kind](text)
    except (ValueError, KeyError):
        raise UserError(f"{where} must be {WORDS[kind]}, not {text!r}") from None
