"""Checkpoints: torch DCP shards in safetensors, complete or not there at all."""

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from unified_trainer.parallel.mesh import Mesh

MANIFEST = "manifest.json"
VERSION = 1


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file and the way out."""


def save(root: Path, step: int, tensors: dict[str, Tensor], mesh: Mesh, keep: int) -> Path:
    """Write `root/step_N` through a temporary folder whose manifest comes last; older ones than `keep` go."""
    folder, building = root / f"step_{step}", root / f".step_{step}.tmp"
    if mesh.is_main:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(building, ignore_errors=True)
    mesh.barrier()
    writer = HuggingFaceStorageWriter(str(building), save_distributed=True)
    with _without_advice():
        dcp.save(tensors, storage_writer=writer, no_dist=mesh.size == 1)
    mesh.barrier()
    if mesh.is_main:
        sizes = {file.name: file.stat().st_size for file in sorted(building.iterdir())}
        manifest = {"version": VERSION, "step": step, "files": sizes}
        (building / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for file in building.iterdir():
            _sync(file)
        _sync(building)
        shutil.rmtree(folder, ignore_errors=True)
        building.rename(folder)
        _sync(root)
        for old in _folders(root)[:-keep]:
            shutil.rmtree(old)
    mesh.barrier()
    return folder


def newest(run: Path) -> tuple[Path, dict[str, Any]]:
    """The newest complete checkpoint of a run directory and its manifest; CheckpointError lists what was wrong."""
    skipped = []
    for folder in reversed(_folders(run / "checkpoints")):
        fault = _fault(folder)
        if fault is None:
            return folder, json.loads((folder / MANIFEST).read_text())
        skipped.append(f"{folder.name}: {fault}")
    why = "; ".join(skipped) if skipped else f"no step_N folder in {run / 'checkpoints'}"
    raise CheckpointError(f"{run} holds no complete checkpoint ({why})")


def contract(run: Path | str) -> dict[str, Any] | None:
    """The sampler that the newest checkpoint of a run was made for, if for one."""
    return newest(Path(run))[1].get("sampler")


def load(folder: Path, tensors: dict[str, Tensor], mesh: Mesh) -> None:
    """Fill the given tensors in place; CheckpointError names keys the checkpoint lacks or holds in another shape."""
    reader = HuggingFaceStorageReader(str(folder))
    held = reader.read_metadata().state_dict_metadata
    missing = sorted(tensors.keys() - held.keys())
    if missing:
        raise CheckpointError(f"{folder} lacks {len(missing)} tensors, first {missing[0]}: another model or setting")
    for key, tensor in tensors.items():
        if held[key].size != tensor.shape:
            raise CheckpointError(
                f"{folder}: {key} is {tuple(held[key].size)} there, {tuple(tensor.shape)} in this run"
            )
    with _without_advice():
        dcp.load(tensors, storage_reader=reader, no_dist=mesh.size == 1)


def _folders(root: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    found = [path for path in root.glob("step_*") if path.is_dir() and path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def _fault(folder: Path) -> str | None:
    """What makes this checkpoint incomplete, or None."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        version, sizes = manifest["version"], manifest["files"]
    except (OSError, json.JSONDecodeError, KeyError) as error:
        return f"{MANIFEST} unreadable ({error!r})"
    if version != VERSION:
        return f"format version {version}, this program reads {VERSION}"
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            return f"{name} is missing or not {size} bytes long"
    return None


@contextmanager
def _without_advice() -> Iterator[None]:
    """DCP warns that a single process is a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled")
        yield


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
