"""The curves of a page as plain data: groups of charts with the traces and healthy ranges of every run."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from unified_trainer.reporting.glossary import STACKED, TOGETHER, documented_name, grouped
from unified_trainer.reporting.healthy import Band, bands
from unified_trainer.reporting.run_folder import Curve, RunRecord


def chart_groups(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return the groups of the glossary with their charts.

    A chart has a title, traces (run, label, steps, values, healthy range) and whether they are parts of a sum. One run
    has several metrics in a chart where the glossary says so; several runs have one metric in a chart.
    """
    healthy = [bands(run) for run in runs]
    groups = grouped({name for run in runs for name in run.curves})
    return [
        {"title": group, "id": f"group-{i}", "charts": _charts(names, runs, healthy)}
        for i, (group, names) in enumerate(groups.items())
    ]


def _charts(
    names: Sequence[str], runs: Sequence[RunRecord], healthy: Sequence[Mapping[str, Band]]
) -> list[dict[str, Any]]:
    charts: dict[str, dict[str, Any]] = {}
    for name in names:
        together = TOGETHER.get(documented_name(name) or "") if len(runs) == 1 else None
        title = together or name
        chart = charts.setdefault(title, {"title": title, "stacked": title == STACKED, "traces": []})
        for i, run in enumerate(runs):
            if name in run.curves:
                chart["traces"].append(_trace(i, run.curves[name], healthy[i].get(name)))
    return list(charts.values())


def _trace(run: int, curve: Curve, band: Band | None) -> dict[str, Any]:
    return {
        "run": run,
        "label": curve.name,
        "steps": list(curve.steps),
        "values": [finite(value) for value in curve.values],
        "band": band and {"low": finite(band.low), "high": finite(band.high), "words": band.words},
        "departed": list(band.outside) if band else [],
    }


def finite(value: float | None) -> float | None:
    """Return the value, or None for NaN and infinities, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None
