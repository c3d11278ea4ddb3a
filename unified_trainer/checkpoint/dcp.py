"""Checkpoints: torch DCP shards in safetensors, complete or not there at all.

`RUN/checkpoints/step_N` holds a folder for each kind of state of each role (`student/weights`, `student/ema`), so that
who wants one kind reads one folder, and the manifest.
"""

import errno
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from unified_trainer.checkpoint import manifest
from unified_trainer.checkpoint.manifest import CheckpointError, Manifest, Spec, damage, find, newest_sound
from unified_trainer.parallel.mesh import Mesh

__all__ = ["CheckpointError", "DiskFull", "Spec", "damage", "find", "load", "newest_sound", "save", "trained_sampler"]

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
HEADERS = 2**20  # bytes that a checkpoint may take beyond its tensors
T = TypeVar("T")


class DiskFull(CheckpointError):
    """There is no space for a checkpoint; what was there before is untouched."""


def save(
    root: Path, step: int, tensors: Mapping[str, Tensor], mesh: Mesh, metadata: Mapping[str, Any] | None = None
) -> Path:
    """Write `root/step_N` through a temporary folder whose manifest, with the metadata, comes last.

    When a rank fails, CheckpointError (DiskFull, if that is why) on every rank, and nothing is left behind.
    """
    folder, building = root / f"step_{step}", root / f".step_{step}.tmp"
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    _on_main(mesh, root, lambda: _make_room(root, building, size))
    try:
        for kind, part in _by_kind(tensors).items():
            _write(building / kind, part, mesh)
        mesh.barrier()
        files = _all_or_none(mesh, root, lambda: _on_disk(building, mesh))
        checksums = manifest.checksums(files, mesh)
        known = {"version": manifest.VERSION, "step": step, "ranks": mesh.size, "sampler": None, **(metadata or {})}
        _on_main(mesh, root, lambda: _finish(building, folder, known, dict(zip(files, checksums, strict=True))))
    except Exception:
        if mesh.is_main:
            shutil.rmtree(building, ignore_errors=True)
        raise
    return folder


def trained_sampler(spec: str | Path) -> dict[str, Any] | None:
    """The sampler that a checkpoint's student was made for, if for one."""
    return find(spec)[1]["sampler"]


def load(folder: Path, tensors: Mapping[str, Tensor], mesh: Mesh) -> None:
    """Fill the given tensors in place, reading only the kinds of state that they are of.

    CheckpointError, before any is filled, names keys that the checkpoint lacks or holds in another shape.
    """
    for kind, part in _by_kind(tensors).items():
        held = shapes(folder, kind)
        missing = sorted(part.keys() - held.keys())
        if missing:
            raise CheckpointError(
                f"{folder} lacks {len(missing)} tensors, first {missing[0]}: another model or setting"
            )
        for key, tensor in part.items():
            if held[key] != tensor.shape:
                raise CheckpointError(f"{folder}: {key} is {tuple(held[key])} there, {tuple(tensor.shape)} in this run")
    for kind, part in _by_kind(tensors).items():
        _no_advice()
        dcp.load(part, storage_reader=HuggingFaceStorageReader(str(folder / kind)), no_dist=mesh.size == 1)


def shapes(folder: Path, kind: str) -> dict[str, torch.Size]:
    """The tensors of one kind of state (`student/weights`) in a checkpoint; none if it has no such kind."""
    if not (folder / kind).is_dir():
        return {}
    try:
        held = HuggingFaceStorageReader(str(folder / kind)).read_metadata().state_dict_metadata
    except SafetensorError as error:
        raise CheckpointError(f"{folder / kind} is damaged ({error})") from error
    return {key: metadata.size for key, metadata in held.items()}


def _by_kind(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """`student/weights/proj.bias` is of kind `student/weights`."""
    kinds: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        kinds.setdefault("/".join(key.split("/")[:2]), {})[key] = tensor
    return kinds


def _make_room(root: Path, building: Path, size: int) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for left_over in root.glob(".step_*"):  # of a process that was killed
        shutil.rmtree(left_over)
    free = shutil.disk_usage(root).free
    if free < size + HEADERS:
        raise OSError(errno.ENOSPC, f"{(size + HEADERS) / 2**20:.1f} MiB needed, {free / 2**20:.1f} MiB free")
    building.mkdir()


def _write(folder: Path, tensors: dict[str, Tensor], mesh: Mesh) -> None:
    _no_advice()
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save(tensors, storage_writer=writer, no_dist=mesh.size == 1, process_group=mesh.control_group)
    except CheckpointException as failed:  # the same on all ranks
        error = next(iter(failed.failures.values()))[0]
        if not isinstance(error, OSError):
            raise error from failed
        raise _named(folder, error) from failed


def _on_disk(building: Path, mesh: Mesh) -> list[Path]:
    """All files of all ranks, this rank's share of them synced."""
    files = sorted(file for file in building.rglob("*") if file.is_file())
    for path in (*files[mesh.rank :: mesh.size], *sorted({file.parent for file in files})):
        _sync(path)
    return files


def _finish(building: Path, folder: Path, known: Manifest, checksums: Mapping[Path, int]) -> None:
    """The manifest, and then the folder's name; no other rank looks into it meanwhile."""
    files = {str(f.relative_to(building)): {"bytes": f.stat().st_size, "crc32": crc} for f, crc in checksums.items()}
    file = building / manifest.FILE
    file.write_text(manifest.as_text({**known, "files": files}), encoding="utf-8")
    _sync(file)
    _sync(building)
    replaced = folder.with_name(f".{folder.name}.old")
    if folder.exists():  # a damaged one that a resumed run passed over
        folder.rename(replaced)
    building.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _on_main(mesh: Mesh, where: Path, work: Callable[[], None]) -> None:
    _all_or_none(mesh, where, work if mesh.is_main else lambda: None)


def _all_or_none(mesh: Mesh, where: Path, work: Callable[[], T]) -> T:
    """What `work` gives on this rank; if the disk fails it on any rank, an error on all of them."""
    error = None
    try:
        done = work()
    except OSError as caught:
        error = _named(where, caught)
    mine = 0 if error is None else 2 if isinstance(error, DiskFull) else 1
    worst = int(mesh.max(mine))
    if error is None and worst:
        error = (CheckpointError, DiskFull)[worst - 1](f"{where}: another rank could not write its part")
    if error is not None:
        raise error
    return done


def _named(where: Path, error: OSError) -> CheckpointError:
    if error.errno in NO_SPACE:
        return DiskFull(f"no space for a checkpoint in {where} ({error.strerror})")
    return CheckpointError(f"{error.filename or where} cannot be written ({error.strerror or error})")


def _no_advice() -> None:
    """DCP warns that a single process is a single process."""
    warnings.filterwarnings("ignore", message=".*torch.distributed is disabled")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
