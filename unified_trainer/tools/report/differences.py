"""Settings that differ from a recipe or between runs, and the last metrics of runs with their spread over seeds."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unified_trainer.basics.errors import UserError
from unified_trainer.methods import METHODS
from unified_trainer.run.settings.command_line import before_flags
from unified_trainer.run.settings.config import flat, plain
from unified_trainer.tools.report.run_folder import VALIDATION, RunRecord

LAST_STEPS = 10  # training steps whose mean is the last value of a training metric
LAST_OF_TRAINING = ("reward", "seconds", "samples_per_second", "peak_memory_gib_max")
ABSENT = None  # the value of a setting that a run does not have


@dataclass(frozen=True)
class SettingRow:
    """A setting of a run, and what the recipe says of it."""

    key: str
    value: Any
    recipe: Any
    differs: bool


@dataclass(frozen=True)
class Settings:
    """All settings of a run; `note` says what they are compared with, or why they are not compared."""

    rows: tuple[SettingRow, ...]
    note: str


def settings_of_run(run: RunRecord) -> Settings:
    """Return the resolved settings beside those of the run's method and recipe without any flag.

    A method outside the package is not compared: that would execute its file.
    """
    name, recipe = run.method, str(run.config.get("recipe", ""))
    try:
        if name not in METHODS:
            raise UserError(f"the method {name} is not in this package")
        base = flat(plain(before_flags(["--method", name, *(["--recipe", recipe] if recipe else [])])))
    except UserError as error:
        rows = tuple(SettingRow(key, value, ABSENT, False) for key, value in run.config.items())
        return Settings(rows, f"not compared with a recipe: {error}")
    items = {key: value for key, value in run.config.items() if value != base.get(key) or not _is_absent(key, run)}
    rows = tuple(SettingRow(key, value, base.get(key), value != base.get(key)) for key, value in items.items())
    return Settings(rows, f"compared with {name} and recipe {recipe or 'tiny'} without flags")


def _is_absent(key: str, run: RunRecord) -> bool:
    """Whether a setting is one of an expert that the role has not, as far as the run's settings and metrics show."""
    role, expert, *_ = (*key.split("."), "")
    measured = any(name.startswith(f"{role}/{expert}/") for name in run.curves)
    return expert in ("high", "low") and not (measured or run.config.get(f"{role}.boundary"))


def differing(runs: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """Return the settings that differ, with the value in each run or None, of groups (such as roles) that all have."""
    groups = set.intersection(*({key.partition(".")[0] for key in run.config} for run in runs))
    keys = dict.fromkeys(key for run in runs for key in run.config if key.partition(".")[0] in groups)
    values = {key: [run.config.get(key) for run in runs] for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


@dataclass(frozen=True)
class MeanAndSpread:
    """The mean of a metric over runs that differ in their seed only, and its std with Bessel's correction."""

    mean: float
    std: float


@dataclass(frozen=True)
class LastMetrics:
    """The last value of metrics in every run, and over the seeds of each group of runs."""

    groups: tuple[tuple[int, ...], ...]  # positions of runs whose settings are equal but for the seed, two or more
    values: dict[str, tuple[float | None, ...]]  # metric -> value of each run
    spread: dict[str, tuple[MeanAndSpread | None, ...]]  # metric -> of each group


def last_metrics(runs: Sequence[RunRecord]) -> LastMetrics:
    """Return the last validation of every run, and means over its last training steps."""
    names = dict.fromkeys(
        name
        for run in runs
        for name in run.curves
        if name in LAST_OF_TRAINING or (name.startswith(VALIDATION) and not name.endswith("_std"))
    )
    values = {name: tuple(_last(run, name) for run in runs) for name in names}
    groups = seed_groups(runs)
    spread = {name: tuple(_spread([row[i] for i in group]) for group in groups) for name, row in values.items()}
    return LastMetrics(groups, values, spread)


def seed_groups(runs: Sequence[RunRecord]) -> tuple[tuple[int, ...], ...]:
    """Return the positions of runs with equal settings but for the seed, in groups of two or more."""
    alike: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        rest = sorted((key, repr(value)) for key, value in run.config.items() if key != "seed")
        alike.setdefault(repr(rest), []).append(i)
    return tuple(tuple(group) for group in alike.values() if len(group) > 1)


def _last(run: RunRecord, name: str) -> float | None:
    curve = run.curves.get(name)
    if curve is None:
        return None
    return curve.values[-1] if name.startswith(VALIDATION) else statistics.fmean(curve.values[-LAST_STEPS:])


def _spread(values: list[float | None]) -> MeanAndSpread | None:
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return None
    return MeanAndSpread(statistics.fmean(known), statistics.stdev(known))
