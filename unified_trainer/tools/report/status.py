"""The state of a run, read from its directory: whether it runs, how it ended, and its best validation."""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unified_trainer.run.checkpoint import manifest
from unified_trainer.run.checkpoint.manifest import STOPPED_BY
from unified_trainer.run.checkpoint.run_lock import LOCK, WITHOUT_LOCKS
from unified_trainer.tools.report.run_folder import VALIDATION, RunRecord

State = Literal["running", "finished", "hacked", "collapsed", "stopped", "failed"]
HACKING, ALARM = "validation/reward_hacking", "guard_alarm"
ENDED_BY: dict[str, State] = {"hacking_monitor": "hacked", "guard": "collapsed"}  # state of a run that a guard stopped
LOWER_IS_BETTER = ("frechet", "fvd")


@dataclass(frozen=True)
class Status:
    """How a run stands. `hacked`, `collapsed`: the hacking monitor, or the guard, stopped it. `stopped`: its last step
    is saved.

    `failed`: steps after its last checkpoint are lost, or it was killed.
    """

    state: State
    step: int
    steps: int  # that were asked for
    hacking: tuple[int, ...]  # steps of validations with signs of reward hacking
    rollbacks: int = 0  # times that a guard sent the run back to a checkpoint
    alarms: tuple[int, ...] = ()  # steps of training and validation at which the guard saw the student collapse


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
    hacking, alarms = _raised(run, HACKING), _raised(run, ALARM) + _raised(run, f"{VALIDATION}{ALARM}")
    rollbacks = run.curves.get("rollbacks")
    saves = run.config.get("checkpoint_every") != -1
    newest = run.step if not saves else run.checkpoints[-1] if run.checkpoints else 0
    stopped_by = _stopped_by(run)
    state: State
    if is_locked(run.folder):
        state = "running"
    elif stopped_by is not None:
        state = ENDED_BY[stopped_by]
    elif 0 < steps <= newest or (VALIDATION + "seconds" in run.curves and run.config.get("validate_only")):
        state = "finished"
    elif newest > 0 and newest == run.step and not (run.folder / LOCK).exists():
        state = "stopped"
    else:
        state = "failed"
    count = int(rollbacks.values[-1]) if rollbacks else 0
    return Status(state, run.step, steps, hacking, count, tuple(sorted(alarms)))


def _raised(run: RunRecord, name: str) -> tuple[int, ...]:
    curve = run.curves.get(name)
    return tuple(s for s, v in zip(curve.steps, curve.values, strict=True) if v > 0) if curve else ()


def _stopped_by(run: RunRecord) -> str | None:
    """Return the guard that ended the run after its newest checkpoint, as the manifest says.

    Earlier versions had the hacking monitor alone and did not write it down: there its last alarm says so.
    """
    if run.checkpoints:
        metadata, _ = manifest.read(run.folder / "checkpoints" / f"step_{run.checkpoints[-1]}")
        if STOPPED_BY in metadata:
            return metadata[STOPPED_BY]
    alarms = run.curves.get(HACKING)
    hacked = run.config.get("hacking_monitor.action") == "stop" and alarms is not None and alarms.values[-1] > 0
    return "hacking_monitor" if hacked else None


def is_locked(folder: Path) -> bool:
    """Whether a process holds the lock of a run directory; the file alone, of a killed process, does not count.

    On a file system without locks, the file alone counts.
    """
    try:
        lock = os.open(folder / LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:  # there is none, or a link; a pipe is open at once and not locked
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
