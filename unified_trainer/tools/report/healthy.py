"""Healthy ranges of a run's metrics as numbers, and the points that left them."""

import math
from dataclasses import dataclass
from typing import Any

from unified_trainer.data.tiny_world_measures import DISTANCES
from unified_trainer.tools.report.glossary import HEALTHY, Healthy, documented_name
from unified_trainer.tools.report.run_folder import VALIDATION, Curve, RunRecord


@dataclass(frozen=True)
class Band:
    """The healthy range of one metric of one run; None is no bound."""

    low: float | None
    high: float | None
    words: str  # such as "at most 1 on average over 8 values"
    advice: str
    outside: tuple[int, ...]  # steps of the points that left it


@dataclass(frozen=True)
class Departure:
    """A metric of a run that left its healthy range."""

    metric: str
    band: Band
    points: int  # of the curve
    worst_step: int
    worst_value: float


def bands(run: RunRecord) -> dict[str, Band]:
    """Return the healthy range of every metric that has one in this run."""
    held_out = held_out_metrics(run)
    exact = any(f"{VALIDATION}{name}" in run.curves for name in DISTANCES)
    by_name = {}
    for name, curve in run.curves.items():
        healthy = HEALTHY.get(documented_name(name) or "")
        if healthy is None or (healthy.held_out and name not in held_out) or (healthy.inexact and exact):
            continue
        low, high = _bounds(healthy, curve, run)
        if low is not None or high is not None:
            words = _words(healthy, low, high)
            by_name[name] = Band(low, high, words, healthy.advice, _outside(healthy, low, high, curve))
    return by_name


def departures(run: RunRecord) -> list[Departure]:
    """Return the metrics that left their healthy range, those with the largest share of points outside first."""
    departed = []
    for name, band in bands(run).items():
        if band.outside:
            curve = run.curves[name]
            values = dict(zip(curve.steps, curve.values, strict=True))
            worst = max(band.outside, key=lambda step: _distance(values[step], band))
            departed.append(Departure(name, band, len(curve.steps), worst, values[worst]))
    return sorted(departed, key=lambda departure: -len(departure.band.outside) / departure.points)


def held_out_metrics(run: RunRecord) -> set[str]:
    """Return the validation metrics that no reward contains: held-out scorers and the accuracy."""
    held_out = {
        f"{VALIDATION}reward/{key.split('.')[2]}"
        for key, value in run.config.items()
        if key.startswith("reward.scorers.") and key.endswith(".weight") and float(value) == 0
    }
    return {f"{VALIDATION}accuracy"} | held_out


def _bounds(healthy: Healthy, curve: Curve, run: RunRecord) -> tuple[float | None, float | None]:
    """Return the range of a metric by its values and the run's settings."""
    first = curve.values[0]
    if healthy.high_settings:
        settings = [_number(run.config.get(key)) for key in healthy.high_settings]
        return None, min((value for value in settings if value is not None), default=None)
    if healthy.share:
        share = _number(run.config.get(healthy.share))
        return (None if share is None else share * first), None
    if healthy.rise:
        width = _number(run.config.get(healthy.rise))
        return None, None if width is None else first + width
    if key := healthy.fall or healthy.drift:
        spread = run.curves.get(f"{VALIDATION}{curve.name.removeprefix(VALIDATION)}_std")
        width = _number(run.config.get(key))
        if spread is None or width is None:
            return None, None
        distance = width * spread.values[0]
        return first - distance, first + distance if healthy.drift else None
    return healthy.low, healthy.high


def _outside(healthy: Healthy, low: float | None, high: float | None, curve: Curve) -> tuple[int, ...]:
    """Return the steps whose value, or mean of the last `mean_of` values, is outside; NaN is always outside."""
    steps, count = [], healthy.mean_of
    for i in range(count - 1, len(curve.values)):
        value = math.fsum(curve.values[i - count + 1 : i + 1]) / count if count > 1 else curve.values[i]
        below = low is not None and (value <= low if healthy.excluded else value < low)
        above = high is not None and (value >= high if healthy.excluded else value > high)
        if below or above or math.isnan(value):
            steps.append(curve.steps[i])
    return tuple(steps)


def _words(healthy: Healthy, low: float | None, high: float | None) -> str:
    below, above = ("above", "below") if healthy.excluded else ("at least", "at most")
    if low is not None and high is not None:
        words = f"{low:.4g} to {high:.4g}"
    else:
        words = f"{above} {high:.4g}" if low is None else f"{below} {low:.4g}"
    if healthy.mean_of > 1:
        words += f" on average over {healthy.mean_of} values"
    key = healthy.fall or healthy.drift or healthy.rise or healthy.share
    return f"{words} ({key})" if key else words


def _distance(value: float, band: Band) -> float:
    low, high = (-math.inf if band.low is None else band.low), (math.inf if band.high is None else band.high)
    return math.inf if math.isnan(value) else max(low - value, value - high)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
