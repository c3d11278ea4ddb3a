"""The curves of a metrics.jsonl, read in blocks of lines.

A curve keeps all points up to `MOST`; of a longer one it keeps the extremes and the end of equal stretches of steps, so
that memory has a bound.
"""

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unified_trainer.basics.errors import UserError

TRAIN, VALIDATION = "train/", "validation/"
BLOCK = 2**22  # bytes that are read at a time
MOST = 10_000  # points of a curve that are kept; up to twice as many wait to be thinned
Points = tuple[array, array]  # steps and values


class RunFolderUnreadableError(UserError):
    """A run directory lacks a file or holds a damaged one; the message names it."""


@dataclass(frozen=True)
class Curve:
    """The values of one metric; a training metric has its name without the prefix train/, as in docs/metrics.md."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


class Metrics(NamedTuple):
    """The content of a metrics.jsonl."""

    curves: dict[str, Curve]  # by name
    step: int  # training steps that the file has
    written: float | None  # when the last line was, in seconds since 1970


def read_metrics(file: Path) -> Metrics:
    """Return the metrics of a file, none if there is no file; RunFolderUnreadableError names a damaged line.

    A last line that is not whole yet is left out.
    """
    columns: dict[str, Points] = {}
    step, written, number = 0, None, 0
    for whole in _blocks(file) if file.is_file() else ():
        for name, (steps, values) in _columns(whole, file, number).items():
            if name == "time":
                written = values[-1]
                continue
            if name.startswith(TRAIN):
                step = max(step, *steps)
            points = columns.setdefault(name.removeprefix(TRAIN), (array("q"), array("d")))
            points[0].extend(steps)
            points[1].extend(values)
            if len(points[0]) > 2 * MOST:
                kept = thinned(np.array(points[0]), np.array(points[1]), MOST).tolist()
                points[0][:], points[1][:] = (array(own.typecode, [own[i] for i in kept]) for own in points)
        number += whole.count(b"\n")
    curves = {name: Curve(name, tuple(steps), tuple(values)) for name, (steps, values) in columns.items()}
    return Metrics(curves, step, written)


def _blocks(file: Path) -> Iterator[bytes]:
    """Yield a file in blocks of whole lines."""
    rest = b""
    with file.open("rb") as opened:
        while part := opened.read(BLOCK):
            whole, line_feed, rest = (rest + part).rpartition(b"\n")
            if line_feed:
                yield whole + line_feed


def _columns(whole: bytes, file: Path, before: int) -> dict[str, Points]:
    columns: dict[str, Points] = {}
    for row in objects(whole, file, before):
        step = row.get("step")
        if not isinstance(step, int) or not 0 <= step < 2**53:
            raise RunFolderUnreadableError(f"{file} is damaged: a line has no step; remove that line")
        for name, value in row.items():
            if name != "step" and isinstance(value, (int, float)):
                steps, values = columns.setdefault(name, (array("q"), array("d")))
                steps.append(step)
                values.append(float(value))
    return columns


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
