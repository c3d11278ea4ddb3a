"""Every number that a user can set has a range, and one outside is refused in one line that names its key."""

import dataclasses
import functools
import itertools
import math
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

import unified_trainer as ut
from unified_trainer.__main__ import COMMANDS, command_named
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Range, above, at_least, range_of
from unified_trainer.methods.base import MethodConfig
from unified_trainer.rewards.aesthetic import Aesthetic
from unified_trainer.rewards.base import ScorerConfig
from unified_trainer.rewards.own_settings import ScorerSettings, typed
from unified_trainer.rewards.remote import Remote
from unified_trainer.rewards.vlm import VisionLanguageModel as VLM
from unified_trainer.run.registry import METHODS, method_named
from unified_trainer.run.settings.command_line import before_flags
from unified_trainer.run.settings.config import RunConfig, run_class
from unified_trainer.run.settings.flags import apply
from unified_trainer.run.settings.settings import REQUIRED, Setting, check_ranges, settings_of

pytestmark = pytest.mark.slow

INF, NAN = math.inf, math.nan
VALUES = (0, -1, 10**9, 10**30, INF, -INF, NAN)


@functools.cache
def run_of(method: str) -> RunConfig:
    """A run of a method with one more scorer, without a recipe."""
    run = run_class(method_named(method))()
    return dataclasses.replace(run, reward=dataclasses.replace(run.reward, scorers={"more": ScorerConfig()}))


def numeric(kind: Any) -> bool:
    """Whether a type is that of a number or consists of such types; a switch is none."""
    return kind in (int, float) or any(numeric(inner) for inner in typing.get_args(kind))


def numbers(tree: Any) -> list[Setting]:
    return [setting for setting in settings_of(tree) if numeric(setting.kind)]


def changed(tree: Any, key: str, value: Any) -> Any:
    """The tree with the value of one key replaced, as Python code may do it."""
    name, _, rest = key.partition(".")
    if isinstance(tree, dict):
        return tree | {name: changed(tree[name], rest, value)}
    return dataclasses.replace(tree, **{name: changed(getattr(tree, name), rest, value) if rest else value})


def of_kind(kind: Any, number: float) -> Any:
    """The number as a value of a type: itself, or a tuple that holds it."""
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is not tuple:
        return number
    if parts[1:] == (...,):
        return (number,)
    return (*[0.5 if float in typing.get_args(parts[0]) or parts[0] is float else 1] * (len(parts) - 1), number)


def said(action: Any) -> str:
    """The message of the UserError that it raises, "" if it raises none."""
    try:
        action()
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    return ""


def finite_ends(limits: Range) -> bool:
    return limits.low > -INF and limits.high < INF


def has_range(setting: Setting) -> bool:
    """Whether a range is declared; a whole number needs two ends, or else some value would be beyond all counting."""
    return setting.limits is not None and (float in flattened(setting.kind) or finite_ends(setting.limits))


def flattened(kind: Any) -> set[Any]:
    return {kind}.union(*(flattened(part) for part in typing.get_args(kind)))


# Declarations.


def test_every_number_has_a_range_that_holds_its_default():
    scorers = {scorer: typing.get_type_hints(scorer, include_extras=True) for scorer in (Aesthetic, Remote, VLM)}
    trees = {name: run_of(name) for name in METHODS} | {name: command_named(name) for name in COMMANDS}
    missing = [
        f"{of}: {setting.key}" for of, tree in trees.items() for setting in numbers(tree) if not has_range(setting)
    ] + [
        f"{scorer.__name__}: {field.name}"
        for scorer, kinds in scorers.items()
        for field in dataclasses.fields(scorer)
        if numeric(kinds[field.name]) and range_of(kinds[field.name]) is None
    ]
    assert missing == []
    for method in METHODS:
        check_ranges(run_of(method))
        check_ranges(before_flags(["--method", method]))


def test_a_field_without_a_range_is_found():
    @dataclass(frozen=True)
    class Config(MethodConfig):
        weight: float = 1.0
        calls: Annotated[int, at_least(1)] = 1
        pair: tuple[Annotated[float, above(0)], float] = (1.0, 1.0)

    assert [setting.key for setting in numbers(Config()) if not has_range(setting)] == ["weight", "calls"]


# Values.


def declared() -> dict[tuple[Any, str], tuple[RunConfig, Setting]]:
    """Each numeric field that a class declares, once, with a run that has it."""
    return {(s.owner, s.key.split(".")[-1]): (run_of(m), s) for m in METHODS for s in numbers(run_of(m))}


