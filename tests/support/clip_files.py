"""Parquet files of clips in FastVideo's layout, as its preprocessing writes them."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from helpers import LATENT_SHAPE

from unified_trainer.data.fastvideo import TEXT_ENCODER

RAW = torch.randn(3, *LATENT_SHAPE, generator=torch.Generator().manual_seed(4))


def tensors(name: str, values: list[torch.Tensor]) -> dict[str, list]:
    """Return the three columns of a tensor."""
    arrays = [value.numpy() for value in values]
    return {
        f"{name}_bytes": [array.tobytes() for array in arrays],
        f"{name}_shape": [list(array.shape) for array in arrays],
        f"{name}_dtype": [str(array.dtype) for array in arrays],
    }


def write_clips(
    file: Path, latents=RAW, text=None, encoder: str = "", rows: int = 100, compression="zstd", **columns
) -> Path:
    """Write a file of kind t2v; `rows` are those of a row group, and a column of None is left out."""
    captions = [f"caption {i}" for i in range(len(latents))]
    table = {"id": [f"clip{i}" for i in range(len(latents))], "caption": captions} | tensors("vae_latent", [*latents])
    table |= tensors("text_embedding", text) if text else {}
    table = {key: value for key, value in (table | columns).items() if value is not None}
    named = {TEXT_ENCODER: encoder} if encoder else {}
    options = {"compression": compression, "row_group_size": rows, "write_page_checksum": True}
    pq.write_table(pa.table(table, metadata=named or None), file, **options)
    return file
