"""What makes a checkpoint whole: a manifest with the size and the checksum of every file, its own included."""

import json
import re
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unified_trainer.parallel.mesh import Mesh

FILE = "manifest.json"
VERSION = 2
CHUNK = 2**24  # bytes read at a time for a checksum
Manifest = dict[str, Any]


class CheckpointError(ValueError):
    """A checkpoint that cannot be used or written; the message names the file and the way out."""


class Spec(NamedTuple):
    """RUN[@step][:ema], taken apart."""

    run: Path
    step: int | None  # None is the newest
    averaged: bool  # the averaged weights in place of the weights

    @classmethod
    def of(cls, text: str | Path) -> "Spec":
        """A folder that is there under the whole name is what is meant, whatever is in the name."""
        parts = re.fullmatch(r"(?P<run>.+?)(?:@(?P<step>\d+))?(?P<ema>:ema)?", str(text))
        if parts is None or Path(text).is_dir():
            return cls(Path(text), None, False)
        return cls(Path(parts["run"]), int(parts["step"]) if parts["step"] else None, bool(parts["ema"]))


def find(spec: str | Path) -> tuple[Path, Manifest]:
    """Folder and manifest of RUN, its newest complete checkpoint, or RUN@step; CheckpointError names what there is."""
    run, step, _ = Spec.of(spec)
    if step is None:
        return _first_of(run, [], lambda folder: None)
    folder = run / "checkpoints" / f"step_{step}"
    if not folder.is_dir():
        have = ", ".join(str(step_of(path)) for path in folders(run / "checkpoints"))
        raise CheckpointError(f"{run} has no checkpoint of step {step}" + (f"; it has {have}" if have else ""))
    manifest, fault = read(folder)
    if fault:
        raise CheckpointError(f"{folder} is not complete: {fault}")
    return folder, manifest


def newest_sound(run: Path, mesh: Mesh) -> tuple[Path, Manifest, list[str]]:
    """The newest complete one whose checksums hold, and which were skipped for what; all ranks read their share."""
    skipped: list[str] = []
    return *_first_of(run, skipped, lambda folder: damage(folder, mesh)), skipped


def folders(root: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    found = [path for path in root.glob("step_*") if path.is_dir() and path.name[5:].isdigit()]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    return int(folder.name[5:])


def damage(folder: Path, mesh: Mesh, kinds: Iterable[str] | None = None) -> str | None:
    """The first file, of these kinds of state, whose bytes are not those that were written; all ranks agree on it."""
    manifest, fault = read(folder)
    if fault:
        return fault
    wanted = None if kinds is None else set(kinds)
    names = [name for name in manifest["files"] if wanted is None or name.rpartition("/")[0] in wanted]
    found = checksums([folder / name for name in names], mesh)
    for name, checksum in zip(names, found, strict=True):
        if checksum != manifest["files"][name]["crc32"]:
            return f"{name} is damaged, its checksum is not the manifest's"
    return None


def read(folder: Path) -> tuple[Manifest, str | None]:
    """The manifest, and what makes this checkpoint incomplete; CheckpointError when a newer program wrote it."""
    try:
        text = (folder / FILE).read_text(encoding="utf-8")
        manifest = json.loads(text)
        version, files = manifest["version"], manifest["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return {}, f"{FILE} unreadable ({error!r})"
    if version == 1:
        return {}, f"format version 1, this program reads {VERSION}"
    if text != as_text({key: value for key, value in manifest.items() if key != "crc32"}):
        return {}, f"{FILE} is damaged, its checksum is not its own"
    if version != VERSION:
        raise CheckpointError(f"{folder} has format version {version}, this program reads {VERSION}: update it")
    found = {str(f.relative_to(folder)): f.stat().st_size for f in folder.rglob("*") if f.is_file()}
    for name, entry in files.items():
        if found.get(name) != entry["bytes"]:
            return {}, f"{name} is missing or not {entry['bytes']} bytes long"
    strange = sorted(found.keys() - files.keys() - {FILE})
    return manifest, f"{strange[0]} does not belong to it" if strange else None


def as_text(manifest: Manifest) -> str:
    """The manifest as it is written, its own checksum at the end."""
    checksum = zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
    return json.dumps({**manifest, "crc32": checksum}, indent=1)


def checksums(files: list[Path], mesh: Mesh) -> list[int]:
    """CRC-32 of every file, each rank reading its share; -1, which no checksum is, for one that cannot be read."""
    own = torch.zeros(1, len(files), dtype=torch.int64)
    for i in range(mesh.rank, len(files), mesh.size):
        own[0, i] = _crc32(files[i])
    return mesh.all_gather_cpu(own).sum(0).tolist()


def _crc32(file: Path) -> int:
    checksum = 0
    try:
        with file.open("rb") as opened:
            while chunk := opened.read(CHUNK):
                checksum = zlib.crc32(chunk, checksum)
    except OSError:
        return -1
    return checksum


def _first_of(run: Path, skipped: list[str], fault_of: Callable[[Path], str | None]) -> tuple[Path, Manifest]:
    """The newest complete checkpoint that has no other fault; what is passed over is added to `skipped`."""
    for folder in reversed(folders(run / "checkpoints")):
        manifest, fault = read(folder)
        fault = fault or fault_of(folder)
        if fault is None:
            return folder, manifest
        skipped.append(f"{folder.name}: {fault}")
    why = "; ".join(skipped) if skipped else f"no step_N folder in {run / 'checkpoints'}"
    raise CheckpointError(f"{run} holds no complete checkpoint ({why})")
