"""Columns of texts in .jsonl, .csv and .parquet files."""

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from unified_trainer.errors import MissingFileError, UserError

TABLES = (".jsonl", ".csv", ".parquet")


def read_columns(file: Path, key: str, *choices: Sequence[str], way_out: str = "") -> list[tuple[str, ...]]:
    """Return some columns row by row; each choice gives the names that one of them may have, the likeliest first.

    `key` is the setting that names the file, for messages; `way_out` ends the message about an absent column. Raise
    UserError, naming file and line, for a file that cannot be read, lacks a column, or holds no text there.
    """
    place = f"{key} {file}"
    if not file.is_file():
        raise MissingFileError(f"{place}: {'it is a folder, not a file' if file.is_dir() else 'no such file'}")
    try:
        if file.suffix == ".parquet":
            names = [_pick(pq.read_schema(file).names, choice, place, way_out) for choice in choices]
            rows = [(f"row {i}", row) for i, row in enumerate(pq.read_table(file, columns=names).to_pylist(), 1)]
        elif file.suffix == ".csv":
            with file.open(encoding="utf-8-sig", newline="") as opened:
                rows = [(f"row {i}", row) for i, row in enumerate(csv.DictReader(opened, strict=True), 1)]
        else:
            lines = file.read_text(encoding="utf-8-sig").split("\n")
            numbered = [(f"line {i}", line) for i, line in enumerate(lines, 1) if line.strip()]
            rows = [(where, _object(line, f"{place}: {where}")) for where, line in numbered]
    except (OSError, UnicodeDecodeError, csv.Error, pa.ArrowException) as error:
        raise UserError(f"{place} cannot be read: {error}") from error
    return [tuple(_text(row, choice, f"{place}: {where}", way_out) for choice in choices) for where, row in rows]


def _object(line: str, place: str) -> dict[str, object]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{place} is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise UserError(f"{place} must be an object of columns, not a {type(row).__name__}")
    return row


def _pick(names: Iterable[str], choice: Sequence[str], place: str, way_out: str) -> str:
    """Return the first name of the choice that a row has."""
    held = list(names)
    found = [name for name in choice if name in held]
    if not found:
        raise UserError(f"{place} has no column {' or '.join(choice)}, only {', '.join(map(str, held))}{way_out}")
    return found[0]


def _text(row: dict[str, object], choice: Sequence[str], place: str, way_out: str) -> str:
    value = row[_pick(row, choice, place, way_out)]
    if not isinstance(value, str):
        raise UserError(f"{place} holds {value!r} instead of a text")
    return value
