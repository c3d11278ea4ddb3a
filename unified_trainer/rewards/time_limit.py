"""The time limit of a scorer that runs in this process.

A call in another thread cannot be ended, so the call stays in the main thread and a signal raises TimeoutError in it.
That ends Python code and waits for sockets, files, locks and processes. A call inside a library that does not return to
Python cannot be ended: some time later the process is, with the traceback of every thread.
"""

import faulthandler
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from unified_trainer.basics.types import PerSample, Video
from unified_trainer.rewards.base import Scorer

GRACE = 60.0  # seconds after the limit until the process is ended


def limited(scorer: Scorer, seconds: float, key: str) -> Scorer:
    """Return a scorer whose calls end with TimeoutError after `seconds`; `key` is its setting, for messages."""

    def score(video: Video, prompts: Sequence[str]) -> PerSample:
        with time_limit(seconds, key):
            return scorer(video, prompts)

    return score


def watched(scorer: Scorer, seconds: float, key: str, late: Callable[[TimeoutError], None]) -> Scorer:
    """Return a scorer for any thread: `late` is called, in another one, when a call takes longer than `seconds`.

    The call itself cannot be ended. If the process has not ended GRACE seconds later, it is, with exit code 1.
    """

    def score(video: Video, prompts: Sequence[str]) -> PerSample:
        timer = threading.Timer(seconds, late, [_too_late(seconds, key)])
        timer.daemon = True
        with _ended_at_last(seconds):
            timer.start()
            try:
                return scorer(video, prompts)
            finally:
                timer.cancel()

    return score


@contextmanager
def time_limit(seconds: float, key: str) -> Iterator[None]:
    """Raise TimeoutError in the context after `seconds`, and end the process with exit code 1 after GRACE more.

    Signals reach the main thread only: in another thread there is no limit, and `watched` stands in.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(_number: int, _frame: FrameType | None) -> None:
        raise _too_late(seconds, key)

    before = signal.signal(signal.SIGALRM, late)
    try:
        with _ended_at_last(seconds):
            signal.setitimer(signal.ITIMER_REAL, seconds)
            try:
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:  # also if the signal came after the last line of the call
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _ended_at_last(seconds: float) -> Iterator[None]:
    """End the process, with the traceback of every thread, if the context lasts GRACE longer than `seconds`."""
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _too_late(seconds: float, key: str) -> TimeoutError:
    return TimeoutError(f"{key} gave no answer in {seconds:g} s: raise reward.timeout, or look for why it hangs")
