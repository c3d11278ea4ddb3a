"""The format of a checkpoint: torch DCP shards in safetensors. Writes are atomic.

`RUN/checkpoints/step_N` holds the manifest and a folder for each kind of state of each role (`student/weights`,
`student/ema`), so that a reader of one kind opens one folder.
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
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from unified_trainer.basics.errors import NO_SPACE, UserError
from unified_trainer.basics.own_files import without_link
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.reading import fill, shapes_in
from unified_trainer.run.checkpoint import manifest
from unified_trainer.run.checkpoint.manifest import CheckpointError, Manifest, Spec, damage, find, newest_sound

__all__ = ["CheckpointError", "DiskFull", "Spec", "damage", "find", "load", "newest_sound", "save"]

HEADERS = 2**20  # bytes reserved for what a checkpoint holds besides its tensors
T = TypeVar("T")


class DiskFull(CheckpointError):
    """The disk or quota is full; earlier checkpoints are unchanged."""


def save(
    root: Path, step: int, tensors: Mapping[str, Tensor], mesh: Mesh, metadata: Mapping[str, Any] | None = None
) -> Path:
    """Write `root/step_N` and return it; `metadata` goes into the manifest.

    All ranks must call it. Files are written into a temporary folder, the manifest last; renaming the folder completes
    the checkpoint. If a rank fails to write, every rank raises CheckpointError (DiskFull if space ran out) and nothing
    is left behind.
    """
    folder, building = root / f"step_{step}", root / f".step_{step}.tmp"
    size = bytes_needed(tensors)
    _on_main(mesh, root, lambda: _make_room(root, building, size))
    try:
        for kind, part in _by_kind(tensors).items():
            _write(building / kind, part, mesh)
        mesh.barrier()
        files = _all_or_none(mesh, root, lambda: _on_disk(building, mesh))
        checksums = manifest.checksums(files, mesh)
        contents = {"version": manifest.VERSION, "step": step, "ranks": mesh.size, "sampler": None, **(metadata or {})}
        _on_main(mesh, root, lambda: _finish(building, folder, contents, dict(zip(files, checksums, strict=True))))
    except Exception:
        if mesh.is_main:
            shutil.rmtree(building, ignore_errors=True)
        raise
    return folder


def bytes_needed(tensors: Mapping[str, Tensor]) -> int:
    """Return the free bytes that a checkpoint of these tensors takes, of all ranks together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) + HEADERS


def record(root: Path, step: int, metadata: Mapping[str, Any], mesh: Mesh) -> None:
    """Replace metadata in the manifest of a checkpoint, atomically; keys that are not given stay.

    All ranks must call it. Raises CheckpointError on all of them, with the manifest unchanged.
    """
    folder, building = root / f"step_{step}", root / f".step_{step}.json"

    def rewrite() -> None:
        held, fault = manifest.read(folder)
        if fault:
            raise OSError(errno.EIO, fault, str(folder))
        del held["crc32"]
        without_link(building).write_text(manifest.as_text({**held, **metadata}), encoding="utf-8")
        _sync(building)
        building.replace(folder / manifest.FILE)
        _sync(folder)

    _on_main(mesh, root, rewrite)


def load(folder: Path, tensors: Mapping[str, Tensor], mesh: Mesh) -> None:
    """Fill the tensors in place from a checkpoint; only the folders of their kinds of state are read.

    All ranks must call it. Raises CheckpointError, before any tensor is filled, if the checkpoint lacks a key or holds
    it in another shape.
    """
    for kind, part in _by_kind(tensors).items():
        held = shapes(folder, kind)
        missing = sorted(part.keys() - held.keys())
        if missing:
            raise CheckpointError(
                f"{folder} lacks {len(missing)} tensors, first {missing[0]}: it is of another model or other settings"
            )
        for key, tensor in part.items():
            if held[key] != tensor.shape:
                raise CheckpointError(
                    f"{folder}: {key} is {tuple(held[key])} in the checkpoint, {tuple(tensor.shape)} in this run: a "
                    "setting was changed that needs a new run, with --init-from"
                )
    for kind, part in _by_kind(tensors).items():
        fill(part, folder / kind, mesh)


