"""FastVideo's parquet files of clips: which rows and row groups they hold, checked before anything is trained on.

Kinds t2v and i2v have a latent and a caption in each row, and usually the caption's text embedding. A tensor NAME is
three columns: NAME_bytes, NAME_shape and NAME_dtype.
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

from unified_trainer.data.batch_plan import largest_divisor
from unified_trainer.data.fastvideo import T2V, TEXT_ENCODER
from unified_trainer.data.tables import is_text, unreadable
from unified_trainer.errors import MissingFileError, UserError

LATENT = ("vae_latent_bytes", "vae_latent_shape", "vae_latent_dtype")
TEXT = ("text_embedding_bytes", "text_embedding_shape", "text_embedding_dtype")
FLOATS = ("float16", "float32", "float64")  # types of stored tensors
THREADS = 8  # that read footers and captions at the start
SHOWN = 5  # bad rows that a message names
Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class RowGroup:
    """Rows of one file that are read together."""

    file: Path
    number: int  # in its file
    first: int  # row of the file that it begins with
    rows: int
    size: int  # bytes in memory


@dataclass(frozen=True)
class ClipFile:
    """One file, as far as it is known without its latents and embeddings."""

    file: Path
    metadata: pq.FileMetaData
    columns: dict[str, str]  # type of each column by its name
    ids: list[str]
    captions: list[str]
    row_groups: list[RowGroup]
    text_encoder: str  # fingerprint of the encoder of the embeddings; empty if the file does not say
    text_fault: str  # why its text embeddings cannot be used; empty if they may
    faults: list[str]  # rows that cannot be trained on


class ClipFiles:
    """The rows of all files, in the order of their names."""

    def __init__(self, files: Sequence[ClipFile]) -> None:
        self.files = tuple(files)
        self.metadata = {one.file: one.metadata for one in files}
        self.captions = tuple(caption for one in files for caption in one.captions)
        self.row_groups = tuple(group for one in files for group in one.row_groups)
        self.text_fault = next((one.text_fault for one in files if one.text_fault), "")
        self._ids = [identity for one in files for identity in one.ids]
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

    def first_rows(self) -> dict[str, list[int]]:
        """Return the first row of each file, by the text encoder that the file names."""
        named = {one.file: one.text_encoder for one in self.files}
        found: dict[str, list[int]] = {}
        for group, start in zip(self.row_groups, self._starts.tolist(), strict=True):
            if group.first == 0:
                found.setdefault(named[group.file], []).append(start)
        return found

    def lanes(self, batch: int, window_gib: float) -> int:
        """Return how many row groups the rows of a batch come from: a divisor of `batch` that the window has room for.

        Raise UserError, naming the file, if it has no room for one.
        """
        largest = max(self.row_groups, key=lambda group: group.size)
        room = int(window_gib * 2**30 / max(1, largest.size))
        if not room:
            raise UserError(
                f"data.path: row group {largest.number + 1} of {largest.file} takes {largest.size / 2**30:.1f} GiB, "
                f"more than data.window_gib {window_gib:g}: write smaller row groups, or raise data.window_gib"
            )
        return largest_divisor(batch, room)


def read_clip_files(path: Path, latent_shape: Shape) -> ClipFiles:
    """Read footers, captions and shapes of a parquet file, or of all below a folder; no latent is read.

    Raise UserError, naming file and row, for what cannot be trained on: a file that is not whole, of another kind or
    with other columns than the first, and a row without caption or with latents of another shape.
    """
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not path.exists() or not files:
        raise MissingFileError(f"data.path {path} {'holds no .parquet files' if path.exists() else 'does not exist'}")
    with ThreadPoolExecutor(THREADS) as pool:
        read = list(pool.map(lambda file: _read(file, latent_shape), files))
    for one in read[1:]:
        if differing := sorted({name for name, _ in one.columns.items() ^ read[0].columns.items()}):
            raise UserError(
                f"data.path {path}: {read[0].file} and {one.file} differ in columns {', '.join(differing)}: put files "
                "of different kinds into folders of their own"
            )
    if faults := [fault for one in read for fault in one.faults]:
        rest = f"; and {len(faults) - SHOWN} more rows" if len(faults) > SHOWN else ""
        raise UserError(f"data.path: {'; '.join(faults[:SHOWN])}{rest}")
    if not any(one.captions for one in read):
        raise UserError(f"data.path {path}: its files hold no rows")
    return ClipFiles(read)


def _read(file: Path, latent_shape: Shape) -> ClipFile:
    try:
        with pq.ParquetFile(file) as opened:
            metadata, schema = opened.metadata, opened.schema_arrow
            columns = {field.name: str(field.type) for field in schema}
            _check_kind(file, columns)
            if metadata.num_rows:  # a file without rows may have columns of no type
                _check_types(file, schema)
            _check_no_nulls(file, metadata)
            small = [name for name in ("id", "caption", *LATENT[1:], *TEXT[1:]) if name in columns]
            rows = opened.read(small).to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split())
        raise UserError(f"data.path: {file} is not whole parquet ({said})") from error
    places = [_place(file, number, row["id"]) for number, row in enumerate(rows)]
    faults = ((place, _fault(row, latent_shape)) for place, row in zip(places, rows, strict=True))
    unusable = f"{file} holds none"
    if {*TEXT} <= columns.keys():
        shapes = zip(places, (row[TEXT[1]] or [] for row in rows), strict=True)
        unusable = next((f"{place} has one of shape {shape}" for place, shape in shapes if not _is_text(shape)), "")
        types = zip(places, (row[TEXT[2]] for row in rows), strict=True)
        if not unusable and (wrong := [(place, kind) for place, kind in types if kind not in FLOATS]):
            raise UserError(
                f"data.path: {wrong[0][0]} has a text embedding of type {wrong[0][1]}, not {', '.join(FLOATS)}"
            )
    return ClipFile(
        file,
        metadata,
        columns,
        [str(row["id"]) for row in rows],
        [str(row["caption"]) for row in rows],
        list(_row_groups(file, metadata)),
        (metadata.metadata or {}).get(TEXT_ENCODER.encode(), b"").decode(errors="replace"),
        unusable,
        [f"{place} {fault}" for place, fault in faults if fault],
    )


def _check_kind(file: Path, columns: Collection[str]) -> None:
    missing = [name for name in ("id", "caption", *LATENT) if name not in columns]
    if "trajectory_latents_bytes" in columns:
        raise UserError(f"data.path: {file} holds trajectories of a teacher (kind ode) instead of clips (kind t2v)")
    if missing == [*LATENT]:
        raise UserError(f"data.path: {file} holds captions without clips; methods that train on none take --prompts")
    if missing:
        raise UserError(f"data.path: columns {', '.join(missing)} are missing in {file}; expected FastVideo's t2v")


def _check_types(file: Path, schema: pa.Schema) -> None:
    """Raise UserError for a column of another type than FastVideo's; texts and bytes may be large or dictionaries."""
    for name in ("caption", *LATENT, *TEXT):
        if name in schema.names:
            if schema.names.count(name) > 1:
                raise UserError(f"data.path: {file} has several columns {name}")
            own, expected = schema.field(name).type, T2V.field(name).type
            if not (own == expected or _alike(own, expected)):
                raise UserError(f"data.path: {file}: column {name} holds {own}, expected {expected}")


