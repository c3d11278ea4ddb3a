"""Files of prompts with their text embeddings (FastVideo's kind text_only), which are used in place of encoding."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.data.fastvideo import TEXT, TEXT_ENCODER, read_tensor, text_columns, text_columns_in
from unified_trainer.data.folders import files_below
from unified_trainer.models.base import Codec
from unified_trainer.parallel.mesh import Mesh


def parquet_files(path: Path) -> list[Path]:
    """Return the parquet files of a folder and those below it, in the order of their names; or the path, if it is one.

    Other paths have none.
    """
    if path.is_dir():
        return [file for file in files_below(path) if file.suffix == ".parquet"]
    return [path] if path.suffix == ".parquet" else []


def use_stored_prompts(path: Path, key: str, wanted: Collection[str], codec: Codec, mesh: Mesh) -> str:
    """Give the codec the tensors that files hold for these prompts, if the run's text encoder made them.

    A collective: each rank reads a share of the row groups. Return what was done in words; "" for a path without
    embeddings. `key` is the setting that names the path. Raise UserError, naming file and row, for damage.
    """
    columns = text_columns(codec.text_shapes)
    holding = {file: pq.read_schema(file) for file in parquet_files(path)}
    holding = {file: schema for file, schema in holding.items() if {"caption", *TEXT} <= {*schema.names}}
    if not holding:
        return ""
    own, names = codec.text_fingerprint.encode(), {*chain(*columns.values())}
    made = [file for file, schema in holding.items() if (schema.metadata or {}).get(TEXT_ENCODER.encode()) == own]
    fitting = [file for file in made if {*text_columns_in(holding[file])} == names]
    left = set(wanted)
    for number, (file, group) in enumerate(_row_groups(fitting)):
        if number % mesh.size == mesh.rank:
            _use(file, group, key, left, columns, codec)
    mesh.barrier()  # other ranks look for these embeddings
    said = f"text embeddings of {key}: "
    if len(fitting) == len(holding):
        return f"{said}used; the run's text encoder made them"
    other = next(file for file in holding if file not in fitting)
    return f"{said}prompts of {len(holding) - len(fitting)} files are encoded instead; another encoder made {other}"


def _row_groups(files: list[Path]) -> Iterator[tuple[Path, int]]:
    for file in files:
        for group in range(pq.read_metadata(file).num_row_groups):
            yield file, group


def _use(
    file: Path, group: int, key: str, wanted: Collection[str], columns: Mapping[str, Sequence[str]], codec: Codec
) -> None:
    """Give the codec the tensors of the rows whose captions are wanted, matrices without padding."""
    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as opened:
            rows = opened.read_row_group(group, columns=["caption", *chain(*columns.values())]).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{key}: {file} is damaged in row group {group + 1} ({error})") from error
    for number, row in enumerate(rows, 1):
        caption = str(row["caption"]).strip()
        if caption not in wanted:
            continue
        place = f"{key}: {file}: row {number} of row group {group + 1} ({caption!r})"
        read = {name: read_tensor(place, held[0], *(row[x] for x in held)) for name, held in columns.items()}
        try:
            codec.remember(caption, {name: _unpadded(x) for name, x in read.items()})
        except UserError as error:
            raise UserError(f"{place}: {error}") from error


def _unpadded(x: Tensor) -> Tensor:
    """Return a tensor of several axes up to its last row that is not zero, at least one row."""
    if x.ndim < 2:
        return x
    rows = x.flatten(1).any(1).nonzero()
    return x[: int(rows[-1]) + 1 if len(rows) else 1].clone()
