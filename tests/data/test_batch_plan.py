"""The arithmetic of a step: golden counts, loud failures, and an exact partition over any ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified_trainer.data.batch_plan import BatchPlan

KEYS = ("P", "n", "G", "micro")


def plan(prompts=256, num_samples=6, prompts_per_update=64, micro_batch=2) -> BatchPlan:
    return BatchPlan(prompts, num_samples, prompts_per_update, micro_batch, KEYS)


@st.composite
def dividing(draw) -> tuple[BatchPlan, int]:
    """A plan and a number of ranks that divides an update's samples."""
    per_update, num_samples, updates = draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    ranks = draw(st.sampled_from([r for r in range(1, 37) if per_update * num_samples % r == 0]))
    return plan(per_update * updates, num_samples, per_update, 1), ranks


def test_golden_counts():
    counts = plan().table(8)
    assert counts["samples"] == 1536
    assert counts["samples per rank"] == 192
    assert counts["optimizer updates"] == 4
    assert counts["accumulation"] == 24
    assert counts["samples per update and rank"] == 48


@pytest.mark.parametrize(
    ("change", "ranks", "message"),
    [
        ({"prompts": 250}, 8, r"P \(250\) must be divisible by G \(64\)"),
        ({"prompts": 32}, 8, r"P \(32\) must be divisible by G \(64\)"),
        ({"prompts_per_update": 0}, 8, r"G must be at least 1, not 0"),
        ({"num_samples": 5}, 7, r"G x n \(320\) must be divisible by the number of ranks \(7\)"),
        ({"num_samples": 0}, 1, r"n must be at least 1, not 0"),
        ({"micro_batch": 5}, 8, r"G x n / ranks \(48\) must be divisible by micro \(5\)"),
        ({"micro_batch": 96}, 8, r"G x n / ranks \(48\) must be divisible by micro \(96\)"),
        ({"micro_batch": 0}, 8, r"micro must be at least 1, not 0"),
    ],
)
def test_what_does_not_divide_is_named(change, ranks, message):
    with pytest.raises(ValueError, match=message):
        plan(**change).table(ranks)


@given(case=dividing())
def test_the_ranks_partition_the_step(case):
    batch, ranks = case
    shares = [batch.rank_samples(rank, ranks) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(position for share in shares for position in share) == list(range(batch.prompts * batch.num_samples))


@given(case=dividing())
def test_every_update_is_spread_over_all_ranks(case):
    """Update u holds prompts [u G, (u + 1) G): the same samples for any number of ranks."""
    batch, ranks = case
    counts = batch.table(ranks)
    per_update, share = batch.prompts_per_update * batch.num_samples, counts["samples per update and rank"]
    for update in range(counts["optimizer updates"]):
        mine = slice(update * share, (update + 1) * share)
        held = [position for rank in range(ranks) for position in batch.rank_samples(rank, ranks)[mine]]
        assert sorted(held) == list(range(update * per_update, (update + 1) * per_update))