def _alike(own: pa.DataType, expected: pa.DataType) -> bool:
    kinds = pa.types
    if kinds.is_string(expected):
        return is_text(own)
    if kinds.is_binary(expected):
        return bool(kinds.is_large_binary(own) or kinds.is_binary_view(own))
    is_list = kinds.is_list(own) or kinds.is_large_list(own) or kinds.is_fixed_size_list(own)
    return bool(is_list and kinds.is_integer(own.value_type))


def _check_no_nulls(file: Path, metadata: pq.FileMetaData) -> None:
    """Raise UserError for latents that are null, as far as the footer tells."""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for column in (group.column(i) for i in range(group.num_columns)):
            statistics = column.statistics if column.path_in_schema == LATENT[0] else None
            if statistics is not None and statistics.has_null_count and statistics.null_count:
                raise UserError(
                    f"data.path: {file}: row group {number + 1}: {LATENT[0]} is null in {statistics.null_count} rows"
                )


def _fault(row: Mapping[str, Any], latent_shape: Shape) -> str:
    """Say what is wrong with a row, as far as caption, shape and type tell."""
    caption, (shape, dtype) = row["caption"], (row[name] for name in LATENT[1:])
    if not isinstance(caption, str) or not caption.strip():
        return "has no caption"
    if fault := unreadable(caption):
        return f"has a caption that {fault}"
    if tuple(shape or ()) != latent_shape:
        return f"has latents {tuple(shape or ())}, the run's video.* settings make {latent_shape}"
    return "" if dtype in FLOATS else f"has latents of type {dtype}, not {', '.join(FLOATS)}"


def _is_text(shape: Sequence[int]) -> bool:
    return len(shape) == 2 and all(size is not None and size > 0 for size in shape)


def _row_groups(file: Path, metadata: pq.FileMetaData) -> Iterator[RowGroup]:
    first = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        parts = [group.column(i) for i in range(group.num_columns)]
        size = sum(p.total_uncompressed_size for p in parts if p.path_in_schema.split(".")[0] in (*LATENT, *TEXT))
        if group.num_rows:
            yield RowGroup(file, number, first, group.num_rows, size)
        first += group.num_rows


def _place(file: Path, row: int, identity: object) -> str:
    return f"{file}: row {row + 1} ({identity!r})"
