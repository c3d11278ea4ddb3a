"""The progress of a command over many items: a bar with the time left, or lines where there is no terminal."""

import time
from datetime import timedelta
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from unified_trainer.basics.terminal import console, printable


class ItemProgress:
    """Shows how many of `total` items are done; a context manager."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done, self._began = what, total, 0, time.monotonic()
        self._console = console()
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}", markup=False),
        )
        self._bar = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._bar.add_task(what, total=total, left="")

    def __enter__(self) -> "ItemProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._bar.stop()

    def advance(self) -> None:
        """Count an item."""
        self._done += 1
        self._bar.update(self._task, completed=self._done, left=self._left)

    def note(self, what: str) -> None:
        """Say a line; without a terminal, how far the work is stands behind it."""
        far = "" if self._console.is_terminal else f"  {self._done}/{self._total} {self._what}  {self._left}"
        self.say(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {what}{far}")

    def say(self, line: str) -> None:
        """Print a line as it is."""
        self._console.print(printable(line), soft_wrap=True)

    @property
    def rate(self) -> float:
        """Items per second so far."""
        return self._done / max(time.monotonic() - self._began, 1e-9)

    @property
    def _left(self) -> str:
        seconds = (self._total - self._done) / self.rate if self._done else 0
        return f"ETA {timedelta(seconds=round(seconds))}"
