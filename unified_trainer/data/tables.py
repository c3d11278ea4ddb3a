"""Columns of texts in .json, .jsonl, .csv and .parquet files."""

import csv
import io
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import check_file, parse_object, read_json_rows, read_text

TABLES = (".json", ".jsonl", ".csv", ".parquet")
INVISIBLE = ("Cc", "Cf")  # controls, and formats such as zero-width spaces
LONGEST = 10_000  # characters of a prompt; umT5 reads its first 512 tokens, some 2,500 characters


def read_columns(file: Path, key: str, *choices: Sequence[str], way_out: str = "") -> list[tuple[str, tuple[str, ...]]]:
    """Return for each row its place, such as "line 3", and some columns.

    A .json file holds a list, or an object whose `data` is one; an entry is an object, or a text, which stands for the
    first name of the first choice.

    Each choice gives the names that one of the columns may have, the likeliest first; the file has one of them, the
    first row's, in every row. `key` is the setting that names the file, for messages; `way_out` ends the message about
    an absent column. Raise UserError, naming file and line, for a file that cannot be read, lacks a column, or holds no
    text there.
    """
    place = f"{key} {file}"

    def chosen(held: list[str]) -> list[str]:
        return [pick(held, choice, place, way_out) for choice in choices]

    rows = read_rows(file, key, chosen, choices[0][0], texts=True)
    columns = [pick(row, choice, f"{place}: {where}", way_out) for where, row in rows[:1] for choice in choices]
    return [(where, tuple(_text(row, name, f"{place}: {where}", way_out) for name in columns)) for where, row in rows]


def read_lists(file: Path, key: str, names: Sequence[str]) -> list[tuple[str, ...]] | None:
    """Return for each row the texts of the first of these columns that it has: one text, or a list of texts.

    An absent or empty value is an empty tuple. None where no row has such a column. Raise UserError as `read_columns`
    does.
    """
    rows = read_rows(file, key, lambda held: [name for name in names if name in held])
    if not any(name in row for _, row in rows for name in names):
        return None
    values = [(where, next((row[name] for name in names if name in row), None)) for where, row in rows]
    return [tuple(texts_of(value, f"{key} {file}: {where}")) for where, value in values]


def read_rows(
    file: Path,
    key: str,
    chosen: Callable[[list[str]], list[str]],
    name: str = "",
    *,
    texts: bool = False,
    endings: Sequence[str] = (),
) -> list[tuple[str, dict[str, Any]]]:
    """Return place and row of each row of a table; of a .parquet file the columns that `chosen` takes of its own.

    A text in a .json list stands for {name: text}; an object whose keys end in `endings` holds a caption, captions or
    a row for each path. With `texts`, the columns of a .parquet file must hold texts.
    """
    if file.suffix == ".parquet":
        return _parquet_rows(file, key, chosen, texts=texts)
    return _text_rows(file, key, name, tuple(endings))


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


def _text_rows(file: Path, key: str, name: str, endings: tuple[str, ...]) -> list[tuple[str, dict[str, Any]]]:
    place = f"{key} {file}"
    if file.suffix == ".csv":
        return _csv_rows(read_text(file, key), place)
    if file.suffix == ".json":
        return [(f"entry {i}", row) for i, row in enumerate(read_json_rows(file, key, name, endings), 1)]
    numbered = [(f"line {i}", line) for i, line in enumerate(lines_of(read_text(file, key)), 1) if line.strip()]
    return [(where, parse_object(line, f"{place}: {where}")) for where, line in numbered]


def _csv_rows(text: str, place: str) -> list[tuple[str, dict[str, Any]]]:
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


def _parquet_rows(
    file: Path, key: str, chosen: Callable[[list[str]], list[str]], *, texts: bool
) -> list[tuple[str, dict[str, Any]]]:
    """Return place and row of a .parquet file, with the columns that `chosen` takes; `texts` refuses other types."""
    check_file(file, key)
    place = f"{key} {file}"
    try:
        schema = pq.read_schema(file)
        names = chosen(schema.names)
        for name in names:
            if schema.names.count(name) > 1:
                raise UserError(f"{place} has several columns {name}")
            if texts and not is_text(schema.field(name).type):
                raise UserError(f"{place}: column {name} holds {schema.field(name).type} instead of texts")
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


def _text(row: dict[str, object], name: str, place: str, way_out: str) -> str:
    value = row[pick(row, (name,), place, way_out)]
    if name == "cap" and isinstance(value, list) and len(value) == 1:  # as in FastVideo's lists of videos
        value = value[0]
    if not isinstance(value, str):
        raise UserError(f"{place} holds {value!r} instead of a text")
    refuse_unreadable(value, place)
    return value
