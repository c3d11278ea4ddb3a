"""Ctrl-C, SIGTERM and SIGHUP: the first one asks a run to save and end, the second one ends it."""

import math
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.torchrun import shutdown_timeout

# What a second request to stop does, even to a process that was started with the first one ignored, as shells do in
# the background.
AT_ONCE: dict[int, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
_asked: list[int] = []  # the signals of the run in this process


class StepDropped(Exception):
    """A step was left before it changed anything, because the run is asked to stop."""


def safe_point(mesh: Mesh) -> None:
    """Raise StepDropped on all ranks if one of them is asked to stop (a collective)."""
    if mesh.any(bool(_asked)):
        raise StepDropped


def too_slow_to_stop(seconds: float) -> str:
    """Return a warning if a training step of so many seconds cannot end before torchrun kills it; "" otherwise."""
    patience = shutdown_timeout()
    if patience is None or seconds < patience:
        return ""
    wanted = math.ceil(3 * seconds / 60) * 60
    return (
        f"warning: a training step takes {seconds:.0f} s, but torchrun kills its processes {patience:g} s after "
        f"SIGTERM: the steps since the last checkpoint would be lost. Start with torchrun --shutdown-timeout {wanted}"
    )


def heard() -> list[int]:
    """Return the signals that ask a run to stop: a SIGHUP that is ignored, as under nohup, stays ignored."""
    return [number for number in AT_ONCE if (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN)]


@contextmanager
def stop_signal() -> Iterator[list[int]]:
    """Yield a list that fills when the process is asked to stop; the second request stops at once."""
    _asked.clear()

    def note(number: int, _frame: object) -> None:
        _asked.append(number)
        signal.signal(number, AT_ONCE[number])
        with suppress(OSError):  # a terminal that was closed
            os.write(2, b"\nfinishing this step and saving; press Ctrl-C again to abort\n")  # safe inside a handler

    previous = {number: signal.signal(number, note) for number in heard()}
    try:
        yield _asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