def test_a_value_is_in_range_or_refused_by_its_key():
    """Set as Python code may do it; numbers of a tuple one by one."""
    assert len(declared()) > 120
    for (owner, name), (_, setting) in declared().items():
        kinds = [part for part in flattened(setting.kind) if typing.get_origin(part) is tuple]
        for kind in {setting.kind, *kinds}:
            for number in (value for value in VALUES if isinstance(value, int) or float in flattened(kind)):
                part = dataclasses.replace(owner(), **{name: of_kind(kind, number)})
                message = said(lambda: check_ranges(part, "origin"))  # noqa: B023
                place = f"{setting.key} {number} as {kind}"
                assert bool(message) != (number in setting.limits), place
                assert not message or message.startswith(f"origin: {name} must "), place
                assert not message or message.endswith(f", not {number}"), place


def test_the_message_has_the_whole_key():
    for run, setting in declared().values():
        wrong = changed(run, setting.key, of_kind(setting.kind, NAN if float in flattened(setting.kind) else 10**30))
        assert said(lambda: check_ranges(wrong)).startswith(f"{setting.key} must ")  # noqa: B023


def test_infinity_is_in_two_ranges_and_nan_in_none():
    allowed = {
        (setting.key, number)
        for method in METHODS
        for setting in numbers(run_of(method))
        for number in (INF, -INF, NAN)
        if number in setting.limits
    }
    assert allowed == {("algorithm.reward_threshold", -INF), ("algorithm.reward_gradient.margin", INF)}


def test_texts_of_every_type_of_number():
    """Each declared type once, through the parser of command lines and files."""
    kinds = {(s.kind, s.limits): s for method in METHODS for s in numbers(run_of(method))}
    for (kind, limits), setting in kinds.items():
        marked = Annotated[kind, limits]
        tree = dataclasses.make_dataclass("One", [("value", marked, setting.default)], frozen=True)()
        for text in ("0", "-1", "1000000000", "inf", "nan", "some"):
            pair = typing.get_origin(kind) is tuple and typing.get_args(kind)[1:] != (...,)
            words = ["--value", "0.5", text] if pair else ["--value", text]
            message = said(lambda: apply(tree, words))  # noqa: B023
            fits = text != "some" and not (text in ("inf", "nan") and kind is int) and float(text) in limits
            assert bool(message) != fits, (setting.key, text)
            assert not message or message.startswith(("value must ", "--value must ")), (setting.key, message)


def test_numbers_of_commands(subtests):
    """Values out of range are refused as the command line is read, before the command runs."""
    for name in COMMANDS:
        command = command_named(name)
        known = list(settings_of(command))
        needed = [one for one in known if one.default is REQUIRED]
        given = [one.key for one in needed if one.positional]
        given += [word for one in needed if not one.positional for word in (one.flag, "x")]
        for setting, number in itertools.product(numbers(command), (-1, 10**9)):
            with subtests.test(name, setting=setting.key, number=number):
                message = said(lambda: apply(command, [*given, f"{setting.flag}={number}"]))  # noqa: B023
                assert bool(message) != (number in setting.limits)
                assert not message or message.startswith(f"{setting.flag} must ")


FLAGS = [
    ("--student.max-grad-norm -1", "student.max_grad_norm must be at least 0, not -1"),
    ("--student.high.max-grad-norm -1", "student.high.max_grad_norm must be at least 0, not -1"),
    ("--student.min-lr-ratio -0.1", "student.min_lr_ratio must be from 0 to 1, not -0.1"),
    ("--student.betas 0.9 1", "student.betas must each be at least 0 and below 1, not 1"),
    ("--student.warmup-updates -1", "student.warmup_updates must be from 0 to 1000000000, not -1"),
    ("--student.lr-decay-updates -1", "student.lr_decay_updates must be from 0 to 1000000000, not -1"),
    ("--student.adapter.alpha -1", "student.adapter.alpha must be from 0 to 1e+06, not -1"),
    ("--student.adapter.rank 100000", "student.adapter.rank must be from 0 to 8192, not 100000"),
    ("--checkpoint-every -2", "checkpoint_every must be from -1 to 1000000000, not -2"),
    ("--checkpoint-every -1", ""),
    ("--validate-every -5", "validate_every must be from 0 to 1000000000, not -5"),
    ("--sampler.shift 0", "sampler.shift must be above 0 and at most 1000, not 0"),
    ("--sampler.guidance-scale -3", "sampler.guidance_scale must be from 0 to 1000, not -3"),
    ("--sampler.guidance-scale 3 -3", "sampler.guidance_scale must each be from 0 to 1000, not -3"),
    ("--sampler.step-sigmas 1 0", "sampler.step_sigmas must each be above 0 and at most 1, not 0"),
    ("--reward.scale 0", "reward.scale must be a finite number but not 0, not 0"),
    ("--algorithm.reward-threshold inf", "algorithm.reward_threshold must be a finite number, or -inf, not inf"),
    ("--output=", "--output needs a value: a path"),
    ("--init-from=", "--init-from needs a value: a text"),
]


