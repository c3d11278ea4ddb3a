"""Reading safetensors files into tensors that may be sharded."""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader

from unified_trainer.parallel.mesh import Mesh


def fill(tensors: Mapping[str, Tensor], folder: Path, mesh: Mesh) -> None:
    """Fill the tensors in place from a folder's files by name, each rank reading its own shards and no more."""
    with warnings.catch_warnings():
        # Said of a single process, and true of it.
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled")
        dcp.load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=mesh.size == 1)
