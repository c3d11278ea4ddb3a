"""Every text that a setting may have is marked with what the program does with it."""

import typing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from unified_trainer.basics.effects import PLAIN, READS, effect_of
from unified_trainer.methods import METHODS
from unified_trainer.rewards.scorers import KINDS
from unified_trainer.run.registry import method_named
from unified_trainer.run.settings.command_line import _with_named
from unified_trainer.run.settings.config import RunConfig, run_class
from unified_trainer.run.settings.run_paths import OBJECTS, PATHS
from unified_trainer.run.settings.settings import hints, settings_of

SECTIONS = ("reward.scorers.x.kind", "validation.sets.x")


def is_text(kind: Any) -> bool:
    """Whether a value of a type is, or consists of, what may name a path, a program, a host, a variable or a class."""
    if typing.get_origin(kind) is Literal:
        return False
    inner = [part for part in typing.get_args(kind) if part is not Ellipsis]
    return (
        any(map(is_text, inner)) if inner else isinstance(kind, type) and not issubclass(kind, (int, float, type(None)))
    )


def unmarked(tree: Any) -> set[str]:
    return {setting.key for setting in settings_of(tree) if is_text(setting.kind) and setting.effect is None}


def run_of(method: str) -> RunConfig:
    return _with_named(run_class(method_named(method))(), dict.fromkeys(SECTIONS))


@pytest.mark.parametrize("method", METHODS)
def test_every_text_of_a_run_says_what_is_done_with_it(method):
    run = run_of(method)
    assert unmarked(run) == set()
    assert {"reward.scorers.x.python", "validation.sets.x", "student.path"} <= {one.key for one in settings_of(run)}


def test_every_text_of_a_scorers_own_settings_says_what_is_done_with_it():
    declared = {kind.declared for kind in KINDS.values() if kind.declared is not None}
    marks = {(owner, field.name): hints(owner)[field.name] for owner in declared for field in fields(owner)}
    assert declared and [key for key, kind in marks.items() if is_text(kind) and effect_of(kind) is None] == []


@pytest.mark.parametrize("kind", [str, Path, Path | None, tuple[str, ...], dict[str, str], type, Any])
def test_a_text_without_a_mark_is_found(kind):
    @dataclass(frozen=True)
    class New:
        thing: kind = ""

    assert is_text(kind) and unmarked(New()) == {"thing"}


def test_a_mark_counts_wherever_it_stands():
    for kind in (Annotated[str, READS], tuple[Annotated[str, READS], ...], Annotated[Path | None, READS]):
        assert effect_of(kind) is READS
    assert effect_of(str) is None and effect_of(Annotated[str, "no mark"]) is None and PLAIN.does == "nothing"


def test_no_setting_that_is_agreed_to_is_a_number():
    """A mark on a switch or a number would be a fact that nobody can see."""
    marked = [s for s in settings_of(run_of("dance_grpo")) if s.effect is not None and s.effect.does != "nothing"]
    assert {s.key for s in marked if not is_text(s.kind)} == {"tracking.wandb", "tracking.swanlab"}


def test_relative_paths_of_a_moved_run_are_found_by_the_marks():
    """`located` looks for the files of these settings in the folders where a run was started."""
    forms = {s.key: s.effect.form for s in settings_of(run_of("flow_dpo")) if s.effect is not None}
    assert all(PATHS.fullmatch(key) for key, form in forms.items() if form in ("file", "program"))
    assert all(OBJECTS.fullmatch(key) for key, form in forms.items() if form == "code")
