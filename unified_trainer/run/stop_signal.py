"""Ctrl-C, SIGTERM and SIGHUP: each asks a run to save and end; a second Ctrl-C ends it at once.

Another SIGTERM or SIGHUP changes nothing, because it is mostly the first request by another way: Slurm may send SIGTERM
to the ranks and to torchrun, which passes it on; a terminal that closes sends SIGHUP as its shell does.
"""

import math
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.torchrun import shutdown_timeout

HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
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
    return [number for number in HEARD if (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN)]


@contextmanager
def stop_signal() -> Iterator[list[int]]:
    """Yield a list that fills when the process is asked to stop; a second Ctrl-C raises KeyboardInterrupt."""
    _asked.clear()

    def note(number: int, _frame: object) -> None:
        _asked.append(number)
        if number == signal.SIGINT:  # not what it was before: shells start processes of the background with it ignored
            signal.signal(number, signal.default_int_handler)
        with suppress(OSError):  # a terminal that was closed
            os.write(2, b"\nfinishing this step and saving; press Ctrl-C again to abort\n")  # safe inside a handler

    previous = {number: signal.signal(number, note) for number in heard()}
    try:
        yield _asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
