"""Tables of a report: settings that differ, last metrics over seeds, parts of the reward, and the time of a step."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unified_trainer.basics.errors import UserError
from unified_trainer.methods import METHODS
from unified_trainer.run.settings.command_line import before_flags
from unified_trainer.run.settings.config import flat, plain
from unified_trainer.tools.report.healthy import held_out_metrics
from unified_trainer.tools.report.run_folder import VALIDATION, RunRecord

LAST_STEPS = 10  # training steps whose mean is the last value of a training metric
LAST_OF_TRAINING = ("reward", "seconds", "samples_per_second", "peak_memory_gib_max")
PHASE = "seconds/"
RATES = ("samples_per_second", "tokens_per_second", "model_flops_per_second", "mfu", "peak_memory_gib_max")
PREFIX = f"{VALIDATION}reward/"
Spread = tuple[float, float]  # mean over runs that differ in their seed only, and std with Bessel's correction


@dataclass(frozen=True)
class SettingRow:
    """A setting of a run, and what the recipe says of it."""

    key: str
    value: Any
    recipe: Any  # None if the recipe has no such setting
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
        rows = tuple(SettingRow(key, value, None, False) for key, value in run.config.items())
        return Settings(rows, f"not compared with a recipe: {error}")
    every = (SettingRow(key, value, base.get(key), value != base.get(key)) for key, value in run.config.items())
    rows = tuple(row for row in every if row.differs or not _is_absent(row.key, run))
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
class LastMetrics:
    """The last value of metrics in every run, and over the seeds of each group of runs."""

    groups: tuple[tuple[int, ...], ...]  # positions of runs whose settings are equal but for the seed, two or more
    values: dict[str, tuple[float | None, ...]]  # metric -> value of each run
    spread: dict[str, tuple[Spread | None, ...]]  # metric -> of each group


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


def _spread(values: list[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return (statistics.fmean(known), statistics.stdev(known)) if len(known) > 1 else None


@dataclass(frozen=True)
class RewardPart:
    """A scorer, or another measure of the samples, in the first and the last validation."""

    name: str
    held_out: bool  # no reward contains it
    first: float
    last: float
    std: float | None  # over samples, in the first validation


@dataclass(frozen=True)
class PhaseTimes:
    """Mean seconds of each phase of a training step, the longest first, and mean rates; memory is its maximum."""

    seconds: dict[str, float]
    rates: dict[str, float]

    @property
    def total(self) -> float:
        """The seconds of all phases."""
        return sum(self.seconds.values())


def reward_parts(run: RunRecord) -> list[RewardPart]:
    """Return the scorers of the validations, then accuracy and Frechet distance, which no reward contains."""
    held_out = held_out_metrics(run)
    names = [name for name in run.curves if name.startswith(PREFIX) and not name.endswith("_std")]
    others = [name for name in (f"{VALIDATION}{own}" for own in ("accuracy", "frechet", "fvd")) if name in run.curves]
    parts = []
    for name in (*names, *others):
        values, spread = run.curves[name].values, run.curves.get(f"{name}_std")
        out = name in held_out or name in others
        short = name.removeprefix(PREFIX).removeprefix(VALIDATION)
        parts.append(RewardPart(short, out, values[0], values[-1], spread.values[0] if spread else None))
    return parts


def phase_times(run: RunRecord) -> PhaseTimes:
    """Return mean times and rates over all training steps but the first, which also warms up."""

    def typical(name: str) -> float:
        values = run.curves[name].values
        return max(values) if name.endswith("_max") else statistics.fmean(values[1:] or values)

    seconds = {name.removeprefix(PHASE): typical(name) for name in run.curves if name.startswith(PHASE)}
    ordered = dict(sorted(seconds.items(), key=lambda row: -row[1]))
    return PhaseTimes(ordered, {name: typical(name) for name in RATES if name in run.curves})
