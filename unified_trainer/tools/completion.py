"""Completion of the program's words in a shell: tyro writes it for bash, zsh, fish and tcsh."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Union

import tyro

from unified_trainer.methods import METHODS
from unified_trainer.run.registry import method_named
from unified_trainer.run.settings.config import recipes, run_class
from unified_trainer.run.settings.settings import AllRunFlags, RunFlags, settings_of

NAMED = {"--method": Literal[tuple(METHODS)], "--recipe": Literal[tuple(recipes())]}


def complete(words: Sequence[str], commands: Mapping[str, Callable[..., Any]]) -> None:
    """Print or write, as the words ask tyro, a script that completes commands, flags and named values.

    Flags are those of all methods together: no shell knows which ones a method has.
    """
    run, kinds = _flags(run_class(method_named(name))() for name in METHODS), list[Any]()
    for name, command in commands.items():
        marks = {argument.annotation for argument in inspect.signature(command).parameters.values()}
        flags = _flags([command]) | (run if marks & {RunFlags, AllRunFlags} else {})
        kinds.append(Annotated[_words(flags), tyro.conf.subcommand(name=name)])
    words_of_run = _words(run, command=(Union[(None, *kinds)], None))
    tyro.cli(words_of_run, prog="unified-trainer", args=words, config=(tyro.conf.OmitArgPrefixes,))


def _flags(trees: Iterable[Any]) -> dict[str, Any]:
    kinds = {one.flag: one.kind for tree in trees for one in settings_of(tree) if not one.positional}
    return {flag: NAMED.get(flag, kind) for flag, kind in kinds.items()}


def _words(flags: Mapping[str, Any], **fields: tuple[Any, Any]) -> type:
    """Return a class of these flags; a switch has two of them."""
    for number, (flag, kind) in enumerate(flags.items()):
        marked = Annotated[kind, tyro.conf.arg(name=flag[2:], help="")]
        fields[f"given_{number}"] = (marked, False if kind is bool else tyro.MISSING)
    return dataclasses.make_dataclass(
        "Words", [(name, kind, dataclasses.field(default=default)) for name, (kind, default) in fields.items()]
    )
