"""FastVideo's parquet files: which rows and row groups they hold, checked before anything is trained on.

Each row has tensors of its kind (see row_kinds.py), a caption, and usually the caption's text embedding.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from unified_trainer.basics.actions import NO_ACTIONS, Actions
from unified_trainer.basics.errors import MissingFileError, UserError
from unified_trainer.data.batch_plan import largest_divisor
from unified_trainer.data.fastvideo import (
    ACTION_COLUMNS,
    FLOATS,
    IMAGE_TENSORS,
    TEXT,
    TEXT_ENCODER,
    columns_of,
    read_tensor,
    text_columns_in,
)
from unified_trainer.data.parquet_columns import check_no_nulls, check_types
from unified_trainer.data.row_kinds import RowKind
from unified_trainer.data.tables import unreadable

IMAGES = {columns_of(name)[0] for name in IMAGE_TENSORS.values()}  # of rows of kind i2v
UNREAD = "warning: data.path has image conditions ({}), which the student does not read"
THREADS = 8  # that read footers and captions at the start
SHOWN = 5  # bad rows that a message names


@dataclass(frozen=True)
class RowGroup:
    """Rows of one file that are read together."""

    file: Path
    number: int  # in its file
    first: int  # row of the file that it begins with
    rows: int
    size: int  # bytes in memory


@dataclass(frozen=True)
class StoredFile:
    """One file, as far as it is known without its tensors."""

    file: Path
    metadata: pq.FileMetaData
    columns: dict[str, str]  # type of each column by its name
    ids: list[str]
    captions: list[str]
    row_groups: list[RowGroup]
    text_encoder: str  # fingerprint of the encoder of the embeddings; empty if the file does not say
    text_fault: str  # why its text embeddings cannot be used; empty if they may
    text: list[str]  # columns of prompts
    faults: list[str]  # rows that cannot be trained on
    shapes: list[tuple[int, ...]]  # of the latents of each row
    actions: list[Actions]  # of each row


class StoredFiles:
    """The rows of all files, in the order of their names."""

    def __init__(self, kind: RowKind, files: Sequence[StoredFile]) -> None:
        self.kind, self.files = kind, tuple(files)
        self.metadata = {file.file: file.metadata for file in files}
        self.captions = tuple(caption for file in files for caption in file.captions)
        self.row_groups = tuple(group for file in files for group in file.row_groups)
        self.shapes = tuple(shape for file in files for shape in file.shapes)
        self.actions = tuple(actions for file in files for actions in file.actions)
        self.text_fault = next((file.text_fault for file in files if file.text_fault), "")
        self.text = {name for file in files for name in file.text}
        columns = {name for file in files for name in file.columns}
        unread = [] if kind.images else sorted(columns & IMAGES)
        self.image_note = UNREAD.format(", ".join(unread)) if unread else ""
        self._ids = [identity for file in files for identity in file.ids]
        self._starts = np.array([0, *accumulate(group.rows for group in self.row_groups)])[:-1]

    def locate(self, row: int) -> tuple[int, int]:
        """Return the row group of a row, and its number in it."""
        group = int(np.searchsorted(self._starts, row, "right")) - 1
        return group, row - int(self._starts[group])

    def place(self, row: int) -> str:
        """Return file, number and id of a row, for messages."""
        number, within = self.locate(row)
        group = self.row_groups[number]
        return _place(group.file, group.first + within, self._ids[row])

    def check_rejected(self, rejected: "StoredFiles") -> None:
        """Raise UserError, naming both rows, unless rejected clips are of the same ids, captions and shapes."""
        if len(rejected.captions) != len(self.captions):
            raise UserError(
                f"data.rejected has {len(rejected.captions)} rows, and data.path {len(self.captions)}: a pair is a row "
                "of each"
            )
        pairs = (zip(files._ids, files.captions, files.shapes, strict=True) for files in (self, rejected))
        for row, (own, other) in enumerate(zip(*pairs, strict=True)):
            if own != other:
                raise UserError(
                    f"data.rejected: {rejected.place(row)} is not the pair of {self.place(row)}: both need one id, "
                    "one caption and one shape. Give both videos of a pair one name, in two folders, and one caption, "
                    "and preprocess both"
                )

    def first_rows(self) -> dict[str, list[int]]:
        """Return the first row of each file, by the text encoder that the file names."""
        named = {file.file: file.text_encoder for file in self.files}
        rows: dict[str, list[int]] = {}
        for group, start in zip(self.row_groups, self._starts.tolist(), strict=True):
            if group.first == 0:
                rows.setdefault(named[group.file], []).append(start)
        return rows

    def lanes(self, batch: int, window_gib: float) -> int:
        """Return how many row groups the rows of a batch come from: a divisor of `batch` that the window has room for.

        Raise UserError, naming the file, if it has no room for one.
        """
        largest = max(self.row_groups, key=lambda group: group.size)
        room = int(window_gib / self.kind.shapes * 2**30 / max(1, largest.size))
        if not room:
            raise UserError(
                f"data.path: row group {largest.number + 1} of {largest.file} takes {largest.size / 2**30:.1f} GiB, "
                f"more than data.window_gib {window_gib:g}: write smaller row groups, or raise data.window_gib"
            )
        return largest_divisor(batch, room)


def read_stored_files(path: Path, kind: RowKind) -> StoredFiles:
    """Read footers, captions and shapes of a parquet file, or of all below a folder; no large tensor is read.

    Raise UserError, naming file and row, for what cannot be trained on: a file that is not whole, of another kind or
    with other columns than the first, and a row without caption or with tensors of another shape.
    """
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not path.exists() or not files:
        raise MissingFileError(f"data.path {path} {'holds no .parquet files' if path.exists() else 'does not exist'}")
    with ThreadPoolExecutor(THREADS) as pool:
        read = list(pool.map(lambda file: _read(file, kind), files))
    for stored in read[1:]:
        if differing := sorted({name for name, _ in stored.columns.items() ^ read[0].columns.items()}):
            raise UserError(
                f"data.path {path}: {read[0].file} and {stored.file} differ in columns {', '.join(differing)}: put "
                "files of different kinds into folders of their own"
            )
    if faults := [fault for stored in read for fault in stored.faults]:
        rest = f"; and {len(faults) - SHOWN} more rows" if len(faults) > SHOWN else ""
        raise UserError(f"data.path: {'; '.join(faults[:SHOWN])}{rest}")
    if not any(stored.captions for stored in read):
        raise UserError(f"data.path {path}: its files hold no rows")
    return StoredFiles(kind, read)


def _read(file: Path, kind: RowKind) -> StoredFile:
    try:
        with pq.ParquetFile(file) as opened:
            metadata, schema = opened.metadata, opened.schema_arrow
            columns = {field.name: str(field.type) for field in schema}
            text = text_columns_in(schema)
            kind.check_columns(file, columns)
            if metadata.num_rows:  # a file without rows may have columns of no type
                check_types(file, schema, ("caption", *kind.tensors, *text))
            check_no_nulls(file, metadata, kind.tensors[0])
            small = [name for name in ("id", "caption", *kind.small, *TEXT[1:], *ACTION_COLUMNS) if name in columns]
            rows = opened.read(small).to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split())
        raise UserError(f"data.path: {file} is not whole parquet ({said})") from error
    places = [_place(file, number, row["id"]) for number, row in enumerate(rows)]
    faults = ((place, _caption_fault(row) or kind.fault(place, row)) for place, row in zip(places, rows, strict=True))
    unusable = f"{file} holds none"
    if {*TEXT} <= columns.keys():
        shapes = ((place, row[TEXT[1]] or [0]) for place, row in zip(places, rows, strict=True))
        empty = (f"{place} has one of shape {shape}" for place, shape in shapes if not all(n and n > 0 for n in shape))
        unusable = next(empty, "")
        types = zip(places, (row[TEXT[2]] for row in rows), strict=True)
        if not unusable and (wrong := [(place, dtype) for place, dtype in types if dtype not in FLOATS]):
            raise UserError(
                f"data.path: {wrong[0][0]} has a text embedding of type {wrong[0][1]}, not {', '.join(FLOATS)}"
            )
    return StoredFile(
        file,
        metadata,
        columns,
        [str(row["id"]) for row in rows],
        [str(row["caption"]) for row in rows],
        list(_row_groups(file, metadata, {*kind.tensors, *text})),
        (metadata.metadata or {}).get(TEXT_ENCODER.encode(), b"").decode(errors="replace"),
        unusable,
        text,
        [f"{place} {fault}" for place, fault in faults if fault],
        [(*(row.get("vae_latent_shape") or ()),) for row in rows],
        [_actions(place, row) for place, row in zip(places, rows, strict=True)],
    )


def _actions(place: str, row: Mapping[str, Any]) -> Actions:
    if not row.get(ACTION_COLUMNS[0]):
        return NO_ACTIONS
    place = f"data.path: {place}"
    values = read_tensor(place, ACTION_COLUMNS[0], *(row.get(name) for name in ACTION_COLUMNS))
    return Actions.of(values.numpy(), place)


def _caption_fault(row: Mapping[str, Any]) -> str:
    caption = row["caption"]
    if not isinstance(caption, str) or not caption.strip():
        return "has no caption"
    fault = unreadable(caption)
    return f"has a caption that {fault}" if fault else ""


def _row_groups(file: Path, metadata: pq.FileMetaData, read: Collection[str]) -> Iterator[RowGroup]:
    first = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        parts = [group.column(i) for i in range(group.num_columns)]
        size = sum(p.total_uncompressed_size for p in parts if p.path_in_schema.split(".")[0] in read)
        if group.num_rows:
            yield RowGroup(file, number, first, group.num_rows, size)
        first += group.num_rows


def _place(file: Path, row: int, identity: object) -> str:
    return f"{file}: row {row + 1} ({identity!r})"
