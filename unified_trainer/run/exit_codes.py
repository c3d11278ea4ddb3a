"""The exit codes of the program, and the one line that each kind of failure prints."""

import atexit
import errno
import os
import sys
from typing import NoReturn

from unified_trainer.basics.errors import SaidError, UserError
from unified_trainer.basics.secrets import masked
from unified_trainer.basics.terminal import printable
from unified_trainer.parallel.torchrun import where

WRONG = 2  # a UserError, or a rank whose peer has ended
HACKED = 3  # the hacking monitor stopped the run
COLLAPSED = 4  # the guard of distillation stopped the run
DOES_NOT_FIT = 5  # the command plan: the run needs more memory than the hardware has
STOPPED = {"hacking_monitor": HACKED, "guard": COLLAPSED}  # by the guard that stopped the run
INTERRUPTED = 130  # Ctrl-C before the first step, or a second one
OF_A_PATH = (errno.EACCES, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EROFS)
SHOWN = 200  # characters of a path that a message repeats


def exit_code(error: BaseException) -> int | None:
    """Print the line of an error that the user can fix and return its exit code; None for any other exception."""
    if isinstance(error, KeyboardInterrupt):  # the second one, or one before the first step; a save is given up
        sys.stderr.write("stopped\n")
        sys.stderr.flush()
        os._exit(INTERRUPTED)
    if not isinstance(error, SaidError):
        if not (line := _line(error)):
            return None
        sys.stderr.write(f"error{where()}: {line}\n")
    return WRONG


def _line(error: BaseException) -> str:
    if isinstance(error, UserError):
        return printable(masked(str(error)))
    if isinstance(error, OSError) and error.errno in OF_A_PATH and error.filename is not None:
        path = str(error.filename)  # that the user gave: no reader or writer can do anything about it
        shown = path if len(path) <= SHOWN else f"{path[:SHOWN]}..."
        return f"{shown}: {os.strerror(error.errno)}; name another path"
    if isinstance(error, RuntimeError):
        from unified_trainer.parallel.mesh import peer_lost  # needs torch, which takes a second

        if peer_lost(error):
            return f"another rank has ended; its own message says why ({error})"
    return ""


def end(code: int) -> NoReturn:
    """End the process; a rank of several ends after its exit functions, without the interpreter's own finalization.

    A thread of gloo may let go of its last tensor only then, which aborts the process (pytorch pull request 179291).
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
