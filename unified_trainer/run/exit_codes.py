"""The exit codes of the program, and the one line that each kind of failure prints."""

import atexit
import errno
import os
import sys
from collections.abc import Callable
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
OF_A_PATH = (errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EROFS)
SHOWN = 200  # characters of a path that a message repeats


def exit_code(work: Callable[[], int]) -> int:
    """Return the exit code of `work`, or of what it raises; an exception that is not the user's to fix is raised."""
    try:
        return work()
    except SaidError:
        return WRONG
    except UserError as error:
        sys.stderr.write(printable(masked(f"error{where()}: {error}\n")))
        return WRONG
    except OSError as error:  # of a path that the user gave: no reader or writer can do anything about it
        if error.errno not in OF_A_PATH or error.filename is None:
            raise
        path = str(error.filename)
        shown = path if len(path) <= SHOWN else f"{path[:SHOWN]}..."
        sys.stderr.write(f"error{where()}: {shown}: {os.strerror(error.errno)}; name another path\n")
        return WRONG
    except RuntimeError as error:
        from unified_trainer.parallel.mesh import peer_lost  # needs torch, which takes a second

        if not peer_lost(error):
            raise
        sys.stderr.write(f"error{where()}: another rank has ended; its own message says why ({error})\n")
        return WRONG
    except KeyboardInterrupt:  # the second one, or one before the first step; a save that is under way is given up
        sys.stderr.write("stopped\n")
        sys.stderr.flush()
        os._exit(INTERRUPTED)


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
