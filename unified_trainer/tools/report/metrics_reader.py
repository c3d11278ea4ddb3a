"""The curves of a metrics.jsonl, which a run may still append to: what was read once is not read again."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unified_trainer.basics.errors import UserError

TRAIN, VALIDATION = "train/", "validation/"
SEAM = 256  # bytes before the end of what was read, which must still be there


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
        self.times: list[float] = []  # when lines were written, in seconds since 1970
        self._columns: dict[str, tuple[list[int], list[float]]] = {}
        self._inode, self._end, self._seam, self._number = 0, 0, b"", 0

    def update(self) -> None:
        """Read the lines that are new; RunFolderUnreadableError for a damaged one, and nothing if there is no file.

        A last line that is not whole yet is left for the next call.
        """
        if not self._file.is_file():
            self._forget()
            return
        with self._file.open("rb") as opened:
            self._inode, before = os.fstat(opened.fileno()).st_ino, self._inode
            opened.seek(max(self._end - len(self._seam), 0))
            if self._inode != before or opened.read(len(self._seam)) != self._seam:
                inode = self._inode
                self._forget()
                self._inode = inode
            opened.seek(self._end)
            new = opened.read()
        whole = new[: new.rfind(b"\n") + 1]
        try:
            for row in objects(whole, self._file, self._number):
                self._add(row)
        except RunFolderUnreadableError:
            self._forget()
            raise
        self._end += len(whole)
        self._number += whole.count(b"\n")
        self._seam = (self._seam + whole)[-SEAM:]

    def _add(self, row: dict[str, Any]) -> None:
        step = row.get("step")
        if not isinstance(step, int):
            raise RunFolderUnreadableError(f"{self._file} is damaged: a line has no step; remove that line")
        if "time" in row:
            self.times.append(float(row["time"]))
        for name, value in row.items():
            if name.startswith(TRAIN):
                self.step = max(self.step, step)
            if name not in ("step", "time") and isinstance(value, (int, float)):
                steps, values = self._columns.setdefault(name.removeprefix(TRAIN), ([], []))
                steps.append(step)
                values.append(float(value))

    def curves(self) -> dict[str, Curve]:
        """Return the curves of all metrics by name."""
        return {name: Curve(name, tuple(steps), tuple(values)) for name, (steps, values) in self._columns.items()}


def objects(content: bytes, file: Path, before: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of lines, one per whole line; errors name the file, and the line after `before` others."""
    for number, line in enumerate(content.split(b"\n")[:-1], before + 1):  # behind the last line feed is no whole line
        try:
            row = json.loads(line)
        except ValueError as error:
            raise RunFolderUnreadableError(f"{file} is damaged in line {number} ({error}): remove that line") from error
        if not isinstance(row, dict):
            raise RunFolderUnreadableError(f"{file} is damaged in line {number}: expected an object; remove that line")
        yield row
