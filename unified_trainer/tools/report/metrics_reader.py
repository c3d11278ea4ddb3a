"""The curves of a metrics.jsonl, which a run may still append to: what was read once is not read again.

A curve keeps all points up to `MOST`; of a longer one it keeps the extremes and the end of equal stretches of steps, so
that memory has a bound.
"""

import json
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from unified_trainer.basics.errors import UserError

TRAIN, VALIDATION = "train/", "validation/"
SEAM = 256  # bytes before the end of what was read, which must still be there
BLOCK = 2**22  # bytes that are read at a time
MOST = 10_000  # points of a curve that are kept; up to twice as many wait to be thinned
Named = tuple[str, array, array]  # a metric with the steps and values that are new


class RunFolderUnreadableError(UserError):
    """A run directory lacks a file or holds a damaged one; the message names it."""


@dataclass(frozen=True)
class Curve:
    """The values of one metric; a training metric has its name without the prefix train/, as in docs/metrics.md."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


class MetricsReader:
    """The metrics of one file; `update` reads what was appended, or all of it if the file was written anew."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._forget()

    def _forget(self) -> None:
        self.step = 0  # training steps that the file has
        self.written: float | None = None  # when the last line was, in seconds since 1970
        self._columns: dict[str, tuple[array, array]] = {}  # steps and values
        self._inode, self._end, self._seam, self._number = 0, 0, b"", 0

    def update(self) -> None:
        """Read the lines that are new; RunFolderUnreadableError for a damaged one, and nothing if there is no file.

        A last line that is not whole yet is left for the next call.
        """
        if not self._file.is_file():
            self._forget()
            return
        with self._file.open("rb") as opened:
            inode = os.fstat(opened.fileno()).st_ino
            opened.seek(max(self._end - len(self._seam), 0))
            if self._inode != inode or opened.read(len(self._seam)) != self._seam:
                self._forget()
            self._inode = inode
            opened.seek(self._end)
            try:
                for whole in _blocks(opened):
                    self._add(whole)
            except RunFolderUnreadableError:
                self._forget()
                raise

    def _add(self, whole: bytes) -> None:
        for name, steps, values in _many(whole) or _columns(whole, self._file, self._number):
            if name == "time":
                self.written = values[-1]
                continue
            if name.startswith(TRAIN):
                self.step = max(self.step, max(steps))
            name = name.removeprefix(TRAIN)
            points = self._columns.setdefault(name, (array("q"), array("d")))
            points[0].extend(steps)
            points[1].extend(values)
            if len(points[0]) > 2 * MOST:
                kept = thinned(np.asarray(points[0]), np.asarray(points[1]), MOST).tolist()
                self._columns[name] = array("q", (points[0][i] for i in kept)), array("d", (points[1][i] for i in kept))
        self._end += len(whole)
        self._number += whole.count(b"\n")
        self._seam = (self._seam + whole)[-SEAM:]

    def curves(self) -> dict[str, Curve]:
        """Return the curves of all metrics by name."""
        return {name: Curve(name, tuple(steps), tuple(values)) for name, (steps, values) in self._columns.items()}


def _blocks(opened: BinaryIO) -> Iterator[bytes]:
    """Yield what is left of a file in blocks of whole lines."""
    rest = b""
    while part := opened.read(BLOCK):
        whole, line_feed, rest = (rest + part).rpartition(b"\n")
        if line_feed:
            yield whole + line_feed


def _many(whole: bytes) -> list[Named] | None:
    """Return the metrics of many lines, by Arrow; None for few lines, and for what Arrow does not read."""
    if len(whole) <= BLOCK // 4:
        return None
    from unified_trainer.tools.report.arrow_lines import metrics_in  # the lists of short runs do not need it

    return metrics_in(whole)


def _columns(whole: bytes, file: Path, before: int) -> list[Named]:
    columns: dict[str, tuple[array, array]] = {}
    for row in objects(whole, file, before):
        step = row.get("step")
        if not isinstance(step, int) or not 0 <= step < 2**53:
            raise RunFolderUnreadableError(f"{file} is damaged: a line has no step; remove that line")
        for name, value in row.items():
            if name != "step" and isinstance(value, (int, float)):
                steps, values = columns.setdefault(name, (array("q"), array("d")))
                steps.append(step)
                values.append(float(value))
    return [(name, *points) for name, points in columns.items()]


def thinned(steps: np.ndarray, values: np.ndarray, most: int) -> np.ndarray:
    """Return the positions of about `most` points, in order: all, if they are no more.

    Of each equal stretch of steps they are the lowest and the highest point, the first one that is not finite, and the
    last.
    """
    places = np.arange(len(steps))
    if len(steps) <= most:
        return places
    low = int(steps.min())
    stretch = (steps - low) * max(most // 3, 1) // (int(steps.max()) - low + 1)

    def first_of_each(order: np.ndarray) -> np.ndarray:
        sorted_stretches = stretch[order]
        return order[np.append(True, sorted_stretches[1:] != sorted_stretches[:-1])]

    odd = places[~np.isfinite(values)]
    kept = [first_of_each(np.lexsort((places, sign * values, stretch))) for sign in (1, -1)]
    kept += [first_of_each(np.lexsort((-places, stretch))), odd[np.unique(stretch[odd], return_index=True)[1]]]
    return np.unique(np.concatenate([places[:1], *kept]))


def objects(content: bytes, file: Path, before: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of lines, one per whole line; errors name the file, and the line after `before` others."""
    for number, line in enumerate(content.split(b"\n")[:-1], before + 1):  # behind the last line feed is no whole line
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RunFolderUnreadableError(f"{file} is damaged in line {number} ({error}): remove that line") from error
        if not isinstance(row, dict):
            raise RunFolderUnreadableError(f"{file} is damaged in line {number}: expected an object; remove that line")
        yield row
