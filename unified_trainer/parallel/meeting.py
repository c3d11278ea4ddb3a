"""The ranks meet before they read a setting, and a rank that fails tells the others, which end at once.

Without it the others would wait in a collective until its timeout. A thread of each rank waits for a message in the
store by which torchrun's ranks find each other, so it does not matter what the main thread is doing.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from unified_trainer.basics.errors import SaidError, UserError
from unified_trainer.basics.secrets import masked
from unified_trainer.basics.terminal import printable
from unified_trainer.parallel.agreement import NAMED, in_words
from unified_trainer.parallel.arrival import arrive, hosts_store
from unified_trainer.parallel.mesh import RanksDivergedError, peer_lost, waited_in_vain
from unified_trainer.parallel.torchrun import size_and_rank, tell_torchrun, under_torchrun, where

LISTEN = timedelta(days=20)  # longer than runs last without a restart; more milliseconds do not fit 32 bits
HEARD = timedelta(seconds=2)  # for the others to hear of a failure, before the rank ends and may take the store along
LEAVE = timedelta(seconds=10)  # for the others to end, before rank 0 may take the store along
GRACE = 5.0  # seconds in which a rank may end by itself, tidily, after it heard of a failure of another
ENDED = 2  # exit code of a rank that another has ended
OVER = "over"  # the note of a rank to itself at its end


class PeerFailedError(UserError):
    """Another rank has failed; the message says which, and what it said."""


class StandsStillError(UserError):
    """Other ranks did not come to a collective in which this one waited; the message names them."""


@contextmanager
def meeting(minutes: float = 30.0) -> Iterator[dist.Store | None]:
    """Wait until all ranks that torchrun started have come, and give the store for `Mesh.join`; None for one process.

    They have so many minutes, those of `parallel.timeout_minutes`.

    An exception that leaves the context is told to the other ranks. There it is raised as PeerFailedError where a
    collective fails because this rank has ended, and ends a rank that waits for anything else after GRACE seconds.
    Where a collective is given up because ranks did not come to it, it is raised as StandsStillError, which names them.
    Under torchrun, where the ranks of a node share its terminal, the first of them prints a UserError, and all raise it
    as SaidError. Raise UserError if variables of torchrun are absent or the ranks do not meet.
    """
    size, rank = size_and_rank()
    if size == 1:
        yield None
        return
    store = arrive(size, rank, minutes)
    listener = _Listener(store, rank, size)
    together = True  # whether the others are at the same point of the program
    try:
        yield store
    except RanksDivergedError as error:  # which all ranks raise
        raise listener.saying(error) from error
    except Exception as error:
        together, lost = False, isinstance(error, RuntimeError) and peer_lost(error)
        if lost and (said := listener.said()):
            raise listener.saying(PeerFailedError(said)) from error
        if isinstance(error, RuntimeError) and waited_in_vain(error) and (still := listener.standing_still()):
            listener.tell(still, wait=True)
            raise listener.saying(StandsStillError(still)) from error
        raised = listener.saying(error) if isinstance(error, UserError) else error
        listener.tell(str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}", wait=not lost)
        if raised is error:
            raise
        raise raised from error
    finally:
        listener.leave(wait=together)


class _Listener:
    """A rank's ear and voice; the store holds a note for each rank."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._places, self._store = store, dist.PrefixStore("meeting", store)
        self._rank, self._others = rank, [other for other in range(size) if other != rank]
        self._ear = self._store.clone()  # a store answers one thread
        self._ear.set_timeout(LISTEN)
        self._said, self._told = "", threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="failures of other ranks", daemon=True)
        self._thread.start()

    def saying(self, error: UserError) -> UserError:
        """Return the error; under torchrun as SaidError, after the first rank of this node has printed it.

        torchrun, which ends all ranks as soon as one has ended, puts it at the end of its own report, too.
        """
        if not under_torchrun():
            return error
        self._say_once(str(error))
        tell_torchrun(str(error))
        return SaidError(str(error))

    def _say_once(self, text: str) -> None:
        with suppress(RuntimeError):  # the store has ended with its process
            if under_torchrun() and self._store.clone().add(f"said on node {os.environ['GROUP_RANK']}", 1) > 1:
                return
        sys.stderr.write(printable(masked(f"error{where()}: {text}\n")))
        sys.stderr.flush()

    def said(self) -> str:
        """Return what another rank failed with, or an empty text if none has told it; a rank tells before it ends.

        The rank whose end takes the store along stays until those that wait in vain have looked who is missing.
        """
        with suppress(RuntimeError):
            self._store.set(f"ended {self._rank}", "")
        if hosts_store(self._rank):
            self._told.wait(2 * HEARD.total_seconds())
        return self._said

    def standing_still(self) -> str:
        """Return which ranks are still at work HEARD after a collective of this rank was given up, or an empty text.

        torchrun ends its ranks when the first one ends, but not before this one has spoken.
        """
        if threading.current_thread() is threading.main_thread():
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        with suppress(RuntimeError):
            self._store.set(f"ended {self._rank}", "")
            with suppress(dist.DistStoreError):
                self._store.wait([f"ended {other}" for other in self._others], HEARD)
            still = [other for other in self._others if not self._store.check([f"ended {other}"])]
            where = "; ".join(self._places.get(f"came {other}").decode() for other in still[:NAMED])
            if still and not self._said:
                return f"{in_words(still)} ({where}) did not come to where rank {self._rank} waited for it"
        return ""

    def tell(self, text: str, *, wait: bool) -> None:
        """Tell the other ranks that this one has failed; with `wait`, until they have heard, HEARD at most."""
        with suppress(RuntimeError):  # the store has ended with its process
            for other in self._others:
                self._store.set(f"note {other}", f"rank {self._rank} failed: {text}")
            if wait:
                self._wait_for("heard", HEARD)

    def leave(self, *, wait: bool) -> None:
        """End the thread; with `wait`, rank 0, which may hold the store, waits for the others, LEAVE at most."""
        self._over.set()
        with suppress(RuntimeError):
            self._store.set(f"note {self._rank}", OVER)
            self._thread.join(HEARD.total_seconds())
            self._store.set(f"left {self._rank}", "")
            if wait and self._rank == 0:
                self._wait_for("left", LEAVE)

    def _wait_for(self, what: str, longest: timedelta) -> None:
        """Wait until all others have said so; `get`, unlike `wait`, lets the thread of this rank run meanwhile."""
        self._store.set_timeout(longest)
        for other in self._others:
            self._store.get(f"{what} {other}")

    def _listen(self) -> None:
        try:
            text = self._ear.get(f"note {self._rank}").decode()
            if text == OVER:
                return
            self._said = text
            self._told.set()
            self._ear.set(f"heard {self._rank}", "")
        except RuntimeError:  # the store has ended with its process
            return
        if not self._over.wait(GRACE):
            self._say_once(text)
            os._exit(ENDED)
