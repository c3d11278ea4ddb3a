"""The manifest of a checkpoint: its metadata, and size and checksum of every file.

A checkpoint is complete if the files of its manifest are there in their sizes. Other files are ignored, such as those
that a file browser or NFS leaves, unless they would be read as weights.
"""

import json
import re
import shutil
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import is_weights, read_text
from unified_trainer.basics.suggestions import must_know
from unified_trainer.parallel.mesh import Mesh

FILE = "manifest.json"
VERSION = 2
CHUNK = 2**24  # bytes read at a time for a checksum
UNREADABLE = -1  # in place of a checksum
STEP = re.compile(r"step_(0|[1-9][0-9]*)")
STOPPED_BY = "stopped_by"  # key: the guard that ended the run after this step, or None
NOISE = "noise_generator"  # key: what draws the noise of training steps; missing before there was a choice
POSITION = "position"  # key: the loader's `Position`; missing in checkpoints of earlier versions
VALIDATION_PENDING = "validation_pending"  # key: the checkpoint was saved before the validation of its step
VALIDATION_STARTED = "validation_started"  # key: an earlier step whose validation has not taken effect yet, or None
# Of a run directory: files that were being written anew, and files that tell the file system's time.
BUILDING = ("config", "environment", "metrics", "mirror", "report", "swanlab", "wandb")
PROBES = ".lock.now.*"
Manifest = dict[str, Any]  # version, step, ranks, files, crc32, and the metadata that the run gave


class CheckpointError(UserError):
    """A checkpoint cannot be read or written; the message names the file and what to do instead."""


class Spec(NamedTuple):
    """The parts of a checkpoint's name, RUN[@step][:ema]."""

    run: Path  # run directory
    step: int | None  # None: the newest complete checkpoint
    ema: bool  # read the EMA weights where a role has them

    @classmethod
    def of(cls, text: str | Path) -> "Spec":
        """Parse RUN[@step][:ema]; an existing folder with the whole text as its name is taken as RUN."""
        parts = re.fullmatch(r"(?P<run>.+?)(?:@(?P<step>[0-9]+))?(?P<ema>:ema)?", str(text))
        if parts is None or Path(text).is_dir():
            return cls(Path(text), None, False)
        place, _, kind = parts["run"].rpartition(":")
        if any(Path(run).is_dir() for run in (place, place.rpartition("@")[0]) if run) and "/" not in kind:
            must_know(f"{text}: the kind of weights", kind, ["ema"])
        return cls(Path(parts["run"]), int(parts["step"]) if parts["step"] else None, bool(parts["ema"]))


def find(spec: str | Path) -> tuple[Path, Manifest]:
    """Return folder and manifest of RUN's newest complete checkpoint, or of RUN@step; checksums are not verified.

    Raises CheckpointError, with the steps that exist, if there is none.
    """
    run, step, _ = Spec.of(spec)
    if step is None:
        return _first_of(run, [], lambda folder: None)
    folder = run / "checkpoints" / f"step_{step}"
    if not folder.is_dir():
        have = ", ".join(str(step_of(path)) for path in folders(run / "checkpoints"))
        raise CheckpointError(f"{run} has no checkpoint of step {step}" + (f"; it has {have}" if have else ""))
    metadata, fault = read(folder)
    if fault:
        raise CheckpointError(f"{folder} is not complete: {fault}")
    return folder, metadata


def trained_sampler(spec: str | Path) -> dict[str, Any] | None:
    """Return the sampler settings that a checkpoint's student was trained for, or None if it fits any sampler."""
    return find(spec)[1]["sampler"]


def newest_sound(run: Path, mesh: Mesh) -> tuple[Path, Manifest, list[str]]:
    """Return folder and manifest of the newest checkpoint with correct checksums, and why newer ones were skipped.

    All ranks must call it; each verifies a part of the files. Raises CheckpointError if there is none.
    """
    skipped: list[str] = []
    return *_first_of(run, skipped, lambda folder: damage(folder, mesh)), skipped


def newest_sound_before(run: Path, step: int, mesh: Mesh) -> tuple[Path, Manifest] | None:
    """Return the newest checkpoint of fewer than `step` training steps with correct checksums, or None.

    All ranks must call it.
    """
    for folder in reversed(folders(run / "checkpoints")):
        if step_of(folder) < step and damage(folder, mesh) is None:
            return folder, read(folder)[0]
    return None


def finished(run: Path, steps: int, mesh: Mesh, *, validating: bool) -> bool:
    """Return whether a run's newest checkpoint is of its last step, sound, and validated if the run is `validating`."""
    newest = folders(run / "checkpoints")[-1:]
    if not newest or step_of(newest[0]) != steps or damage(newest[0], mesh) is not None:
        return False
    metadata = read(newest[0])[0]
    return not (validating and (metadata.get(VALIDATION_PENDING, False) or metadata.get(VALIDATION_STARTED)))


