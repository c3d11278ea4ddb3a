"""The curves of a page as plain data: groups of charts with the traces and healthy ranges of every run."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from unified_trainer.tools.report.glossary import STACKED, TOGETHER, documented_name, grouped
from unified_trainer.tools.report.healthy import Band, bands
from unified_trainer.tools.report.run_folder import Curve, RunRecord


def chart_groups(runs: Sequence[RunRecord], most: int | None = None) -> list[dict[str, Any]]:
    """Return the groups of the glossary with their charts.

    A chart has a title, traces (run, label, steps, values, healthy range) and whether they are parts of a sum. One run
    has several metrics in a chart where the glossary says so; several runs have one metric in a chart. A longer curve
    than `most` points keeps every n-th point, the last one, and those outside of the healthy range.
    """
    healthy = [bands(run) for run in runs]
    groups = grouped({name for run in runs for name in run.curves})
    return [
        {"title": group, "id": _id_of(group), "charts": _charts(names, runs, healthy, most)}
        for group, names in groups.items()
    ]


def _id_of(group: str) -> str:
    return f"group-{group.lower().replace(' ', '-')}"


def _charts(
    names: Sequence[str], runs: Sequence[RunRecord], healthy: Sequence[Mapping[str, Band]], most: int | None
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


def _trace(run: int, curve: Curve, band: Band | None, most: int | None) -> dict[str, Any]:
    points = thinned(curve, most, band.outside if band else ())
    return {
        "run": run,
        "label": curve.name,
        "steps": [curve.steps[i] for i in points],
        "values": [finite(curve.values[i]) for i in points],
        "band": band and {"low": finite(band.low), "high": finite(band.high), "words": band.words},
        "departed": list(band.outside) if band else [],
    }


def thinned(curve: Curve, most: int | None, kept: Collection[int] = ()) -> Sequence[int]:
    """Return the positions of every n-th point, so that they are about `most`, of the last, and of the steps `kept`."""
    count = len(curve.steps)
    if most is None or count <= most:
        return range(count)
    stride, always = -(-count // most), {*kept}
    return [i for i in range(count) if i % stride == 0 or i == count - 1 or curve.steps[i] in always]


def finite(value: float | None) -> float | None:
    """Return the value, or None for NaN and infinities, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None
