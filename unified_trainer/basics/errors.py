"""Errors that a user can fix, and notes that say what a bug interrupted.

A `UserError` is printed as one line and ends the program with exit code 2. Every other exception is a bug, of this
package or of a method, scorer or model family written outside it: it keeps its traceback.
"""

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the last one by a limit on the size of files


class UserError(ValueError):
    """A wrong setting, file or command; the message names it and says what to do instead."""


class MissingFileError(UserError, FileNotFoundError):
    """A file or folder that the run needs is missing."""


class OutputExistsError(UserError, FileExistsError):
    """An output path is already in use and would be overwritten."""


class MissingPackageError(UserError, ModuleNotFoundError):
    """A package that a setting or command needs is not installed."""


class NotFiniteError(UserError, FloatingPointError):
    """A loss, gradient, score or setting is NaN or infinite."""


class UnscoredError(UserError):
    """A scorer has no number for some samples of a call; `scores` has None for them, which is never taken for 0."""

    def __init__(self, reason: str, scores: Sequence[float | None]) -> None:
        lost = sum(score is None for score in scores)
        super().__init__(f"{lost} of {len(scores)} samples cannot be scored: {reason}" if len(scores) > 1 else reason)
        self.scores = scores


class SaidError(UserError):
    """An error that another process, or this one, has printed: nothing is left to say."""


@contextmanager
def working_on(what: str) -> Iterator[None]:
    """Add `what` to the traceback of an exception that is not a UserError: the role, method, scorer or step at work."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        error.add_note(f"while working on {what}")
        raise


@contextmanager
def writing(where: Path) -> Iterator[None]:
    """Turn a full disk or quota, while a file or folder is written, into a UserError that names it."""
    try:
        yield
    except Exception as error:
        if not out_of_space(error):
            raise
        raise UserError(f"no space to write {where} ({error}): free space, and call again") from error


def out_of_space(error: Exception) -> bool:
    """Return whether a write failed because the disk or the quota is full.

    The exceptions of safetensors and of copying a folder hold the number in their text only.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in NO_SPACE
    return any(f"{words} {number}" in str(error) for words in ("os error", "[Errno") for number in NO_SPACE)
