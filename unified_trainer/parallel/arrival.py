"""The arrival of the ranks that torchrun started: each signs in over TCP, and those that wait name the missing."""

import os
import socket
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from unified_trainer.basics.errors import UserError
from unified_trainer.parallel.agreement import in_words
from unified_trainer.parallel.torchrun import check_started, environment_number

SAY = 30.0  # seconds between two lines about missing ranks
LOOK = 1.0  # seconds between two attempts to reach rank 0
LATER = threading.Event()  # never set
ALL = "all came"  # key in the store: an empty text, or why the ranks do not start


def arrive(size: int, rank: int, minutes: float) -> dist.Store:
    """Return the store of this start after all ranks have signed in, each with the words of `place`.

    UserError, which names the missing ranks, if they have not after so many minutes, or for absent variables of
    torchrun. The wait prints them every SAY seconds.
    """
    check_started(size)
    end = time.monotonic() + 60 * minutes
    store = _connected(size, rank, end, minutes)
    store.set(f"came {rank}", place())
    if rank == 0:
        store.set(ALL, _waited_for_all(store, size, end, minutes))
    elif not _comes(store, [ALL], end, "rank 0") and not _comes(store, [ALL], time.monotonic() + LOOK, ""):
        raise UserError(_missing(store, size, minutes))
    if text := store.get(ALL).decode():
        LATER.wait(LOOK if hosts_store(rank) else 0.0)  # until the others have read it
        raise UserError(text)
    return store


def place() -> str:
    """Return the machine and the process of this rank, in words."""
    return f"{socket.gethostname()}, process {os.getpid()}"


def hosts_store(rank: int) -> bool:
    """Whether the store lives in this rank's process, and not in torchrun's."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _connected(size: int, rank: int, end: float, minutes: float) -> dist.Store:
    host, port = os.environ["MASTER_ADDR"], environment_number("MASTER_PORT", 0)
    if not hosts_store(rank):
        _reach(host, port, end, f"rank {rank} of {size} cannot reach rank 0 at {host}:{port}", minutes)
    longest = timedelta(minutes=minutes)
    try:
        store = dist.TCPStore(host, port, None, hosts_store(rank), longest, wait_for_workers=False, multi_tenant=True)
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"the {size} ranks cannot meet at {host}:{port}: {reason}") from error
    # torchrun --max-restarts may give all starts one store: the notes of an earlier one must not be read.
    return dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _reach(host: str, port: int, end: float, trouble: str, minutes: float) -> None:
    """Wait until the address answers; the store would try in silence, and then print a stack of its own."""
    last_line = time.monotonic()
    while True:
        try:
            socket.create_connection((host, port), max(LOOK, min(SAY, end - time.monotonic()))).close()
            return
        except OSError as error:
            if time.monotonic() >= end:
                raise UserError(
                    f"{trouble} after {minutes:g} minutes (parallel.timeout_minutes; {error}): is it the first node's "
                    "address, the same on all nodes, and is the port open?"
                ) from error
            if time.monotonic() - last_line >= SAY:
                last_line = time.monotonic()
                _say(f"{trouble} yet ({error})")
        LATER.wait(LOOK)


def _waited_for_all(store: dist.Store, size: int, end: float, minutes: float) -> str:
    """Wait for all ranks on the first one; return why they do not start, or an empty text."""
    while absent := _absent(store, size):
        patience = min(end, time.monotonic() + SAY)
        if not _comes(store, [f"came {rank}" for rank in absent], patience, "") and time.monotonic() >= end:
            return _missing(store, size, minutes)
        if absent := _absent(store, size):
            _say(f"waiting for {in_words(absent)} of {size}")
    return ""


def _comes(store: dist.Store, keys: list[str], end: float, whom: str) -> bool:
    """Wait for keys until `end` and return whether all came; `whom` is named every SAY seconds, on one rank a node."""
    while (left := end - time.monotonic()) > 0:
        try:
            store.wait(keys, timedelta(seconds=min(left, SAY)))
            return True
        except dist.DistStoreError:
            if whom and time.monotonic() < end and not store.check(["came 0"]):
                _say(f"waiting for {whom}")
    return False


def _absent(store: dist.Store, size: int) -> list[int]:
    return [rank for rank in range(size) if not store.check([f"came {rank}"])]


def _missing(store: dist.Store, size: int, minutes: float) -> str:
    absent = _absent(store, size) or [0]
    there = sorted({store.get(f"came {rank}").decode().split(",")[0] for rank in range(size) if rank not in absent})
    return (
        f"{in_words(absent)} of {size} did not come within {minutes:g} minutes (parallel.timeout_minutes); the others "
        f"are on {', '.join(there[:8])}{' and more' if len(there) > 8 else ''}: look at what the missing ones say, and "
        "whether their address of rank 0 is the same"
    )


def _say(words: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stderr.write(f"{words}\n")
        sys.stderr.flush()
