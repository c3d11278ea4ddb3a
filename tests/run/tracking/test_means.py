"""Running averages of metrics: numbers, vectors of any length, maxima."""

import pytest
import torch
from helpers import ALONE
from hypothesis import given
from hypothesis import strategies as st

from unified_trainer.run.tracking.tracker import Means


def over(*rows) -> dict[str, float]:
    means = Means()
    for row in rows:
        means.add(row)
    return means.over(ALONE)


def test_a_number_counts_once_and_a_vector_once_per_element():
    assert over({"a": 1.0}, {"a": torch.tensor([4.0, 7.0])}, {"a": torch.tensor(8.0)}) == {"a": 5.0}


def test_a_name_without_values_is_left_out_until_it_has_some():
    empty = torch.zeros(0)
    assert over({"gap": empty, "a": 1.0}) == {"a": 1.0}
    assert over({"gap": empty}, {"gap": torch.tensor([2.0])}, {"gap": empty}) == {"gap": 2.0}


def test_maxima():
    assert over({"a_max": -3.0}, {"a_max": torch.tensor([-5.0, -2.0])}, {"a_max": -4.0}) == {"a_max": -2.0}


def test_nothing_was_added():
    assert over() == {}


def test_a_metric_keeps_no_graph():
    metric = torch.ones(3, requires_grad=True) * 2
    assert over({"a": metric}) == {"a": 2.0}


@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=5), min_size=1, max_size=6))
def test_any_split_gives_the_mean_of_all(parts):
    """The average over micro-batches equals that over all values at once."""
    flat = [value for part in parts for value in part]
    got = over(*({"a": torch.tensor(part, dtype=torch.float64)} for part in parts))
    assert got == ({"a": pytest.approx(sum(flat) / len(flat), abs=1e-6)} if flat else {})
