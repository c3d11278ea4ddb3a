"""Clips encoded by FastVideo's preprocessing: parquet files of kind t2v, each tensor as bytes, shape and dtype."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.errors import MissingFileError, UserError
from unified_trainer.models.base import Codec

LATENT = ("vae_latent_bytes", "vae_latent_shape", "vae_latent_dtype")


class ParquetClips:
    """A source of captions with clean latents, which are read when a batch needs them."""

    def __init__(self, folder: Path, codec: Codec, latent_shape: tuple[int, int, int, int]) -> None:
        files = sorted(str(file) for file in folder.rglob("*.parquet"))
        if not files:
            raise MissingFileError(f"data.path {folder} holds no .parquet files")
        try:
            self._rows = ds.dataset(files, format="parquet")
        except (pa.ArrowInvalid, OSError) as error:
            raise UserError(f"data.path {folder}: a file is not whole parquet ({error})") from error
        missing = [name for name in ("id", "caption", *LATENT) if name not in self._rows.schema.names]
        if missing:
            raise UserError(f"data.path {folder}: columns {', '.join(missing)} are missing; expected FastVideo's t2v")
        try:
            self._captions = self._rows.to_table(["caption"])["caption"].to_pylist()
        except (pa.ArrowInvalid, OSError) as error:
            raise UserError(f"data.path {folder}: a file is damaged ({error})") from error
        self._folder, self._codec, self._latent_shape = folder, codec, latent_shape

    def __len__(self) -> int:
        return len(self._captions)

    def prompt(self, index: int) -> str:
        """Return the caption of a row."""
        return self._captions[index]

    def latents(self, indices: list[int]) -> Float[Tensor, "b c t h w"]:
        """Read raw posterior means and normalise them; raise UserError, naming the row, for one that does not fit."""
        try:
            table = self._rows.take(pa.array(indices), columns=["id", *LATENT])
        except (pa.ArrowInvalid, OSError) as error:
            raise UserError(f"data.path {self._folder}: a file is damaged ({error})") from error
        return self._codec.normalise(torch.stack([self._read(row) for row in table.to_pylist()]))

    def _read(self, row: dict[str, object]) -> Float[Tensor, "c t h w"]:
        data, shape, dtype = (row[name] for name in LATENT)
        if tuple(shape) != self._latent_shape:
            raise UserError(
                f"data.path {self._folder}: row {row['id']!r} has latents {tuple(shape)}, the run's video.* settings "
                f"make {self._latent_shape}"
            )
        try:
            return torch.from_numpy(np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape).astype(np.float32))
        except (TypeError, ValueError) as error:
            raise UserError(f"data.path {self._folder}: row {row['id']!r} is damaged ({error})") from error
