"""Ctrl-C and SIGTERM: the first one asks a run to save and end, the second one ends it."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# What a second request to stop does, even to a process that was started with the first one ignored, as shells do in
# the background.
AT_ONCE: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


@contextmanager
def stop_signal() -> Iterator[list[int]]:
    """Yield a list that fills when the process is asked to stop; the second request stops at once."""
    asked: list[int] = []

    def note(number: int, _frame: object) -> None:
        asked.append(number)
        signal.signal(number, AT_ONCE[number])
        os.write(2, b"\nfinishing this step and saving; press Ctrl-C again to abort\n")  # safe inside a handler

    previous = {number: signal.signal(number, note) for number in AT_ONCE}
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
