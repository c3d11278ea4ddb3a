"""Curves of long runs: thinned as they are read, with their extremes."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified_trainer.tools.report import metrics_reader
from unified_trainer.tools.report.metrics_reader import read_metrics, thinned


@given(
    values=st.lists(st.floats(allow_nan=True), min_size=1, max_size=300),
    most=st.integers(1, 50),
    gap=st.integers(1, 7),
)
def test_extremes_ends_and_first_faults_stay(values, most, gap):
    values = np.array(values)
    steps = np.arange(len(values)) * gap
    kept = thinned(steps, values, most)
    assert (np.diff(kept) > 0).all() and {0, len(values) - 1} <= {*kept.tolist()}
    assert len(kept) <= max(most, 4 * max(most // 3, 1) + 1)
    finite = values[np.isfinite(values)]
    if len(finite):
        assert np.nanmin(values) in values[kept] and np.nanmax(values) in values[kept]
    if len(finite) < len(values):
        assert np.flatnonzero(~np.isfinite(values))[0] in kept


@pytest.fixture
def small(monkeypatch):
    """A reader of small blocks that keeps few points."""
    monkeypatch.setattr(metrics_reader, "BLOCK", 4096)
    monkeypatch.setattr(metrics_reader, "MOST", 100)


def rows(count: int) -> list[dict]:
    made = [{"step": i, "time": 10.0 + i, "train/loss": math.sin(i / 50), "name": "x"} for i in range(1, count + 1)]
    made[count // 2]["train/loss"] = 9.0
    for row in made[::10]:
        row["validation/reward"] = row["step"] / 7
        row["train/count"] = row["step"] % 3
    return made


def write(file, made: list[dict]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in made))


def test_a_long_curve_has_a_bound_and_keeps_its_peak(tmp_path, small):
    write(tmp_path / "m.jsonl", rows(5000))
    curves, step, written = read_metrics(tmp_path / "m.jsonl")
    assert step == 5000 and written == 5010.0 and curves.keys() == {"loss", "validation/reward", "count"}
    for curve in curves.values():
        assert len(curve.steps) <= 200 and list(curve.steps) == sorted(curve.steps)
    assert 9.0 in curves["loss"].values and curves["loss"].steps[-1] == 5000
    gaps = np.diff(curves["loss"].steps)
    assert gaps[: len(gaps) // 2].max() <= 5000 / 30  # no part of the run is left out


def test_a_long_file_is_read_in_blocks(tmp_path, small, monkeypatch):
    """What is held of a file at a time does not grow with it, and a last line that is not whole is left out."""
    sizes: list[int] = []
    columns = metrics_reader._columns

    def noted(whole, file, before):
        sizes.append(len(whole))
        return columns(whole, file, before)

    monkeypatch.setattr(metrics_reader, "_columns", noted)
    write(tmp_path / "m.jsonl", rows(2000))
    whole = (tmp_path / "m.jsonl").stat().st_size
    with (tmp_path / "m.jsonl").open("a") as file:
        file.write('{"step": 2001, "train/lo')
    assert read_metrics(tmp_path / "m.jsonl").curves["loss"].steps[-1] == 2000
    assert sum(sizes) == whole and len(sizes) > 20
    assert max(sizes) < 4096 + 200  # a block, and the begin of a line