def test_what_was_accepted_before(subtests):
    for flags, message in FLAGS:
        with subtests.test(flags):
            assert said(lambda: apply(run_of("dance_grpo"), flags.split())) == message  # noqa: B023


def test_files_and_python_are_held_to_the_same_ranges(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("base: tiny\nfinetune: {sampler: {shift: 0}}\n")
    refused = functools.partial(pytest.raises, UserError)
    with refused(match=r"recipe mine.yaml: sampler\.shift must be above 0 .*, not 0"):
        ut.configure("mine.yaml", "finetune")
    with refused(match=r"settings: student\.eps must be above 0 and at most 1, not 0"):
        ut.configure("tiny", "finetune", {"student": {"eps": 0}})
    (tmp_path / "saved.yaml").write_text("method: finetune\nstudent: {weight_decay: .inf}\n")
    with refused(match=r"saved.yaml: student\.weight_decay must be from 0 to 100, not inf"):
        before_flags(["--config", "saved.yaml"])
    run = changed(ut.configure("tiny", "finetune", {"output": "run"}), "algorithm.batch_size", 0)
    for start in (ut.Run, ut.train):
        with refused(match=r"^algorithm\.batch_size must be from 1 to 1000000, not 0"):
            start(run)
    assert not Path("run").exists()


# Settings from outside the package.


@dataclass(frozen=True)
class Own(ScorerSettings):
    gain: Annotated[float, above(0, 2)]
    offset: float = 0.0
    power: Annotated[int, at_least(1, 4)] = 1


OWN = [
    ({"gain": "1"}, ""),
    ({"gain": "0"}, "key.settings.gain must be above 0 and at most 2, not 0"),
    ({"gain": "nan"}, "key.settings.gain must be above 0 and at most 2, not nan"),
    ({"gain": "1", "offset": "-1000000000"}, ""),
    ({"gain": "1", "offset": "-inf"}, "key.settings.offset must be a finite number, not -inf"),
    ({"gain": "1", "power": "5"}, "key.settings.power must be from 1 to 4, not 5"),
]


def test_settings_of_an_own_scorer(subtests):
    for given, message in OWN:
        with subtests.test(str(given)):
            assert said(lambda: typed(Own, given, "key")) == message  # noqa: B023


OWN_METHOD = """
from dataclasses import dataclass
from typing import Annotated

from unified_trainer.methods.base import Method, SingleUpdateConfig, trained
from unified_trainer.basics.ranges import Fraction


@dataclass(frozen=True)
class OwnConfig(SingleUpdateConfig):
    share: Fraction = 0.5
    weight: float = 0.5


class Own(Method):
    config_class = OwnConfig
    roles = {"student": trained()}

    def step(self, batch, step, rng, mesh):
        yield from ()
"""


def test_settings_of_an_own_method(tmp_path):
    (tmp_path / "own.py").write_text(OWN_METHOD)
    run = before_flags(["--method", f"{tmp_path}/own.py:Own"])
    assert said(lambda: apply(run, ["--algorithm.share", "2"])) == "algorithm.share must be from 0 to 1, not 2"
    assert (
        said(lambda: apply(run, ["--algorithm.weight", "inf"])) == "algorithm.weight must be a finite number, not inf"
    )
    assert apply(run, ["--algorithm.weight", "-7"]).algorithm.weight == -7


# Ranges.


RANGES = [
    (Range(), (0, -1e300), (INF, -INF, NAN), "a finite number"),
    (at_least(1), (1, 1e300), (0.999, INF), "at least 1"),
    (above(0, 1), (1e-300, 1), (0, 1.001, -1), "above 0 and at most 1"),
    (Range(0, 1, open_high=True), (0, 0.999), (1, -0.001), "at least 0 and below 1"),
    (at_least(2, 5), (2, 5), (1, 6, 10**400), "from 2 to 5"),
    (Range(never=(0,)), (1, -1), (0, -0.0, INF), "a finite number but not 0"),
    (Range(high=3), (3, -1e300), (3.001, -INF), "at most 3"),
    (Range(also=(-INF,)), (0, -INF), (INF, NAN), "a finite number, or -inf"),
]


def test_a_range_holds_its_numbers_and_says_so(subtests):
    for limits, numbers_in, numbers_out, words in RANGES:
        with subtests.test(words):
            assert [number for number in numbers_in if number not in limits] == []
            assert [number for number in numbers_out if number in limits] == []
            assert str(limits) == words
