"""Waiting for what other processes do, without a look every few milliseconds: inotify for files, pidfd for ends."""

import ctypes
import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

CHANGES = 0x2 | 0x40 | 0x80 | 0x100 | 0x200  # modified, moved from, moved to, created, deleted (inotify(7))
LIBC = ctypes.CDLL(None, use_errno=True)


def until(happened: Callable[[], bool], seconds: float, folder: Path, pids: Sequence[int] = ()) -> bool:
    """Whether it happens within this time; looks when something below the folder changes, or a process ends."""
    end = time.monotonic() + seconds
    with ExitStack() as opened:
        notes, running = opened.enter_context(_inotify()), [opened.enter_context(_pidfd(pid)) for pid in pids]
        while True:
            for below, _, _ in os.walk(folder):  # a folder that is watched already stays so
                LIBC.inotify_add_watch(notes, os.fsencode(below), CHANGES)
            if happened():
                return True
            ready = select.select([notes, *running], [], [], max(0.0, end - time.monotonic()))[0]
            if not ready:
                return happened()
            running = [pidfd for pidfd in running if pidfd not in ready]
            if notes in ready:
                os.read(notes, 1 << 16)


def all_end(pids: Sequence[int], seconds: float) -> bool:
    """Whether all processes end within this time; they need not be children of this one."""
    end = time.monotonic() + seconds
    with ExitStack() as opened:
        running = [opened.enter_context(_pidfd(pid)) for pid in pids]
        return all(select.select([pidfd], [], [], max(0.0, end - time.monotonic()))[0] for pidfd in running)


def one_ends(pids: Sequence[int], seconds: float) -> bool:
    """Whether one of the processes ends within this time."""
    with ExitStack() as opened:
        return bool(select.select([opened.enter_context(_pidfd(pid)) for pid in pids], [], [], seconds)[0])


@contextmanager
def _inotify() -> Iterator[int]:
    notes = LIBC.inotify_init1(os.O_CLOEXEC)
    assert notes >= 0, os.strerror(ctypes.get_errno())
    try:
        yield notes
    finally:
        os.close(notes)


@contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)
