"""Prompts to generate from: captions of the tiny world, or a file with one prompt per line."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from unified_trainer.data.tiny_world import HELD_OUT, PHRASINGS, SUBJECTS
from unified_trainer.errors import MissingFileError, UserError

COLUMNS = ("prompt", "caption", "text")  # of a .jsonl or .parquet file, unless the settings name another
SUFFIXES = (".txt", ".jsonl", ".parquet")  # a text that ends so names a file


@dataclass(frozen=True)
class Prompts:
    """A source of prompts without clips."""

    prompts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.prompts)

    def prompt(self, index: int) -> str:
        """Return the prompt of a row."""
        return self.prompts[index]

    def latents(self, indices: list[int]) -> None:
        """Return None: there are no clips."""
        return None


def training_captions() -> tuple[str, ...]:
    """Return captions of every training subject in all phrasings but the one that it is validated in."""
    return tuple(
        subject.caption(phrasing)
        for i, subject in enumerate(SUBJECTS)
        for phrasing in range(len(PHRASINGS))
        if subject not in HELD_OUT and phrasing != i % len(PHRASINGS)
    )


def validation_captions(count: int) -> tuple[str, ...]:
    """Return `count` captions that are no training prompts: each subject in one phrasing, held-out subjects first."""
    captions = [(subject not in HELD_OUT, subject.caption(i % len(PHRASINGS))) for i, subject in enumerate(SUBJECTS)]
    ordered = [caption for _, caption in sorted(captions, key=lambda row: row[0])]
    return tuple(ordered[i % len(ordered)] for i in range(count))


@dataclass(frozen=True)
class PromptFile:
    """The prompts of a file, and a note on lines that were skipped."""

    prompts: tuple[str, ...]
    note: str = ""  # empty if every line is a prompt of its own


def prompts_of(path: str, tiny: tuple[str, ...], key: str, column: str) -> PromptFile:
    """Return the captions `tiny` for the path "tiny", otherwise the prompts of that file; see `read_prompts`."""
    return PromptFile(tiny) if path == "tiny" else read_prompts(Path(path), key, column)


def read_prompts(file: Path, key: str = "--prompts", column: str = "") -> PromptFile:
    """Read a text file with one prompt per line, or a column of a .jsonl or .parquet file.

    Blank lines and repeated prompts are skipped and counted in the note. `key` is the setting that names the file, for
    messages. Raise UserError, naming file and line, for a file that cannot be read or holds no prompt.
    """
    if not file.is_file():
        raise MissingFileError(f"{key} {file}: {'it is a folder, not a file' if file.is_dir() else 'no such file'}")
    try:
        rows = _rows(file, key, column)
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise UserError(f"{key} {file} cannot be read: {error}") from error
    texts = [row.strip() for row in rows]
    prompts = tuple(dict.fromkeys(text for text in texts if text))
    if not prompts:
        raise UserError(f"{key} {file} is empty; write one prompt per line")
    blank = sum(not text for text in texts)
    repeated = len(texts) - blank - len(prompts)
    skipped = f"{key} {file}: {len(prompts)} prompts; skipped {blank} blank and {repeated} repeated lines"
    return PromptFile(prompts, skipped if blank or repeated else "")


def _rows(file: Path, key: str, column: str) -> list[str]:
    if file.suffix == ".parquet":
        names = pq.read_schema(file).names
        values = pq.read_table(file, columns=[_column(names, column, f"{key} {file}")]).column(0).to_pylist()
    else:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
        lines = lines[:-1] if lines[-1] == "" else lines  # the end of the last line is no line of its own
        if file.suffix != ".jsonl":
            return lines
        values = [
            _of_json(line, number, f"{key} {file}", column) for number, line in enumerate(lines, 1) if line.strip()
        ]
    for number, value in enumerate(values, 1):
        if not isinstance(value, str):
            raise UserError(f"{key} {file}: row {number} holds {value!r} instead of a text")
    return values


def _of_json(line: str, number: int, place: str, column: str) -> object:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{place}: line {number} is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise UserError(f"{place}: line {number} must be an object with a prompt, not a {type(row).__name__}")
    return row[_column(list(row), column, f"{place}: line {number}")]


def _column(names: Sequence[str], column: str, place: str) -> str:
    """The column asked for, or the first usual one."""
    found = [name for name in ([column] if column else COLUMNS) if name in names]
    if not found:
        wanted = column or " or ".join(COLUMNS)
        raise UserError(f"{place} has no column {wanted}, only {', '.join(names)}: set prompts_column")
    return found[0]
