"""The lock of a run directory: one run at a time writes into it."""

import errno
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from unified_trainer.basics.errors import UserError
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.run.checkpoint.litter import litter, remove_litter
from unified_trainer.run.checkpoint.lock_file import HEARTBEAT, HeldError, LockFile

LOCK = ".lock"
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # errors of file systems without locks
HELD = (errno.EWOULDBLOCK, errno.EACCES)  # errors of flock for a lock that another process holds


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