def shapes(folder: Path, kind: str) -> dict[str, torch.Size]:
    """Return name and shape of the tensors of one kind of state (`student/weights`); empty if there are none.

    Raises CheckpointError if a file is damaged.
    """
    if not (folder / kind).is_dir():
        return {}
    try:
        return shapes_in(folder / kind)
    except UserError as error:
        raise CheckpointError(f"{error}, or choose another step with RUN@STEP") from error


def _by_kind(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Group tensors by kind of state: `student/weights/proj.bias` is of kind `student/weights`."""
    kinds: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        kinds.setdefault("/".join(key.split("/")[:2]), {})[key] = tensor
    return kinds


def _make_room(root: Path, building: Path, size: int) -> None:
    root.mkdir(parents=True, exist_ok=True)
    manifest.remove_litter(manifest.unfinished(root))
    free = shutil.disk_usage(root).free
    if free < size:
        raise OSError(errno.ENOSPC, f"{size / 2**20:.1f} MiB needed, {free / 2**20:.1f} MiB free")
    building.mkdir()


def _write(folder: Path, tensors: dict[str, Tensor], mesh: Mesh) -> None:
    # torch warns that a single process is not distributed. catch_warnings is not safe in the Saver's thread.
    warnings.filterwarnings("ignore", message=".*torch.distributed is disabled")
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save(tensors, storage_writer=writer, no_dist=mesh.size == 1, process_group=mesh.control_group)
    except CheckpointException as failed:  # the same on all ranks
        error = next(iter(failed.failures.values()))[0]
        if not isinstance(error, OSError):
            raise error from failed
        raise _named(folder, error) from failed


def _on_disk(building: Path, mesh: Mesh) -> list[Path]:
    """Sync a part of the files of all ranks to disk and return all files."""
    files = sorted(file for file in building.rglob("*") if file.is_file())
    for path in (*files[mesh.rank :: mesh.size], *sorted({file.parent for file in files})):
        _sync(path)
    return files


def _finish(building: Path, folder: Path, contents: Manifest, checksums: Mapping[Path, int]) -> None:
    """Write the manifest, then give the folder its name; other ranks wait."""
    files = {str(f.relative_to(building)): {"bytes": f.stat().st_size, "crc32": crc} for f, crc in checksums.items()}
    file = building / manifest.FILE
    file.write_text(manifest.as_text({**contents, "files": files}), encoding="utf-8")
    _sync(file)
    _sync(building)
    replaced = _hidden(folder)
    if folder.exists():  # a damaged checkpoint that the resumed run skipped
        folder.rename(replaced)
    building.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove(folder: Path) -> None:
    """Remove a checkpoint, under a name that no reader takes for one: a kill leaves no half of it.

    What cannot be removed goes with the next save. Raises CheckpointError if the folder cannot be renamed.
    """
    try:
        shutil.rmtree(folder.rename(_hidden(folder)), ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder} cannot be removed ({error.strerror or error})") from error


def _hidden(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _on_main(mesh: Mesh, where: Path, work: Callable[[], None]) -> None:
    _all_or_none(mesh, where, work if mesh.is_main else lambda: None)


def _all_or_none(mesh: Mesh, where: Path, work: Callable[[], T]) -> T:
    """Return the result of `work` on this rank; if it raises OSError on any rank, raise CheckpointError on all."""
    error = None
    try:
        done = work()
    except OSError as caught:
        error = _named(where, caught)
    severity = 0 if error is None else 2 if isinstance(error, DiskFull) else 1
    worst = int(mesh.max(severity))
    if error is None and worst:
        error = (CheckpointError, DiskFull)[worst - 1](f"{where}: another rank could not write its part")
    if error is not None:
        raise error
    return done


def _named(where: Path, error: OSError) -> CheckpointError:
    if error.errno in NO_SPACE:
        return DiskFull(f"no space for a checkpoint in {where} ({error.strerror})")
    return CheckpointError(f"{error.filename or where} cannot be written ({error.strerror or error})")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
