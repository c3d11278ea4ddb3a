"""The table of a comparison in Markdown, and the page of the docs that holds it: for scripts/compare.py."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from intervals import Estimate, of_table
from torch import Tensor

Values = dict[str, Tensor]  # by measure: of a seed, [prompts], or [1] where a measure is of all samples together


class Cost(Protocol):
    """What a table says of a run."""

    steps: int

    def all_flops(self) -> float:
        """Return its FLOPs with those of its start."""


@dataclass(frozen=True)
class Claim:
    """One arm has a higher value of a measure than another."""

    measure: str
    higher: str
    lower: str


@dataclass(frozen=True)
class Row:
    """One arm by its seeds, as far as they have finished."""

    values: dict[int, Values] = field(default_factory=dict)
    trainings: dict[int, Cost] = field(default_factory=dict)  # none of a model that is not trained


def markdown(rows: Mapping[str, Row], claims: Iterable[Claim], measures: Mapping[str, int]) -> list[str]:
    """Return the lines of the table and a sentence for each claim; `measures` are columns with their decimals."""
    lines = [["", "seeds", "steps", "TFLOP", *measures], ["---"] * (4 + len(measures))]
    lines += [_cells(name, row, measures) for name, row in rows.items() if row.values]
    absent = [f"`{name}`" for name, row in rows.items() if not row.values]
    if len(absent) == len(rows):
        return ["Not measured yet."]
    said = [verdict(claim, rows, measures[claim.measure]) for claim in claims]
    said += [f"Not measured yet: {', '.join(absent)}."] if absent else []
    return [*(f"| {' | '.join(cells)} |" for cells in lines), "", *(f"- {sentence}" for sentence in said)]


def _cells(name: str, row: Row, measures: Mapping[str, int]) -> list[str]:
    cost = ["", ""]
    if row.trainings:
        flops = [training.all_flops() for training in row.trainings.values()]
        steps = sorted({training.steps for training in row.trainings.values()})
        cost = [", ".join(map(str, steps)), number(sum(flops) / len(flops) / 1e12, 2)]
    columns = [[of_seed[measure] for of_seed in row.values.values()] for measure in measures]
    estimates = map(of_table, map(torch.stack, columns))
    cells = [shown(one, decimals) for one, decimals in zip(estimates, measures.values(), strict=True)]
    return [f"`{name}`", str(len(row.values)), *cost, *cells]


def verdict(claim: Claim, rows: Mapping[str, Row], decimals: int) -> str:
    """Return what the seeds that both arms have say of a claim, as a sentence; values are paired by seed and prompt."""
    higher, lower = rows[claim.higher].values, rows[claim.lower].values
    seeds = sorted(higher.keys() & lower.keys())
    names = f"`{claim.higher}` against `{claim.lower}`, {claim.measure}"
    if len(seeds) < 2:
        return f"{names}: not measured yet, since fewer than two seeds have both."
    difference = of_table(torch.stack([higher[seed][claim.measure] - lower[seed][claim.measure] for seed in seeds]))
    said = f"{shown(difference, decimals)} ({len(seeds)} seeds)"
    if difference.holds_zero:
        return f"{names}: a tie, because the interval of the difference holds zero: {said}."
    return f"{names}: {'higher' if difference.low > 0 else '**the claim fails**, it is lower'}, by {said}."


def shown(value: Estimate, decimals: int) -> str:
    """Return a mean with its interval, where there is one."""
    mean, low, high = (number(end, decimals) for end in (value.mean, value.low, value.high))
    return f"{mean} [{low}, {high}]" if value.low == value.low else mean


def number(value: float, decimals: int) -> str:
    """Return a number as the docs write it: .05, -.2, 1.50."""
    return re.sub(r"^(-?)0\.", r"\1.", f"{value:.{decimals}f}")


def around(page: Path, name: str) -> tuple[str, str]:
    """Return a page before and after the table of a comparison; ValueError if it has no marks for it."""
    begin, end = (f"<!-- {mark} scripts/comparisons/{name}.toml -->" for mark in ("table of", "end of"))
    before, *rest = page.read_text(encoding="utf-8").split(begin)
    if len(rest) != 1 or end not in rest[0]:
        raise ValueError(f"{page}: needs the lines {begin} and {end}, once, where the table shall stand")
    return before + begin, end + rest[0].partition(end)[2]
