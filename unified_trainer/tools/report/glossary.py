"""The metrics of metrics.toml: their groups, their healthy ranges as numbers, and the page docs/metrics.md.

Placeholders in names are those of that page: NAME, S, LAG and ROLE.
"""

import re
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLACEHOLDERS = {"NAME": r"[\w-]+", "S": r"\d+", "LAG": r"\d+", "ROLE": r"[a-z_]+(?:/(?:high|low))?"}
OTHER = "Other metrics"  # of methods and scorers outside the package
CONTENT: dict[str, Any] = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8"))
GROUPS: dict[str, list[str]] = {
    group["title"]: [name for metric in group["metric"] for name in metric["names"]] for group in CONTENT["group"]
}
# Metrics that one chart shows together while there is one run, by the chart's title; besides those of every S or LAG.
STACKED = "seconds by phase"  # parts of a sum
CHARTS = {
    "u": ("u_mean", "u_p50", "u_p90", "u_p99"),
    "gap": ("gap_low", "gap_mid", "gap_high"),
    STACKED: ("seconds/NAME", "seconds/weights"),
    "validation/accuracy by attribute": tuple(
        f"validation/accuracy/{name}" for name in ("color", "shape", "direction")
    ),
}
TOGETHER = {name: title for title, names in CHARTS.items() for name in names}  # chart's title by the documented name
TOGETHER |= {name: name for names in GROUPS.values() for name in names if name.endswith(("/S", "_LAG"))}


@dataclass(frozen=True)
class Healthy:
    """The healthy range of a metric: fixed, or relative to the first value of the run.

    `low` and `high` are bounds. `fall` and `drift` name a setting in standard deviations of the samples below, or
    around, the first value, `rise` one of what may be added to it, and `share` one with a fraction of it;
    `high_settings` name settings whose smallest value is the upper bound.
    """

    low: float | None = None
    high: float | None = None
    excluded: bool = False  # whether the bounds themselves are outside
    mean_of: int = 1  # successive values whose mean is compared
    fall: str = ""
    drift: str = ""
    rise: str = ""
    share: str = ""
    high_settings: Sequence[str] = ()
    held_out: bool = False  # only where no reward contains the metric
    inexact: bool = False  # only in runs without the exact measures of the tiny world
    advice: str = ""


HEALTHY = {
    name: Healthy(**{key: value for key, value in bounds.items() if key != "of"})
    for group in CONTENT["group"]
    for metric in group["metric"]
    for bounds in metric.get("range", ())
    for name in bounds.get("of", metric["names"])
}


def _expression(name: str) -> re.Pattern[str]:
    words = re.split(r"(\bNAME|\bS\b|LAG\b|\bROLE\b)", name)
    return re.compile("".join(PLACEHOLDERS.get(word) or re.escape(word) for word in words))


DOCUMENTED = [(group, name, _expression(name)) for group, names in GROUPS.items() for name in names]


def documented_name(metric: str) -> str | None:
    """Return the name in docs/metrics.md that a metric falls under, with its placeholders; the most literal one."""
    names = [name for _, name, expression in DOCUMENTED if expression.fullmatch(metric)]
    return max(names, key=lambda name: len(re.sub("|".join(PLACEHOLDERS), "", name)), default=None)


def grouped(metrics: Collection[str]) -> dict[str, list[str]]:
    """Return metrics by group, both in the order of docs/metrics.md; unknown ones come last.

    A name that two groups have belongs to the one with more metrics of the run.
    """
    names = {metric: documented_name(metric) for metric in metrics}
    groups: dict[str, list[str]] = {}
    for group, documented, _ in DOCUMENTED:
        groups.setdefault(documented, []).append(group)
    sizes = {group: sum(groups[name] == [group] for name in names.values() if name) for group in GROUPS}
    order = {(group, documented): i for i, (group, documented, _) in enumerate(DOCUMENTED)}
    members: dict[str, list[tuple[int, str]]] = {group: [] for group in (*GROUPS, OTHER)}
    for metric, name in names.items():
        if name is None:
            members[OTHER].append((0, metric))
        else:
            group = max(reversed(groups[name]), key=sizes.__getitem__)
            members[group].append((order[group, name], metric))
    return {group: [metric for _, metric in sorted(rows)] for group, rows in members.items() if rows}


def page() -> str:
    """Return docs/metrics.md."""
    parts = ["# Metrics", CONTENT["intro"].strip()]
    for group in CONTENT["group"]:
        rows = [("metric", "definition", "unit, range", "healthy", "what to do otherwise"), ("---",) * 5]
        for metric in group["metric"]:
            names = ", ".join(f"`{name}`" for name in metric["names"])
            rows.append((names, *(metric[key] for key in ("definition", "unit", "healthy", "otherwise"))))
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        parts += [f"## {group['title']}", group["text"].strip(), table]
    return "\n\n".join(parts) + "\n"
