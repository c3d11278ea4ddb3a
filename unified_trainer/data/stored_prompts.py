"""Files of prompts with their text embeddings (FastVideo's kind text_only), which are used in place of encoding."""

from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.errors import NotFiniteError, UserError
from unified_trainer.data.fastvideo import FLOATS, TEXT_ENCODER, columns_of
from unified_trainer.models.base import Codec
from unified_trainer.parallel.mesh import Mesh

Embedding = Float[Tensor, "n d"]
TEXT = columns_of("text_embedding")


def parquet_files(path: Path) -> list[Path]:
    """Return the parquet files of a folder and those below it, in the order of their names; or the path, if it is one.

    Other paths have none.
    """
    if path.is_dir():
        return sorted(path.rglob("*.parquet"))
    return [path] if path.suffix == ".parquet" else []


def use_stored_prompts(path: Path, key: str, wanted: Collection[str], codec: Codec, mesh: Mesh) -> str:
    """Give the codec the embeddings that files hold for these prompts, if the run's text encoder made them.

    A collective: each rank reads a share of the row groups. Return what was done in words; "" for a path without
    embeddings. `key` is the setting that names the path. Raise UserError, naming file and row, for damage.
    """
    holding = {file: pq.read_schema(file) for file in parquet_files(path)}
    holding = {file: schema for file, schema in holding.items() if {"caption", *TEXT} <= {*schema.names}}
    if not holding:
        return ""
    own = codec.text_fingerprint.encode()
    fitting = [file for file, schema in holding.items() if (schema.metadata or {}).get(TEXT_ENCODER.encode()) == own]
    left = set(wanted)
    for number, (file, group) in enumerate(_row_groups(fitting)):
        if number % mesh.size == mesh.rank:
            for caption, embedding in _embeddings(file, group, key, left, codec.text_width):
                codec.remember(caption, embedding)
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


def _embeddings(
    file: Path, group: int, key: str, wanted: Collection[str], width: int
) -> Iterator[tuple[str, Embedding]]:
    """Yield caption and embedding of `width` channels, without padding, of the rows whose captions are wanted."""
    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as opened:
            rows = opened.read_row_group(group, columns=["caption", *TEXT]).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{key}: {file} is damaged in row group {group + 1} ({error})") from error
    for number, row in enumerate(rows, 1):
        caption = str(row["caption"]).strip()
        if caption not in wanted:
            continue
        place = f"{key}: {file}: row {number} of row group {group + 1} ({caption!r})"
        data, shape, dtype = (row[name] for name in TEXT)
        try:
            values = np.frombuffer(data, np.dtype(dtype)).reshape(shape).astype(np.float32)
        except (TypeError, ValueError) as error:
            raise UserError(f"{place} is damaged: {TEXT[0]} ({error})") from error
        if dtype not in FLOATS or values.ndim != 2 or values.shape[1] != width:
            raise UserError(
                f"{place} has a text embedding of type {dtype} and shape {[*values.shape]}; expected "
                f"{' or '.join(FLOATS)} and [tokens, {width}]"
            )
        if not np.isfinite(values).all():
            raise NotFiniteError(f"{place}: {TEXT[0]} holds a value that is not finite")
        tokens = np.flatnonzero(values.any(1))
        yield caption, torch.from_numpy(values[: tokens[-1] + 1 if len(tokens) else 1].copy())
