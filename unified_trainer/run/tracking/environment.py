"""The environment of a run: versions, the commit of this package, machine, command and seed."""

import json
import platform
import shlex
import socket
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unified_trainer.basics.own_files import no_follow
from unified_trainer.basics.secrets import masked
from unified_trainer.basics.versions import version_of
from unified_trainer.parallel.device import device_name, driver_versions
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.run.settings.run_paths import ENVIRONMENT, FOLDER

PACKAGES = ("unified-trainer", "torch", "diffusers", "transformers", "accelerate", "peft")
PACKAGE = Path(__file__).parents[2]
GIT_SECONDS = 10  # that git may take, on a slow file system


def note_environment(folder: Path, argv: Sequence[str], seed: int, step: int, mesh: Mesh, learned: str) -> None:
    """Append one JSON object to environment.jsonl: the start of a run, or its continuation after `step` steps.

    `learned` is what the student's pipeline was found to do; "" where its family knows it.
    """
    line = environment(argv, seed, step, mesh) | ({"pipeline": learned} if learned else {})
    with open(folder / ENVIRONMENT, "a", encoding="utf-8", opener=no_follow) as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")


def environment(argv: Sequence[str], seed: int, step: int, mesh: Mesh) -> dict[str, Any]:
    """Return what this process runs on; git's part is null outside a checkout."""
    return {
        "time": datetime.now(UTC).astimezone().isoformat(timespec="seconds"),
        "step": step,
        FOLDER: str(Path.cwd()),
        "command": masked(shlex.join(["python", "-m", "unified_trainer", *argv])),
        "seed": seed,
        "host": socket.gethostname(),
        "device": device_name(mesh.device),
        "ranks": mesh.size,
        "mesh": str(mesh),
        "versions": {"python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}}
        | driver_versions(),
        "git": checkout(PACKAGE),
    }


def checkout(package: Path) -> dict[str, Any] | None:
    """Return the commit that holds this folder of a package, and whether the folder differs from it.

    None where git does not track the folder: an installed package may lie inside a repository of something else.
    """
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit, changes = _git(package, "rev-parse", "HEAD"), _git(package, "status", "--porcelain", "--", ".")
    return None if commit is None or changes is None else {"commit": commit.strip(), "dirty": bool(changes.strip())}


def _git(folder: Path, *words: str) -> str | None:
    """Return what git prints; None if it fails, or is not installed."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
