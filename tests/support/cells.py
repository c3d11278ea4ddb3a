"""Matrices of cases: the suite runs the cells that together have every value of every axis, `make cells` runs all."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from unified_trainer.run.registry import METHODS

# One of each way to take rows: groups of prompts, prompts, clips, pairs of clips, and the samples of the step before.
OF_EACH_KIND = ("dance_grpo", "dmd2", "finetune", "flow_dpo", "streaming_tuning")


def cells(matrix: Iterable[tuple], axes: Callable[[tuple], tuple] = tuple, always: Callable[..., bool] | None = None):
    """The cells of a matrix as parameters; those that bring no value which is new on its axis are marked `cell`.

    `axes` gives the values of a cell that count; by default each of its parts is an axis. Cells with most new values
    are taken first, so that a matrix of m rows and n columns is covered by max(m, n) of its cells. `always` says of
    the parts of a cell whether the suite runs it in any case.
    """
    rows = list(matrix)
    values = [{(axis, repr(value)) for axis, value in enumerate(axes(row))} for row in rows]
    run = {i for i, row in enumerate(rows) if always is not None and always(*row)}
    seen: set[Any] = set().union(*(values[i] for i in run))
    for new in range(max(map(len, values)), 0, -1):
        for i, of_cell in enumerate(values):
            if i not in run and len(of_cell - seen) >= new:
                run.add(i)
                seen |= of_cell
    return [pytest.param(*row, marks=() if i in run else pytest.mark.cell) for i, row in enumerate(rows)]


def methods():
    """The methods as parameters, of which the suite runs one of each kind."""
    return cells(((name,) for name in METHODS), lambda _: (), lambda name: name in OF_EACH_KIND)
