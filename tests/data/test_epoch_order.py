"""The order of rows in row groups: every row once an epoch, at random, few row groups at a time on every rank."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified_trainer.data.epoch_order import shuffled_by_row_groups

GROUPS = [8] * 40
BATCH = 8


def order(epoch=0, seed=0, row_groups=GROUPS, batch=BATCH, lanes=BATCH) -> np.ndarray:
    return shuffled_by_row_groups(epoch, seed=seed, row_groups=row_groups, layouts=[(0, batch, lanes)])


def reads(rows: np.ndarray, sizes: list[int], batch: int, ranks: int) -> int:
    """Count the rows of the row groups that all ranks read, each of which keeps those of its last batch."""
    group_of, total = np.repeat(np.arange(len(sizes)), sizes), 0
    for rank in range(ranks):
        kept: set[int] = set()
        for start in range(0, len(rows), batch):
            mine = rows[start : start + batch][rank * batch // ranks : (rank + 1) * batch // ranks]
            needed = set(group_of[mine].tolist())
            total += sum(sizes[group] for group in needed - kept)
            kept = needed
    return total


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(0, 5),
)
def test_every_row_is_drawn_once_an_epoch(row_groups, batch, lanes, epoch):
    """Also of row groups of unlike sizes, of fewer row groups than lanes, and of epochs that begin within a batch."""
    drawn = order(epoch, row_groups=row_groups, batch=batch, lanes=min(lanes, batch))
    assert sorted(drawn.tolist()) == list(range(sum(row_groups)))


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(order(epoch, seed).tolist()) for epoch in range(3) for seed in range(2)}
    assert len(orders) == 6 and np.array_equal(order(2, 1), order(2, 1))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("sizes", [GROUPS, [5, 8, 3, 8, 6] * 12])
def test_row_groups_are_read_once_on_any_number_of_ranks(ranks, sizes):
    """But for those that are cut between two ranks: at most ranks - 1 of them are read a second time."""
    wanted = sum(sizes)
    assert wanted <= reads(order(row_groups=sizes), sizes, BATCH, ranks) <= wanted + (ranks - 1) * max(sizes)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_epochs_that_end_within_a_batch_are_read_as_well(ranks):
    """The lanes of the next epoch go on at their own positions of the batch."""
    sizes = [7] * 41
    rows = np.concatenate([order(epoch, row_groups=sizes, lanes=4) for epoch in range(3)])
    assert reads(rows, sizes, BATCH, ranks) <= 3 * (sum(sizes) + (ranks - 1) * 7) + BATCH * 7


def test_a_plain_shuffle_would_read_each_row_group_for_every_row():
    shuffled = np.random.default_rng(0).permutation(sum(GROUPS))
    assert reads(shuffled, GROUPS, BATCH, 1) > 5 * sum(GROUPS)


def test_a_batch_mixes_as_many_row_groups_as_there_are_lanes():
    group_of = np.repeat(np.arange(len(GROUPS)), GROUPS)
    for lanes in (1, 2, 8):
        batches = group_of[order(lanes=lanes)].reshape(-1, BATCH)
        mixed = np.mean([len(set(batch.tolist())) for batch in batches])
        assert lanes <= mixed <= 1.3 * lanes


def test_rows_of_a_row_group_come_in_random_order():
    """The mean distance of consecutive rows is that of a random order, a third of the size, and not 1."""
    rows = order(row_groups=[1000], lanes=1)
    assert 300 < np.abs(np.diff(rows)).mean() < 370


def test_places_of_rows_are_uniform():
    """Each of 64 rows comes in each quarter of 400 epochs 100 times, give or take five standard deviations."""
    seen = np.zeros((64, 4))
    for epoch in range(400):
        drawn = order(epoch, row_groups=[4] * 16, batch=4, lanes=4)
        seen[drawn, np.arange(64) // 16] += 1
    assert np.abs(seen - 100).max() < 5 * (400 * 0.25 * 0.75) ** 0.5
