"""Reading safetensors files into tensors that may be sharded."""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import is_weights
from unified_trainer.parallel.mesh import Mesh


class _Files(FileSystem):
    """The files of a folder without hidden ones, or the one of a name."""

    only = ""

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return [file for file in super().ls(path) if is_weights(Path(file)) and self.only in ("", Path(file).name)]


def _reader(folder: Path, only: str = "") -> HuggingFaceStorageReader:
    reader = HuggingFaceStorageReader(str(folder))
    reader.fs = _Files()
    reader.fs.only = only
    return reader


def shapes_in(folder: Path) -> dict[str, torch.Size]:
    """Return name and shape of the tensors in a folder's safetensors files, from their headers.

    Raises UserError if a file cannot be read.
    """
    try:
        held = _reader(folder).read_metadata().state_dict_metadata
    except (SafetensorError, OSError) as error:
        raise _unreadable(folder, error) from error
    return {key: metadata.size for key, metadata in held.items()}


def fill(
    tensors: Mapping[str, Tensor], folder: Path, mesh: Mesh, files: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Fill the tensors in place, by name, from a folder's safetensors files; each rank reads only its own shards.

    `files` names the file of each tensor that several files hold. All ranks must call it. Raises UserError on all of
    them if a file cannot be read.
    """
    shapes_in(folder)  # because dcp.load hides why a header cannot be read
    homes = {key: files.get(key, "") for key in tensors}
    for file in sorted(set(homes.values())) or [""]:
        _fill({key: tensor for key, tensor in tensors.items() if homes[key] == file}, folder, mesh, file)


def _fill(tensors: dict[str, Tensor], folder: Path, mesh: Mesh, file: str) -> None:
    try:
        with warnings.catch_warnings():
            # torch warns that a single process is not distributed.
            warnings.filterwarnings("ignore", message=".*torch.distributed is disabled")
            dcp.load(tensors, storage_reader=_reader(folder, file), no_dist=mesh.size == 1)
    except CheckpointException as failed:
        error = next(iter(failed.failures.values()))[0]
        if isinstance(error, SafetensorError | OSError):
            raise _unreadable(folder, error) from failed
        raise error from failed


def _unreadable(folder: Path, error: Exception) -> UserError:
    return UserError(f"{folder} cannot be read ({error}): a file is missing or damaged, fetch or write it again")
