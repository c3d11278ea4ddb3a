"""Priorities of stored groups: the law of the draw, the decay, and the place that is overwritten."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from unified_trainer.numerics.priorities import draw_in_proportion, overwritten, present_priority


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_a_group_is_drawn_in_proportion_to_its_weight(whole):
    """With whole weights of sum n, each of n equal parts of [0, 1) draws one group, at both of its ends."""
    weights, total = torch.tensor(whole).double(), sum(whole)
    if not total:
        assert draw_in_proportion(weights, 0.5) is None
        return
    for inside in (1e-9, 0.5, 1 - 1e-9):
        drawn = [draw_in_proportion(weights, (part + inside) / total) for part in range(total)]
        assert [drawn.count(i) for i in range(len(whole))] == whole


def test_the_ends_of_the_interval_draw_no_group_of_weight_0():
    weights = torch.tensor([0.0, 1.0, 3.0, 0.0])
    assert draw_in_proportion(weights, 0.0) == 1
    assert draw_in_proportion(weights, 1 - 2**-53) == 2


def test_a_priority_halves_in_a_half_life_and_ends_at_the_largest_age():
    age = torch.arange(7)
    found = present_priority(torch.full((7,), 8.0).double(), age, 2.0, 5)
    torch.testing.assert_close(found, torch.tensor([8, 8 / 2**0.5, 4, 8 / 2**1.5, 2, 8 / 2**2.5, 0]).double())


@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=4), st.integers(0, 4))
def test_the_first_of_the_least_is_overwritten_by_a_higher_priority_alone(rows, new):
    stored = torch.tensor(rows).double()
    at, taken = overwritten(stored, torch.full((len(rows),), float(new)).double())
    assert at.tolist() == [row.index(min(row)) for row in rows]
    assert taken.tolist() == [new > min(row) for row in rows]
