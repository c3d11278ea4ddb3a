"""Columns of texts in .json, .jsonl, .csv and .parquet files."""

import csv
import io
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import check_file, parse_object, read_json_rows, read_text

TABLES = (".json", ".jsonl", ".csv", ".parquet")
INVISIBLE = ("Cc", "Cf")  # controls, and formats such as zero-width spaces
LONGEST = 10_000  # characters of a prompt; umT5 reads its first 512 tokens, some 2,500 characters


Rows = list[tuple[str, dict[str, Any]]]  # place, such as "line 3", and the values by column


def read_texts(
    file: Path, key: str, names: Sequence[str], more: Collection[str] = (), way_out: str = ""
) -> list[tuple[str, str, dict[str, Any]]]:
    """Return for each row its place, its text in a column, and its values in that and in `more` columns.

    The column is the first of `names` that the first row has. A .json file holds a list, or an object whose `data` is
    one; a text there stands for the first name. `key` is the setting that names the file, for messages; `way_out` ends
    the message about an absent column. Raise UserError, naming file and line, for a file that cannot be read, lacks the
    column, or holds no text there.
    """
    rows, place = read_rows(file, key, names, names[0], more=more), f"{key} {file}"
    for where, row in rows:
        names = (pick(row, names, f"{place}: {where}", way_out),)
    return [(where, _text(row, names[0], f"{place}: {where}"), row) for where, row in rows]


def read_rows(
    file: Path,
    key: str,
    wanted: Collection[str],
    name: str = "",
    endings: tuple[str, ...] = (),
    more: Collection[str] = (),
) -> Rows:
    """Return the rows of a table; of a .parquet file those columns that are wanted, and `more` where one of them is.

    A text in a .json list stands for {name: text}; an object of paths with these endings holds captions or rows.
    """
    place = f"{key} {file}"
    if file.suffix == ".parquet":
        return _parquet_rows(file, key, wanted, more)
    if file.suffix == ".csv":
        return _csv_rows(read_text(file, key), place)
    if file.suffix == ".json":
        return [(f"entry {i}", row) for i, row in enumerate(read_json_rows(file, key, name, endings), 1)]
    numbered = [(f"line {i}", line) for i, line in enumerate(lines_of(read_text(file, key)), 1) if line.strip()]
    return [(where, parse_object(line, f"{place}: {where}")) for where, line in numbered]


def lines_of(text: str) -> list[str]:
    """Return the lines of a text, which end as on Unix, on Windows or, in CR alone, on old Macs."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def texts_of(value: object, place: str) -> list[str]:
    """Return a text or a list of texts as a list; nothing for what is empty. Raise UserError for anything else."""
    if isinstance(value, list):
        return [text for inner in value for text in texts_of(inner, place)]
    if not isinstance(value, str | None):
        raise UserError(f"{place} holds {value!r} instead of a text")
    return [value] if value else []


def texts_of_one(row: Mapping[str, object], names: Sequence[str], place: str) -> list[str]:
    """Return the texts of the only column of these that a row fills: none, one, or a list. UserError for two."""
    filled = {name: texts for name in names if (texts := texts_of(row.get(name), place))}
    if len(filled) > 1:
        raise UserError(f"{place} fills the columns {' and '.join(filled)}, of which one is read: empty the other")
    return next(iter(filled.values()), [])


def unreadable(text: str) -> str:
    """Say why a text can be no prompt; "" if it can.

    It is so long that a scorer, whose time grows with the square of the length, would not end, or holds a NUL, half of
    a surrogate pair, or invisible characters alone.
    """
    if len(text) > LONGEST:
        return f"has {len(text):,} characters, and a prompt has {LONGEST:,} at most"
    if "\0" in text:
        return "holds a NUL"
    if any(0xD800 <= ord(letter) < 0xE000 for letter in text):
        return "holds half of a surrogate pair"
    if text.strip() and all(letter.isspace() or unicodedata.category(letter) in INVISIBLE for letter in text):
        return "holds invisible characters alone"
    return ""


def refuse_unreadable(text: str, place: str) -> None:
    """Raise UserError, which begins with `place`, for a text that can be no prompt."""
    if fault := unreadable(text):
        raise UserError(f"{place} {fault}: remove it")


def _csv_rows(text: str, place: str) -> Rows:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        names = list(reader.fieldnames or [])
        rows = [(f"row {i}", row) for i, row in enumerate(reader, 1)]
    except csv.Error as error:
        raise UserError(f"{place} cannot be read as CSV, line {reader.reader.line_num}: {error}") from error
    if len({*names}) < len(names):
        raise UserError(f"{place}: a column name stands twice in its first line, {', '.join(names)}")
    for where, row in rows:
        if None in row:
            raise UserError(f"{place}: {where} has more values than the first line has columns: put texts in quotes")
    return rows


def _parquet_rows(file: Path, key: str, wanted: Collection[str], more: Collection[str]) -> Rows:
    check_file(file, key)
    place = f"{key} {file}"
    try:
        held = pq.read_schema(file).names
        names = [name for name in held if name in wanted or name in more]
        if not {*wanted} & {*names}:
            return [("row 1", dict.fromkeys(held))]  # for the message that names them
        if twice := [name for name in names if held.count(name) > 1]:
            raise UserError(f"{place} has several columns {twice[0]}")
        return [(f"row {i}", row) for i, row in enumerate(pq.read_table(file, columns=names).to_pylist(), 1)]
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise UserError(f"{place} cannot be read: {' '.join(str(error).split())}") from error


def is_text(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds texts."""
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def pick(names: Iterable[str], choice: Sequence[str], place: str, way_out: str) -> str:
    """Return the first name of the choice that a row has."""
    held = list(names)
    present = [name for name in choice if name in held]
    if not present:
        raise UserError(f"{place} has no column {' or '.join(choice)}, only {', '.join(map(str, held))}{way_out}")
    return present[0]


def _text(row: dict[str, object], name: str, place: str) -> str:
    value = row[name]
    if name == "cap" and isinstance(value, list) and len(value) == 1:  # as in FastVideo's lists of videos
        value = value[0]
    if not isinstance(value, str):
        raise UserError(f"{place} holds {value!r} instead of a text")
    refuse_unreadable(value, place)
    return value
