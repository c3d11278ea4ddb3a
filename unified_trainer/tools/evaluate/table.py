"""The tables of an evaluation in the terminal."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from unified_trainer.basics.terminal import console, printable
from unified_trainer.tools.evaluate.measures import Difference, Interval, Measure, Summary, beside_zero, verdict

WIDTH = 200  # columns where the output is no terminal
STYLES = {1: "green", 0: "bold", -1: "red"}


def print_summary(summary: Summary, names: Sequence[str]) -> None:
    """Print every measure of every checkpoint, and the differences to the first one with their intervals."""
    table = Table("measure", *names)
    for name, values in summary.measures.items():
        against = {
            measure.right: measure for measure in summary.differences if measure.measure == name and measure.left == 0
        }
        table.add_row(name, *(_cell(measure, against.get(i)) for i, measure in enumerate(values)))
    show(table)


def show(table: Table) -> None:
    """Print a table; a file or a pipe gets wide lines."""
    screen = console()
    if not screen.is_terminal:
        screen.width = WIDTH
    screen.print(table)


def _cell(measure: Measure, difference: Difference | None) -> Text:
    """Return the mean with its spread over seeds, and below it the difference; in color if the interval is beside 0."""
    spread = "" if measure.std_over_seeds is None else f" ± {measure.std_over_seeds:.2g}"
    text = Text(printable(f"{measure.mean:.4g}{spread}"))
    if difference is None:
        return text
    style = STYLES[verdict(difference.measure, difference.difference)] if beside_zero(difference.interval) else "dim"
    text.append(f"\n{difference.difference:+.3g}{_ends(difference.interval)}", style)
    return text


def _ends(interval: Interval) -> str:
    return "" if interval is None else f" [{interval[0]:+.3g}, {interval[1]:+.3g}]"
