"""The state of a run, read from its directory: whether it runs, how it ended, and its best validation."""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unified_trainer.checkpoint.run_lock import LOCK, WITHOUT_LOCKS
from unified_trainer.reporting.run_folder import VALIDATION, RunRecord

State = Literal["running", "finished", "hacked", "stopped", "failed"]
HACKING = "validation/reward_hacking"
LOWER_IS_BETTER = ("frechet",)


@dataclass(frozen=True)
class Status:
    """How a run stands. `hacked`: the hacking monitor stopped it. `stopped`: its last step is saved.

    `failed`: steps after its last checkpoint are lost, or it was killed.
    """

    state: State
    step: int
    steps: int  # that were asked for
    hacking: tuple[int, ...]  # steps of validations with signs of reward hacking


@dataclass(frozen=True)
class Best:
    """The first, last and best value of a validation metric."""

    name: str  # without the prefix validation/
    first: float
    last: float
    best: float
    best_step: int


def status_of(run: RunRecord) -> Status:
    """Return the state of a run."""
    steps = int(run.config.get("steps", 0))
    alarms = run.curves.get(HACKING)
    hacking = tuple(s for s, v in zip(alarms.steps, alarms.values, strict=True) if v > 0) if alarms else ()
    newest = run.checkpoints[-1] if run.checkpoints else 0
    stopping = run.config.get("hacking_monitor.action") == "stop"
    state: State
    if is_locked(run.folder):
        state = "running"
    elif stopping and alarms is not None and alarms.values[-1] > 0:
        state = "hacked"
    elif steps > 0 and newest >= steps:
        state = "finished"
    elif newest > 0 and newest == run.step and not (run.folder / LOCK).exists():
        state = "stopped"
    else:
        state = "failed"
    return Status(state, run.step, steps, hacking)


def is_locked(folder: Path) -> bool:
    """Whether a process holds the lock of a run directory; the file alone, of a killed process, does not count.

    On a file system without locks, the file alone counts.
    """
    try:
        lock = os.open(folder / LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        return True
    finally:
        os.close(lock)
    return False


def best_of(run: RunRecord, name: str) -> Best | None:
    """Return first, last and best value of a validation metric; None if the run has not measured it.

    The best is the highest value, but for the Frechet distance and where best_metric and best_is say otherwise.
    """
    curve = run.curves.get(f"{VALIDATION}{name}")
    if curve is None:
        return None
    lowest = name in LOWER_IS_BETTER
    if run.config.get("best_metric") == name and name not in LOWER_IS_BETTER:
        lowest = run.config.get("best_is") == "lowest"
    pick = min if lowest else max
    best = pick(range(len(curve.values)), key=lambda i: curve.values[i])
    return Best(name, curve.values[0], curve.values[-1], curve.values[best], curve.steps[best])
