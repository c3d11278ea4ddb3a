"""Text for terminals: what a user gave is shown as it is, and is never markup, an emoji code or a control sequence."""

import re

from rich.console import Console, RenderableType

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # all but tab and newline; parts of broken UTF-8


def console(*, quiet: bool = False) -> Console:
    """Return a console of the standard output that prints text as it is; lines may be longer than the terminal."""
    return Console(quiet=quiet, markup=False, emoji=False, highlight=False)


def printable(text: str) -> str:
    """Return the text with control characters, and bytes that are not UTF-8, written as \\x1b or \\udcff."""
    return CONTROL.sub(lambda control: ascii(control[0])[1:-1], text)


def say(text: str, *, quiet: bool = False) -> None:
    """Print a message on the standard output, unless `quiet`."""
    console(quiet=quiet).print(printable(text), soft_wrap=True)


def show(*tables: RenderableType, width: int) -> None:
    """Print tables on the standard output; where it is no terminal, their lines have `width` columns."""
    screen = console()
    if not screen.is_terminal:
        screen.width = width
    for table in tables:
        screen.print(table)
