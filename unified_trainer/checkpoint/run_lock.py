"""The lock of a run directory: one run at a time writes into it."""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from unified_trainer.errors import UserError
from unified_trainer.parallel.mesh import Mesh

LOCK = ".lock"
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # errors of file systems without locks


class RunFolderError(UserError):
    """A run directory cannot be written into; the message says why."""


@contextmanager
def claimed(folder: Path, mesh: Mesh) -> Iterator[None]:
    """Create the folder if needed and hold its lock within the context; a process that is killed loses the lock.

    All ranks must enter it. Raises RunFolderError on every rank if the folder cannot be written into or another run
    holds the lock. Folders that were created and are still empty at the end are removed.
    """
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    mesh.barrier()  # until every rank has looked; the main rank then creates the folder
    lock, fault = -1, None
    try:
        lock = _lock(folder) if mesh.is_main else -1
    except RunFolderError as error:
        fault = error
    if mesh.any(fault is not None):
        raise fault or RunFolderError(f"{folder} cannot be used; see the message of rank 0")
    try:
        yield
    finally:
        if mesh.is_main:
            (folder / LOCK).unlink(missing_ok=True)  # before the lock is released
            os.close(lock)
            with suppress(OSError):  # a folder that is not empty stays
                for path in created:
                    path.rmdir()


def _lock(folder: Path) -> int:
    """Return a file descriptor that holds the lock until it is closed or the process ends."""
    file = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be written into ({error.strerror}); choose another --output") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lost = not file.exists() or not os.path.samestat(os.fstat(lock), file.stat())
    except OSError as error:
        lost = error.errno not in WITHOUT_LOCKS
    if lost:  # another run holds the lock, or ended and removed the file between open and flock
        holder = os.pread(lock, 200, 0).decode(errors="replace").strip()
        os.close(lock)
        raise RunFolderError(f"another run is writing into {folder} ({holder}): wait, or choose another --output")
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except OSError as error:
        os.close(lock)
        raise RunFolderError(f"{file} cannot be written ({error.strerror}); choose another --output") from error
    return lock
