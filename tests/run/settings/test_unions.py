"""A setting of several kinds of values takes each of them by every door: flags, files, saved runs and --allow."""

import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from unified_trainer.methods import METHODS
from unified_trainer.run.registry import method_named
from unified_trainer.run.settings.command_line import before_flags, parse, with_settings
from unified_trainer.run.settings.config import PATH_KEYS, check_resumable, plain, run_class, save
from unified_trainer.run.settings.flags import UNIONS, apply, words_of
from unified_trainer.run.settings.settings import Setting, settings_of

SPELLED = {  # the values of a kind, with the words that mean it
    bool: {True: ("true", "True", "yes", "ON"), False: ("false", "False", "no", "Off")},
    type(None): {None: ("None", "none", "null")},
    int: {3: ("3",)},
    float: {0.25: ("0.25", "25e-2")},
    tuple[float, float]: {(3.0, 4.5): ("3 4.5",)},
}


def values_of(kind: Any) -> dict[Any, tuple[str, ...]]:
    """Every value of a union that a test tries, with the words for it."""
    values: dict[Any, tuple[str, ...]] = {}
    for part in typing.get_args(kind):
        values |= {word: (word,) for word in typing.get_args(part)} if typing.get_origin(part) is Literal else {}
        values |= SPELLED.get(part, {})
    return values


def unions() -> dict[str, tuple[str, Setting]]:
    """Every setting that is a union, or a name that YAML reads as false, with a method that has it."""
    found = {}
    for method in METHODS:
        for setting in settings_of(run_class(method_named(method))()):
            if typing.get_origin(setting.kind) in UNIONS or "off" in typing.get_args(setting.kind):
                found.setdefault(setting.key, (method, setting))
    return {key: value for key, value in found.items() if key not in (*PATH_KEYS, "init_from")}


def value(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = getattr(tree, name)
    return tree


@pytest.mark.slow
def test_flags_and_files_take_each_value():
    assert len(unions()) > 20
    for key, (method, setting) in unions().items():
        run = run_class(method_named(method))()
        values = values_of(setting.kind) or {word: (word,) for word in typing.get_args(setting.kind)}
        assert len(values) > 1, key
        for wanted, words in values.items():
            for word in words:
                given = value(apply(run, [setting.flag, *word.split()]), key)
                assert given == wanted and type(given) is type(wanted), (key, word)
            for in_file in yaml.safe_load(yaml.safe_dump([list(wanted) if isinstance(wanted, tuple) else wanted])):
                given = value(apply(run, words_of({key: in_file}, {key: setting}, "f.yaml"), "f.yaml"), key)
                assert given == wanted and type(given) is type(wanted), (key, in_file)


@pytest.mark.slow
@pytest.mark.parametrize(
    "key", [*{str(setting.kind): key for key, (_, setting) in unions().items()}.values()]
)  # one of each type
def test_saved_and_resumed_runs_keep_each_value(key, tmp_path):
    method, setting = unions()[key]
    base = before_flags(["--method", method, "--recipe", "tiny"])
    for number, (wanted, words) in enumerate([*values_of(setting.kind).items()][-2:]):
        run = with_settings(base, {key: wanted}, "test")
        file = tmp_path / str(number) / "config.yaml"
        file.parent.mkdir()
        save(run, file)
        assert plain(parse(["--config", str(file)])) == plain(run)
        argv = ["--resume", str(file.parent), setting.flag, *words[-1].split()]
        assert check_resumable(parse(argv), file) == []
        others = [other for other in values_of(setting.kind) if other != wanted]
        argv = ["--resume", str(file.parent), setting.flag, *values_of(setting.kind)[others[0]][0].split()]
        (changed,) = check_resumable(parse([*argv, "--allow", key]), file)
        assert changed.startswith(f"{key}: ")


def test_off_without_quotes_is_the_name(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("tracking: {wandb: off}\nguard: {action: off}\nstudent: {compile: off, boundary: 0}")
    run = parse(["--method", "dmd2", "--config", str(file)])
    assert (run.tracking.wandb, run.guard.action, run.student.compile) == ("off", "off", False)


@dataclass(frozen=True)
class Odd:
    name: str | None = "a"
    place: Path | None = Path("a")
    named_off: Literal["off", "low"] | bool = True
    number: int | Literal["none"] | None = 1


def test_unions_of_own_methods():
    known = {setting.key: setting for setting in settings_of(Odd())}
    cases = [("name", None, None), ("place", None, None), ("name", "none", "none"), ("name", "true", "true")]
    cases += [("named_off", "off", "off"), ("named_off", "false", False), ("number", "none", "none")]
    cases += [("number", "null", None), ("number", None, None), ("place", "b", Path("b"))]
    for key, given, wanted in cases:
        assert getattr(apply(Odd(), words_of({key: given}, known, "f.yaml"), "f.yaml"), key) == wanted, (key, given)
