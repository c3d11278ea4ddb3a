"""Run directories made from mirrors: whole for --resume ADDRESS, or without weights for what lists runs."""

from pathlib import Path

import torch

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.terminal import say
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.run.checkpoint import dcp, manifest, mirror
from unified_trainer.run.checkpoint.mirror import CHECKPOINTS, CONFIG, OWNER
from unified_trainer.run.checkpoint.remote_folder import RemoteFolder
from unified_trainer.run.checkpoint.run_lock import claimed

ALONE = Mesh(torch.device("cpu"))


def restore(address: str, output: Path | None) -> Path:
    """Copy a mirror's newest complete checkpoint, and those that its run had besides, into a run directory; return it.

    That is `output`, or runs/NAME after the end of the address. UserError for an address without a complete checkpoint,
    and for a directory that holds another run or newer steps. A copy that was cut off is completed by the next call.
    """
    remote = RemoteFolder(address, "--resume")
    folder = output or Path("runs", remote.shown.rstrip("/").rpartition("/")[2])
    steps = [step for step in mirror.steps_in(remote) if mirror.listed(remote, step) is not None]
    if remote.read(CONFIG) is None or not steps:
        raise UserError(f"--resume {remote.shown} holds no complete copy of a run")
    with claimed(folder, ALONE):
        if _is_there(remote, steps[-1], folder):
            return folder
        mirror.write(folder / OWNER, remote.read(OWNER) or b"{}")
        while (fault := _fetch(remote, steps[-1], folder)) is not None:
            say(f"skipped step {steps.pop()} of {remote.shown}: {fault}")
            if not steps:
                raise UserError(f"--resume {remote.shown} holds no complete checkpoint")
        kept = mirror.record_in(remote.read(f"{CHECKPOINTS}/step_{steps[-1]}/{mirror.KEPT}"))
        for step in steps[:-1]:
            if str(step) in kept and (fault := _fetch(remote, step, folder)) is not None:
                say(f"skipped step {step} of {remote.shown}: {fault}")
        _write_beside(remote, folder)
    say(f"step {steps[-1]} of {remote.shown} is copied into {folder}")
    return folder


def outline(address: str, to: Path) -> None:
    """Copy the runs of an address, or of folders below it, without weights: settings, metrics and newest manifest."""
    remote = RemoteFolder(address, "runs")
    if CONFIG not in (names := remote.names()):
        for name in names:
            outline(f"{address.rstrip('/')}/{name}", to / name)
        return
    _write_beside(remote, to)
    for step in reversed(mirror.steps_in(remote)):
        if (text := remote.read(place := f"{CHECKPOINTS}/step_{step}/{manifest.FILE}")) is not None:
            mirror.write(to / place, text)
            return


def _is_there(remote: RemoteFolder, newest: int, folder: Path) -> bool:
    """Return whether the directory holds the newest step of the mirror; UserError for another run, or newer steps."""
    if not any((folder / name).exists() for name in (CONFIG, CHECKPOINTS)):
        return False
    owner = mirror.record_in(remote.read(OWNER)).get("run")
    if owner is None or mirror.record_in(mirror.read(folder / OWNER)).get("run") != owner:
        raise UserError(f"{folder} holds another run than --resume {remote.shown}: name another folder with --output")
    own = [path for path in manifest.folders(folder / CHECKPOINTS) if manifest.read(path)[1] is None]
    step = manifest.step_of(own[-1]) if own else -1
    if step > newest:
        raise UserError(
            f"{folder} is at step {step}, and --resume {remote.shown} at step {newest}: continue the newer one with "
            f"--resume {folder}, or name another folder with --output"
        )
    same = step == newest and manifest.read(own[-1])[0]["files"] == mirror.listed(remote, newest)
    return same and (folder / CONFIG).exists()


def _fetch(remote: RemoteFolder, step: int, folder: Path) -> str | None:
    """Copy a checkpoint into a run directory unless it is there; return what is wrong with it, or None."""
    name, root = f"step_{step}", folder / CHECKPOINTS
    building, files = root / f".{name}.tmp", mirror.listed(remote, step) or {}
    mirror.write(building / manifest.FILE, remote.read(f"{CHECKPOINTS}/{name}/{manifest.FILE}") or b"")
    for file, entry in files.items():
        (building / file).parent.mkdir(parents=True, exist_ok=True)
        try:
            remote.fetch(f"{CHECKPOINTS}/{name}/{file}", building / file, entry["bytes"])
        except FileNotFoundError:
            return f"{file} is missing"
    if fault := manifest.damage(building, ALONE):
        return fault
    if (root / name).exists():
        dcp.remove(root / name)
    building.rename(root / name)
    return None


def _write_beside(remote: RemoteFolder, folder: Path) -> None:
    """Copy the files of a run besides its checkpoints; config.yaml, which makes the folder a run, comes last."""
    for name in mirror.BESIDE:
        if (content := remote.read(name)) is not None:
            mirror.write(folder / name, content)
