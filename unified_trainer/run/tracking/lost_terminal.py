"""A run that loses its terminal goes on, and writes what it says into RUN/terminal.txt from then on."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

FILE = "terminal.txt"


class LastingOutput:
    """A stream that takes a file in its place once a write fails: a closed pipe, a full device, a lost terminal."""

    def __init__(self, stream: Any, file: Path) -> None:
        self._stream, self._file = stream, file

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._replace(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._replace(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _replace(self, error: OSError) -> None:
        """Let the stream's descriptor be that of the file, so that what is still buffered, and children, write there.

        If the file cannot be written either, what is said is lost.
        """
        descriptor = self._stream.fileno()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        try:
            target = os.open(self._file, flags, 0o666)
            line = f"{datetime.now():%Y-%m-%d %H:%M:%S} the output is lost ({error}): the run goes on and writes here\n"
            os.write(target, line.encode())
        except OSError:
            target = os.open(os.devnull, os.O_WRONLY)
        os.dup2(target, descriptor)
        os.close(target)
        with suppress(OSError):
            self._stream.flush()


@contextmanager
def lasting_output(run: Path) -> Iterator[None]:
    """Inside, the loss of the standard output or of the standard error ends nothing; `run` is the run directory."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (LastingOutput(stream, run / FILE) for stream in before)
    try:
        yield
    finally:
        with suppress(OSError):
            sys.stdout.flush()
        sys.stdout, sys.stderr = before
