"""What the tests of the command evaluate share: its tables, and what it says when it refuses."""

import csv

import helpers


def table(output, name: str) -> list[dict]:
    with (output / name).open(encoding="utf-8", newline="") as opened:
        return list(csv.DictReader(opened))


def refused(capsys, *words: object) -> str:
    """The one line that the command says when it refuses these words."""
    said = helpers.refused(capsys, "evaluate", *words)
    assert said.count("\n") == 1
    return said
