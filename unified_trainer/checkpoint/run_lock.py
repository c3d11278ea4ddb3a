"""A run directory belongs to one run at a time."""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from unified_trainer.parallel.mesh import Mesh

LOCK = ".lock"
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # file systems that lock nothing


class RunFolderError(ValueError):
    """A run directory that cannot be written into; the message says why."""


@contextmanager
def claimed(folder: Path, mesh: Mesh) -> Iterator[None]:
    """The folder is there, can be written into, and is nobody else's, however this process ends.

    RunFolderError on every rank if not. What was made for it goes again if nothing was put in.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    mesh.barrier()  # every rank has looked
    lock, fault = -1, None
    try:
        lock = _lock(folder) if mesh.is_main else -1
    except RunFolderError as error:
        fault = error
    if mesh.any(fault is not None):
        raise fault or RunFolderError(f"{folder} cannot be used, as another rank says")
    try:
        yield
    finally:
        if mesh.is_main:
            (folder / LOCK).unlink(missing_ok=True)  # while it is still held
            os.close(lock)
            with suppress(OSError):  # not empty: there is a run
                for path in made:
                    path.rmdir()


def _lock(folder: Path) -> int:
    """A descriptor that holds the lock until it is closed or the process ends."""
    file = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be written into ({error.strerror}); choose another --output") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        gone = not file.exists() or not os.path.samestat(os.fstat(lock), file.stat())
    except OSError as error:
        gone = error.errno not in WITHOUT_LOCKS
    if gone:  # held, or just given up by a run that ended between the two lines
        holder = os.pread(lock, 200, 0).decode(errors="replace").strip()
        os.close(lock)
        raise RunFolderError(f"another run is writing into {folder} ({holder}): wait, or choose another --output")
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return lock
