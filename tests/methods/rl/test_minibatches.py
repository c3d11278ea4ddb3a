"""Minibatches: equal numbers of passes on all ranks, and one mean over all useful samples."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unified_trainer.methods.rl.minibatches import plan_minibatches


def plans(useful: list[int], advantages: list[float], ranks: int, updates: int, micro: int):
    flags, values = torch.tensor(useful, dtype=torch.bool), torch.tensor(advantages)
    return [plan_minibatches(flags, values, rank, ranks, updates, micro) for rank in range(ranks)]


def test_all_samples_are_in_order_and_count_the_same():
    (minibatches,) = plans([1] * 8, [1.0] * 8, ranks=1, updates=2, micro=2)
    assert [[part.rows.tolist() for part in parts] for parts in minibatches] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert all(part.weights.tolist() == [0.25] * 2 for parts in minibatches for part in parts)


def test_a_rank_with_less_fills_up_with_nothing():
    """Rank 0 keeps three of its four samples, rank 1 none: both make two passes, and the mean is over three."""
    first, second = plans([1, 0, 1, 1, 0, 0, 0, 0], [1.0] * 8, ranks=2, updates=1, micro=2)
    assert [part.rows.tolist() for part in first[0]] == [[0, 2], [3, 0]]
    assert [part.weights.tolist() for part in first[0]] == [pytest.approx([2 / 3, 2 / 3]), pytest.approx([2 / 3, 0])]
    assert [part.weights.tolist() for part in second[0]] == [[0.0, 0.0], [0.0, 0.0]]


def test_an_update_without_any_advantage_has_no_minibatches():
    """It has none on any rank, even if useful samples are left or dropped samples have an advantage."""
    first, second = plans([1, 1, 0, 1, 1, 1, 1, 1], [0, 0, 3, 1, 0, 0, 1, 0.0], ranks=2, updates=2, micro=2)
    assert [len(parts) for parts in first] == [len(parts) for parts in second] == [0, 1]


@given(
    data=st.data(),
    ranks=st.integers(1, 3),
    updates=st.integers(1, 3),
    passes=st.integers(1, 3),
    micro=st.integers(1, 4),
)
def test_the_mean_is_over_the_useful_samples_of_all_ranks(data, ranks, updates, passes, micro):
    size = passes * micro
    count = ranks * updates * size
    useful = data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    values = torch.arange(1.0, count + 1).reshape(ranks, updates, size)
    plan_of_rank = plans(useful, [1.0] * count, ranks, updates, micro)
    chosen = torch.tensor(useful).reshape(ranks, updates, size).bool()
    for update in range(updates):
        minibatches = [plan[update] for plan in plan_of_rank]
        assert len({len(parts) for parts in minibatches}) == 1
        assert all(len(part.rows) == micro for parts in minibatches for part in parts)
        if minibatches[0]:
            sums = [
                sum((values[rank].flatten()[part.rows] * part.weights).sum() for part in parts)
                for rank, parts in enumerate(minibatches)
            ]
            torch.testing.assert_close(sum(sums) / ranks, values[:, update][chosen[:, update]].mean())
