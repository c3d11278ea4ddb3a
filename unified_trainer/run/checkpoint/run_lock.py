"""The lock of a run directory: one run at a time writes into it."""

import errno
import fcntl
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from unified_trainer.basics.errors import UserError
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.run.checkpoint.manifest import litter, remove_litter

LOCK = ".lock"
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # errors of file systems without locks
HELD = (errno.EWOULDBLOCK, errno.EACCES)  # errors of flock for a lock that another process holds
HEARTBEAT = 10.0  # seconds between two heartbeats
STALE = 120.0  # seconds without a heartbeat after which a holder counts as dead
NUMBERED = re.compile(r"\.lock\.(\d+)")


class RunFolderError(UserError):
    """A run directory cannot be written into; the message says why."""


@dataclass(frozen=True)
class Lock:
    """A lock that is held."""

    release: Callable[[], None]
    note: str = ""  # for the user, if the file system has no locks


@contextmanager
def claimed(folder: Path, mesh: Mesh) -> Iterator[str]:
    """Create the folder if needed and hold its lock within the context; a process that is killed loses the lock.

    All ranks must enter it. Raises RunFolderError on every rank if the folder cannot be written into or another run
    holds the lock. What a killed process left unfinished is removed, and folders that were created and are still empty
    at the end. On the main rank it gives a note for the user if the file system has no locks, else an empty text.
    """
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    mesh.barrier()  # until every rank has looked; the main rank then creates the folder
    lock, fault = None, None
    try:
        if mesh.is_main:
            lock = _lock(folder)
            remove_litter(litter(folder))
    except RunFolderError as error:
        fault = error
    if mesh.any(fault is not None):
        raise fault or RunFolderError(f"{folder} cannot be used; see the message of rank 0")
    try:
        yield lock.note if lock else ""
    finally:
        if lock:
            lock.release()
            with suppress(OSError):  # a folder that is not empty stays
                for path in created:
                    path.rmdir()


def _lock(folder: Path) -> Lock:
    """Take the lock; it is held until it is released or the process ends."""
    file = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lost = not file.exists() or not os.path.samestat(os.fstat(descriptor), file.stat())
    except OSError as error:
        if error.errno in WITHOUT_LOCKS:
            os.close(descriptor)
            file.unlink(missing_ok=True)
            return _file_instead(folder, error)
        if error.errno not in HELD:
            os.close(descriptor)
            raise RunFolderError(
                f"{file} cannot be locked (flock: {error.strerror}): the file system of the folder fails; try again, "
                "or choose another --output"
            ) from error
        lost = True
    if lost:  # another run holds the lock, or ended and removed the file between open and flock
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise _held(folder, holder)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except OSError as error:
        os.close(descriptor)
        raise RunFolderError(f"{file} cannot be written ({error.strerror}); choose another --output") from error

    def release() -> None:
        file.unlink(missing_ok=True)  # before the lock is released
        os.close(descriptor)

    return Lock(release)


def _file_instead(folder: Path, error: OSError) -> Lock:
    """Take the lock of a file system without flock, which `error` says."""
    try:
        lock = LockFile(folder)
    except HeldError as held:
        raise _held(folder, str(held)) from None
    except OSError as fault:
        raise _unwritable(folder, fault) from fault
    return Lock(
        lock.release,
        f"no locks on the file system of {folder} (flock: {error.strerror}): {lock.file.name} with a heartbeat every "
        f"{HEARTBEAT:.0f} s keeps other runs out",
    )


def _held(folder: Path, holder: str) -> RunFolderError:
    return RunFolderError(f"another run is writing into {folder} ({holder}): wait, or choose another --output")


def _unwritable(folder: Path, error: OSError) -> RunFolderError:
    way_out = "choose another --output, or resume a copy of the run"
    return RunFolderError(f"{folder} cannot be written into ({error.strerror}); {way_out}")


class HeldError(Exception):
    """Another process holds the lock; the message says which, and its last heartbeat."""


class LockFile:
    """A lock that is a file: for file systems without flock, such as some network mounts.

    It is held from the construction to `release`, with a heartbeat from a thread. The holder of a folder is the file
    `.lock.N` of the highest N. It is created with O_EXCL, so of several processes that want N one gets it, and its
    modification time is the heartbeat. A file without a heartbeat is taken over by creating N + 1 and never by removing
    N, because two processes may find the same one stale. Whoever has created a file looks at the others again, so a
    lock is never held twice: who comes late sees the earlier file.
    """

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
