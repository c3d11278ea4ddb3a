"""Litter of a run directory: what a killed process leaves there. The next process that holds the lock removes it."""

import shutil
from contextlib import suppress
from pathlib import Path

from unified_trainer.run.checkpoint import manifest

BUILDING = tuple(
    f"{name}.tmp" for name in ("config", "environment", "metrics", "mirror", "report", "swanlab", "wandb")
)  # files that were being written anew
PROBES = ".lock.now.*"  # files that tell the file system's time


def litter(folder: Path) -> list[Path]:
    """Return the unfinished files and checkpoints of a run directory."""
    files = [folder / name for name in BUILDING if (folder / name).exists() or (folder / name).is_symlink()]
    return [*files, *sorted(folder.glob(PROBES)), *manifest.unfinished(folder / "checkpoints")]


def remove_litter(paths: list[Path]) -> None:
    """Remove files, folders and links, of which no target is touched; what cannot be removed stays."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)  # NFS keeps files that another process has open
        else:
            with suppress(OSError):
                path.unlink()
