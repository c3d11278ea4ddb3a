"""The time limit of a scorer that runs in this process.

A call in another thread cannot be ended, so the call stays in the main thread and a signal raises TimeoutError in it.
That ends Python code and waits for sockets, files, locks and processes. A call inside a library that does not return to
Python cannot be ended: some time later the process is, with the traceback of every thread.
"""

import faulthandler
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from unified_trainer.rewards.base import Scorer
from unified_trainer.types import PerSample, Video

GRACE = 60.0  # seconds after the limit until the process is ended


def limited(scorer: Scorer, seconds: float, key: str) -> Scorer:
    """Return a scorer whose calls end with TimeoutError after `seconds`; `key` is its setting, for messages."""

    def score(video: Video, prompts: Sequence[str]) -> PerSample:
        with time_limit(seconds, key):
            return scorer(video, prompts)

    return score


@contextmanager
def time_limit(seconds: float, key: str) -> Iterator[None]:
    """Raise TimeoutError in the context after `seconds`, and end the process with exit code 1 after GRACE more.

    Signals reach the main thread only: in another thread there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"{key} gave no answer in {seconds:g} s: raise reward.timeout, or look for why it hangs")

    before = signal.signal(signal.SIGALRM, late)
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=sys.__stderr__)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:  # also if the signal came after the last line of the call
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)
