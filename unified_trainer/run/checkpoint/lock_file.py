"""A lock that is a file: for file systems without flock, such as some network mounts.

The holder of a folder is the file `.lock.N` of the highest N. It is created with O_EXCL, so of several processes that
want N one gets it, and its modification time is the heartbeat. A file without a heartbeat is taken over by creating
N + 1 and never by removing N, because two processes may find the same one stale. Whoever has created a file looks at
the others again, so a lock is never held twice: who comes late sees the earlier file.
"""

import os
import re
import socket
import threading
from contextlib import suppress
from pathlib import Path

HEARTBEAT = 10.0  # seconds between two heartbeats
STALE = 120.0  # seconds without a heartbeat after which a holder counts as dead
NUMBERED = re.compile(r"\.lock\.(\d+)")


class HeldError(Exception):
    """Another process holds the lock; the message says which, and its last heartbeat."""


class LockFile:
    """A lock on a folder that is held from the construction to `release`, with a heartbeat from a thread."""

    def __init__(self, folder: Path) -> None:
        """Take the lock, also from a holder that is dead; raise HeldError if it is held, OSError if it is not written.

        A holder on this machine is dead if its process is gone, and every other after STALE seconds without heartbeat.
        Ages are differences of the file system's own times: clocks of machines do not count.
        """
        self._folder = folder
        taken = _files(folder)
        if taken:
            _refuse_if_alive(folder, [taken[-1]])
        number = _number(taken[-1]) + 1 if taken else 1
        self.file = folder / f".lock.{number}"
        try:
            _create(self.file, _identity())
        except FileExistsError:
            raise HeldError(_words(self.file, 0.0)) from None
        self._ended = threading.Event()
        try:
            _refuse_if_alive(folder, [file for file in _files(folder) if file != self.file])
        except HeldError:
            self.file.unlink(missing_ok=True)
            raise
        self._thread = threading.Thread(target=self._beat, name="lock heartbeat", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """End the heartbeat and remove the file, after those of dead holders before it."""
        self._ended.set()
        self._thread.join()
        for file in _files(self._folder):  # from the lowest number: the highest must be seen until it is gone
            if _number(file) <= _number(self.file):
                file.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT):
            with suppress(OSError):  # the next heartbeat may succeed
                os.utime(self.file)


def _identity() -> str:
    """Return process and machine in words; a process id means something in one PID namespace only."""
    space = ""
    with suppress(OSError):  # not on every system
        space = f" ({os.readlink('/proc/self/ns/pid')})"
    return f"process {os.getpid()} on {socket.gethostname()}{space}"


def _files(folder: Path) -> list[Path]:
    """Return the lock files of a folder by their numbers."""
    return sorted((file for file in folder.iterdir() if NUMBERED.fullmatch(file.name)), key=_number)


def _number(file: Path) -> int:
    return int(NUMBERED.fullmatch(file.name)[1])  # type: ignore[index]


def _create(file: Path, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
        opened.write(text)


def _refuse_if_alive(folder: Path, files: list[Path]) -> None:
    """Raise HeldError if one of these files has a holder that lives."""
    for file in files:
        with suppress(FileNotFoundError):  # released in between
            identity = file.read_text(encoding="utf-8", errors="replace")  # opening it also renews a cached time
            age = _now(folder) - file.stat().st_mtime
            if age < STALE and not _is_gone(identity):
                raise HeldError(_words(file, age))


def _now(folder: Path) -> float:
    """Return the file system's time, that of a file written now."""
    probe = folder / f".lock.now.{socket.gethostname()}.{os.getpid()}"
    try:
        with probe.open("w") as opened:
            return os.fstat(opened.fileno()).st_mtime  # also after another process has removed the file
    finally:
        probe.unlink(missing_ok=True)


def _is_gone(identity: str) -> bool:
    """Return whether a file names a process of this machine that has ended; its text may not be written yet."""
    process = re.match(r"process (\d+) on ", identity)
    if process is None or identity != _identity().replace(str(os.getpid()), process[1], 1):
        return False
    try:
        os.kill(int(process[1]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _words(file: Path, age: float) -> str:
    holder = ""
    with suppress(FileNotFoundError):
        holder = file.read_text(encoding="utf-8", errors="replace").partition(" (")[0]
    return (
        f"{holder or 'another process'}, last heartbeat {max(age, 0):.0f} s ago; {file} of a dead holder is taken over "
        f"after {STALE:.0f} s"
    )
