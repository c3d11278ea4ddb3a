"""The main curves of a run in the terminal, above the progress bar: --live."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

ROWS = 6  # lines of a chart
LABELS = 9  # characters of the numbers at its left
NARROWEST = 40  # columns of a chart
MOST = 4  # charts
FRAME = 2  # lines of a chart besides its rows: title and steps
BELOW = 4  # lines of the terminal that stay free for the progress bar and messages
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a braille character: left and right, from the top
BRAILLE = 0x2800


class LiveCurves:
    """The curves of the first MOST metrics that a run has; `names` are their names in the terminal, in order."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self._points: dict[str, list[tuple[int, float]]] = {}
        self._drawn: dict[str, tuple[tuple[int, int], Text]] = {}  # with the number of points and the width

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the values of a step; those that are not finite are left out."""
        for name in self._names:
            value = metrics.get(name)
            if value is not None and math.isfinite(value):
                self._points.setdefault(name, []).append((step, float(value)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        across = max(1, min(MOST, options.max_width // NARROWEST))
        down = min(MOST, (console.height - BELOW) // (ROWS + FRAME) * across)
        names = [name for name in self._names if self._points.get(name)][: max(down, 0)]
        if not names or options.ascii_only:
            return
        width = options.max_width // across
        grid = Table.grid(padding=0)
        for first in range(0, len(names), across):
            grid.add_row(*(self._chart(name, width) for name in names[first : first + across]))
        yield grid

    def _chart(self, name: str, width: int) -> Text:
        points = self._points[name].copy()  # another thread adds to them
        key, drawn = (len(points), width), self._drawn.get(name)
        if drawn is None or drawn[0] != key:
            lines = chart(self._names[name], [s for s, _ in points], [v for _, v in points], width - 2)
            drawn = self._drawn[name] = key, Text("\n".join(lines), no_wrap=True)
        return drawn[1]


class CurvesAbove(Progress):
    """A progress bar with curves above it."""

    curves: LiveCurves | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return what the terminal shows: the curves, where there are some, and the bar."""
        if self.curves is not None:
            yield self.curves
        yield from super().get_renderables()


def chart(title: str, steps: Sequence[int], values: Sequence[float], width: int) -> list[str]:
    """Return a chart of `width` characters as lines: title with the last value, ROWS lines of a curve, and the steps.

    The curve is that of the means of equal parts of the values; the numbers at its left are its largest and least.
    """
    across = width - LABELS - 1
    parts = means(values, 2 * across)
    low, high = min(parts), max(parts)
    left = [f"{high:.4g}", *[""] * (ROWS - 2), f"{low:.4g}"]
    drawn = curve(parts, across, low, high)
    first, last = str(steps[0]), str(steps[-1])
    under = f"{'':{LABELS}} {first}{last:>{max(across - len(first), 0)}}"
    head = f"{'':{LABELS}} {title} {values[-1]:.4g}"
    return [f"{head:{width}}"[:width], *(f"{n:>{LABELS}} {line}" for n, line in zip(left, drawn, strict=True)), under]


def curve(values: Sequence[float], across: int, low: float, high: float) -> list[str]:
    """Return ROWS lines of braille characters: values, at most 2 x `across`, from `low` at the bottom to `high`."""
    tall, wide = 4 * ROWS, 2 * across
    dots = [[0] * across for _ in range(ROWS)]
    before = None
    for i, value in enumerate(values):
        x = round(i * (wide - 1) / max(len(values) - 1, 1))
        y = round((high - value) / (high - low) * (tall - 1)) if high > low else tall // 2
        points = [(x, y)] if before is None else _line(*before, x, y)
        for column, row in points:
            dots[row // 4][column // 2] |= DOTS[column % 2][row % 4]
        before = x, y
    return ["".join(chr(BRAILLE + dot) for dot in line) for line in dots]


def means(values: Sequence[float], parts: int) -> list[float]:
    """Return the means of `parts` equal parts of values, or the values if they are fewer."""
    count = max(min(parts, len(values)), 1)
    edges = [i * len(values) // count for i in range(count + 1)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges) if b > a]


def _line(x0: int, y0: int, x1: int, y1: int) -> list[tuple[int, int]]:
    """Return the points of a straight line between two points, both included."""
    count = max(abs(x1 - x0), abs(y1 - y0), 1)
    return [(round(x0 + (x1 - x0) * i / count), round(y0 + (y1 - y0) * i / count)) for i in range(count + 1)]
