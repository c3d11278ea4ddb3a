"""The curves of a page as plain data: groups of charts with the traces and healthy ranges of every run."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unified_trainer.tools.report.glossary import STACKED, TOGETHER, documented_name, grouped
from unified_trainer.tools.report.healthy import Band, bands
from unified_trainer.tools.report.metrics_reader import thinned
from unified_trainer.tools.report.run_folder import Curve, RunRecord


def chart_groups(runs: Sequence[RunRecord], most: int) -> list[dict[str, Any]]:
    """Return the groups of the glossary with their charts.

    A chart has a title, traces (run, label, steps, values, healthy range) and whether they are parts of a sum. One run
    has several metrics in a chart where the glossary says so; several runs have one metric in a chart. A longer curve
    than `most` points keeps the extremes and the end of equal stretches, and what is outside of the healthy range.
    """
    ranges = [bands(run) for run in runs]
    groups = grouped({name for run in runs for name in run.curves})
    return [
        {"title": title, "id": f"group-{title.lower().replace(' ', '-')}", "charts": _charts(names, runs, ranges, most)}
        for title, names in groups.items()
    ]


def _charts(
    names: Sequence[str], runs: Sequence[RunRecord], healthy: Sequence[Mapping[str, Band]], most: int
) -> list[dict[str, Any]]:
    charts: dict[str, dict[str, Any]] = {}
    for name in names:
        together = TOGETHER.get(documented_name(name) or "") if len(runs) == 1 else None
        title = together or name
        chart = charts.setdefault(title, {"title": title, "stacked": title == STACKED, "traces": []})
        for i, run in enumerate(runs):
            if name in run.curves:
                chart["traces"].append(_trace(i, run.curves[name], healthy[i].get(name), most))
    return list(charts.values())


def _trace(run: int, curve: Curve, band: Band | None, most: int) -> dict[str, Any]:
    departed = list(band.outside) if band else []
    kept, steps = {*thinned(np.array(curve.steps, dtype=np.int64), np.array(curve.values), most).tolist()}, {*departed}
    points = [i for i, step in enumerate(curve.steps) if i in kept or step in steps]
    return {
        "run": run,
        "label": curve.name,
        "steps": [curve.steps[i] for i in points],
        "values": [finite(curve.values[i]) for i in points],
        "band": band and {"low": finite(band.low), "high": finite(band.high), "words": band.words},
        "departed": departed,
    }


def finite(value: float | None) -> float | None:
    """Return the value, or None for NaN and infinities, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None