def folders(root: Path) -> list[Path]:
    """Return the folders step_N below `root`, lowest step first; their content is not verified."""
    checkpoints = [path for path in root.glob("step_*") if STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(checkpoints, key=step_of)


def unfinished(root: Path) -> list[Path]:
    """Return what a killed process was writing or removing below `root`."""
    return sorted(root.glob(".step_*"))


def litter(folder: Path) -> list[Path]:
    """Return what a killed process leaves in a run directory; the next one that holds its lock removes it."""
    building = [folder / f"{name}.tmp" for name in BUILDING]
    files = [file for file in building if file.exists() or file.is_symlink()]
    return [*files, *sorted(folder.glob(PROBES)), *unfinished(folder / "checkpoints")]


def remove_litter(paths: list[Path]) -> None:
    """Remove files, folders and links, of which no target is touched; what cannot be removed stays."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)  # NFS keeps files that another process has open
        else:
            with suppress(OSError):
                path.unlink()


def step_of(folder: Path) -> int:
    """Return N of a folder step_N."""
    return int(folder.name[5:])


def weights_digest(metadata: Manifest, role: str, *, ema: bool) -> str:
    """Return a checksum of the checksums of a role's files, and of which of its weights are meant; none is read."""
    files = {name: entry for name, entry in metadata["files"].items() if name.startswith(f"{role}/")}
    return digest({f"{role}/{'ema' if ema else 'weights'}": files})


def digest(contents: Manifest) -> str:
    """Return the CRC-32 of plain data, as 8 hexadecimal digits."""
    return f"{zlib.crc32(json.dumps(contents, sort_keys=True).encode()):08x}"


def damage(folder: Path, mesh: Mesh, kinds: Iterable[str] | None = None) -> str | None:
    """Return what is wrong with a checkpoint's files, by their checksums, or None.

    `kinds` limits it to these kinds of state (`student/weights`). All ranks must call it, and get the same answer.
    """
    metadata, fault = read(folder)
    if fault:
        return fault
    wanted = None if kinds is None else set(kinds)
    names = [name for name in metadata["files"] if wanted is None or name.rpartition("/")[0] in wanted]
    present = checksums([folder / name for name in names], mesh)
    for name, checksum in zip(names, present, strict=True):
        if checksum == UNREADABLE:
            return f"{name} cannot be read"
        if checksum != metadata["files"][name]["crc32"]:
            return f"{name} is damaged, its checksum is not the manifest's"
    return None


def read(folder: Path) -> tuple[Manifest, str | None]:
    """Return the manifest, and why the checkpoint is incomplete or None; checksums of other files are not verified.

    With a fault the manifest is empty, unless it is whole and shows by itself that the checkpoint is torn: one of its
    files is missing or has another size. Raises CheckpointError if a newer program wrote it.
    """
    try:
        text = read_text(folder / FILE)
        metadata = json.loads(text)
        version, files = metadata["version"], metadata["files"]
    except (UserError, ValueError, KeyError, TypeError, RecursionError) as error:
        return {}, f"{FILE} unreadable ({error if isinstance(error, UserError) else repr(error)})"
    if version == 1:
        return {}, f"format version 1, this program reads {VERSION}"
    if text != as_text({key: value for key, value in metadata.items() if key != "crc32"}):
        return {}, f"{FILE} is damaged, its own checksum is wrong"
    if version != VERSION:
        raise CheckpointError(f"{folder} has format version {version}, this program reads {VERSION}: update it")
    try:
        torn, foreign = _torn(folder, files), _foreign(folder, files)
    except OSError as error:
        return {}, f"{error.filename or folder} cannot be read ({error.strerror or error})"
    if torn is not None:
        return metadata, f"{torn} is missing or not {files[torn]['bytes']} bytes long"
    if foreign is not None:
        return {}, f"{foreign} is not in {FILE}: remove it"
    return metadata, None


def _torn(folder: Path, files: Manifest) -> str | None:
    """Return the first of the manifest's files that is missing or has another size; OSError if it cannot be told."""
    for name, entry in files.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            return name
        if size != entry["bytes"]:
            return name
    return None


def _foreign(folder: Path, files: Manifest) -> str | None:
    """Return a file that is not the manifest's and would be read as weights; hidden files are not."""
    for kind in sorted({(folder / name).parent for name in files}):
        present = [str(path.relative_to(folder)) for path in kind.iterdir() if is_weights(path)]
        if foreign := sorted(set(present) - files.keys()):
            return foreign[0]
    return None


def as_text(metadata: Manifest) -> str:
    """Return the manifest as JSON text with its own checksum as the last key."""
    checksum = zlib.crc32(json.dumps(metadata, sort_keys=True).encode())
    return json.dumps({**metadata, "crc32": checksum}, indent=1)


def checksums(files: list[Path], mesh: Mesh) -> list[int]:
    """Return the CRC-32 of every file, or UNREADABLE; each rank reads a part of the files."""
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
        return UNREADABLE
    return checksum


def _first_of(run: Path, skipped: list[str], fault_of: Callable[[Path], str | None]) -> tuple[Path, Manifest]:
    """Return the newest complete checkpoint without a fault of `fault_of`; append what was skipped to `skipped`."""
    for folder in reversed(folders(run / "checkpoints")):
        metadata, fault = read(folder)
        fault = fault or fault_of(folder)
        if fault is None:
            return folder, metadata
        skipped.append(f"{folder.name}: {fault}")
    why = "; ".join(skipped) if skipped else f"no step_N folder in {run / 'checkpoints'}"
    raise CheckpointError(f"{run} holds no complete checkpoint ({why})")
