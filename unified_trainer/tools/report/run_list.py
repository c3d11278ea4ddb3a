"""The list of runs as a page shows it: state, step, last values and small curves."""

import itertools
import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from unified_trainer.run.tracking.tracker import SHOWN, VALIDATED
from unified_trainer.tools.report.run_folder import RunFolderUnreadableError, RunRecord
from unified_trainer.tools.report.run_watch import RunWatch, signature_of
from unified_trainer.tools.report.status import status_of

READING = 2.0  # seconds that one list may take: further runs come with the next
POINTS = 60  # of a small curve
WIDTH, HEIGHT, MARGIN = 100.0, 26.0, 2.0


@dataclass(frozen=True)
class Spark:
    """A small curve, as the points of a line in a box of WIDTH x HEIGHT, and the last value."""

    name: str
    short: str  # shown beside the value; empty if the column says it
    last: float
    low: float
    high: float
    points: str


@dataclass(frozen=True)
class RunRow:
    """A run in the list; one that cannot be read has a note only."""

    name: str
    link: str
    state: str
    note: str = ""
    step: int = 0
    steps: int = 0
    method: str = ""
    seed: Any = ""
    updated: float | None = None  # seconds since 1970
    sparks: tuple[Spark | None, ...] = (None,) * (1 + len(VALIDATED))


class RunList:
    """The rows of all runs below a folder; a run that did not change keeps its row."""

    def __init__(self, watch: RunWatch) -> None:
        self._watch = watch
        self._rows: dict[Path, tuple[Hashable, RunRow]] = {}

    def rows(self) -> list[RunRow]:
        """Return a row for every run; those not read within READING seconds keep their old one, or say so."""
        until = time.monotonic() + READING
        folders = self._watch.runs()
        self._rows = {folder: row for folder, row in self._rows.items() if folder in {*folders.values()}}
        for name, folder in folders.items():
            signature, known = signature_of(folder), self._rows.get(folder)
            if (known is None or known[0] != signature) and time.monotonic() < until:
                self._rows[folder] = signature, self._row(name, folder)
        return [
            self._rows[folder][1]
            if folder in self._rows
            else RunRow(name, link_to(name), "reading", "is read with the next refresh")
            for name, folder in folders.items()
        ]

    def _row(self, name: str, folder: Path) -> RunRow:
        try:
            run = self._watch.record(folder)
        except RunFolderUnreadableError as error:
            return RunRow(name, link_to(name), "unreadable", str(error))
        status = status_of(run)
        training = next((metric for metric in SHOWN if metric in run.curves), None)
        first = _spark(run, training, SHOWN[training]) if training else None
        return RunRow(
            name,
            link_to(name),
            status.state,
            f"hacking suspected at step {status.hacking[0]}" if status.hacking else "",
            status.step,
            status.steps,
            run.method,
            run.config.get("seed", ""),
            run.written,
            (first, *(_spark(run, metric, "") for metric in VALIDATED)),
        )


def link_to(*names: str) -> str:
    """Return the path of the page of runs; a name that is not UTF-8 keeps its bytes."""
    return "/run?" + "&".join(f"name={quote(name, safe='', errors='surrogateescape')}" for name in names)


def _spark(run: RunRecord, name: str, short: str) -> Spark | None:
    """Return the small curve of a metric; None if the run has no finite value of it."""
    curve = run.curves.get(name)
    finite = [value for value in curve.values if math.isfinite(value)] if curve else []
    values = means(finite, POINTS)
    if curve is None or not values:
        return None
    low, high = min(values), max(values)
    across = WIDTH / max(len(values) - 1, 1)
    up = (HEIGHT - 2 * MARGIN) / (high - low) if high > low else 0.0
    places = [(i * across, HEIGHT - MARGIN - (value - low) * up) for i, value in enumerate(values)]
    if len(places) == 1 or high == low:
        places = [(0.0, HEIGHT / 2), (WIDTH, HEIGHT / 2)]
    return Spark(name, short, curve.values[-1], low, high, " ".join(f"{x:.1f},{y:.1f}" for x, y in places))


def means(values: Sequence[float], parts: int) -> list[float]:
    """Return the means of `parts` equal parts of values, or the values if they are fewer."""
    count = max(min(parts, len(values)), 1)
    edges = [i * len(values) // count for i in range(count + 1)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges) if b > a]
