"""The file metrics.jsonl of a run."""

import json
import os
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from unified_trainer.basics.own_files import no_follow, without_link

METRICS = "metrics.jsonl"
VALIDATION = "validation/"  # begins the names of metrics of a validation


class MetricsFile:
    """metrics.jsonl: lines are appended, and those that cannot be written wait in memory for the next ones."""

    def __init__(self, file: Path, start: int, say: Callable[[str], None], unvalidated: int | None) -> None:
        """Open the file after `start` training steps; lines after it, which come again, are removed.

        So are the validations of step `unvalidated` and later. Damaged lines, as a crash of the machine leaves, are
        left out; the file is then kept as it was beside the new one. `rows` are the others. `say` prints a line.
        """
        self._file, self._say = file, say
        self.rows = self._continue(start, unvalidated)
        self._opened = FileIO(file, "ab", opener=no_follow)
        self._unwritten = b""
        self._failing = False

    def write(self, row: dict[str, Any]) -> None:
        """Append a row."""
        self._unwritten += (json.dumps(row) + "\n").encode()
        self._flush()

    def rewind(self, start: int) -> None:
        """Remove the lines after `start` training steps, which come again; `rows` are then those that are left."""
        self.close()
        self._unwritten = b""
        self.rows = self._continue(start, None)
        self._opened = FileIO(self._file, "ab", opener=no_follow)

    def close(self) -> None:
        """Write what is left, and close the file."""
        self._flush()
        self._opened.close()

    def _flush(self) -> None:
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._opened.write(self._unwritten) :]
        except OSError as error:
            if not self._failing:
                reason = f"no space for {self._file}, or another fault ({error.strerror or error})"
                self._say(f"warning: {reason}; its lines are kept in memory until they can be written")
            self._failing = True
        else:
            self._failing = False

    def _continue(self, start: int, unvalidated: int | None) -> list[dict[str, Any]]:
        before = self._file.read_bytes() if self._file.is_file() else b""
        lines = before.split(b"\n")[:-1] if start else []  # the last one may be cut
        kept, damaged = [], 0
        for line in lines:
            text = line.strip(b"\0\r ")  # a file system fills with NULs what it lost
            row = row_of(text)
            if row is None:
                damaged += bool(text)
            elif row["step"] <= start and not (
                unvalidated is not None and row["step"] >= unvalidated and is_validation(row)
            ):
                kept.append((text, row))
        after = b"".join(text + b"\n" for text, _ in kept)
        if after != before:
            building = self._file.with_suffix(".tmp")
            without_link(building).write_bytes(after)
            if damaged:
                as_it_was = self._file.with_suffix(".damaged")
                os.replace(self._file, as_it_was)
                self._say(f"warning: {self._file}: {damaged} damaged lines are left out; as it was it is {as_it_was}")
            os.replace(building, self._file)
        return [row for _, row in kept]


def row_of(line: bytes) -> dict[str, Any] | None:
    """Return the row that a line holds, or None for a damaged one."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(row, dict) and isinstance(row.get("step"), int)
    return row if whole else None


def is_validation(row: Mapping[str, Any]) -> bool:
    """Whether metrics, by name, are those of a validation."""
    return any(name.startswith(VALIDATION) for name in row)
