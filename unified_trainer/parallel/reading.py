"""Reading safetensors files into tensors that may be sharded."""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException

from unified_trainer.errors import UserError
from unified_trainer.parallel.mesh import Mesh


def fill(tensors: Mapping[str, Tensor], folder: Path, mesh: Mesh) -> None:
    """Fill the tensors in place, by name, from a folder's safetensors files; each rank reads only its own shards.

    All ranks must call it. Raises UserError on all of them if a file cannot be read.
    """
    reader = HuggingFaceStorageReader(str(folder))
    try:
        with warnings.catch_warnings():
            # torch warns that a single process is not distributed.
            warnings.filterwarnings("ignore", message=".*torch.distributed is disabled")
            dcp.load(dict(tensors), storage_reader=reader, no_dist=mesh.size == 1)
    except CheckpointException as failed:
        error = next(iter(failed.failures.values()))[0]
        if isinstance(error, SafetensorError | OSError):
            raise UserError(f"{folder} cannot be read ({error}): fetch or write it again") from failed
        raise error from failed
