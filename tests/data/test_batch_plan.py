"""The arithmetic of a step: golden counts, loud failures, and an exact partition over any ranks."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unified_trainer.data.batch_plan import BatchPlan
from unified_trainer.parallel.mesh import Mesh, ParallelConfig
from unified_trainer.run.plan.plan import check
from unified_trainer.run.registry import METHODS
from unified_trainer.run.settings.command_line import parse

KEYS = ("P", "n", "G", "micro")


def plan(prompts=256, num_samples=6, prompts_per_update=64, micro_batch=2) -> BatchPlan:
    return BatchPlan(prompts, num_samples, prompts_per_update, micro_batch, KEYS)


@st.composite
def dividing(draw) -> tuple[tuple[int, ...], int]:
    """The sizes of a plan and a number of ranks that divides an update's samples."""
    per_update, num_samples, updates = draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    ranks = draw(st.sampled_from([r for r in range(1, 37) if per_update * num_samples % r == 0]))
    return (per_update * updates, num_samples, per_update, 1), ranks


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
        ({"prompts": 250}, 8, r"P \(250\) must be divisible by G \(64\): set P to 192 or 256"),
        ({"prompts": 32}, 8, r"P \(32\) must be divisible by G \(64\): set P to 64"),
        ({"prompts_per_update": 0}, 8, r"G must be at least 1, not 0"),
        ({"num_samples": 5}, 7, r"G x n \(320\) must be divisible by the number of ranks \(7\): set G to 63 or 70"),
        ({"num_samples": 4, "prompts_per_update": 1}, 8, r"G x n \(4\) must be .* ranks \(8\): set G to 2"),
        ({"num_samples": 0}, 1, r"n must be at least 1, not 0"),
        ({"micro_batch": 0}, 8, r"micro must be at least 1, not 0"),
    ],
)
def test_what_does_not_divide_is_named(change, ranks, message):
    with pytest.raises(ValueError, match=message):
        plan(**change).table(ranks)


@pytest.mark.parametrize(
    ("change", "ranks", "near"),
    [
        ({"num_samples": 1}, 42, (336, 84)),  # 64 lies between 42 and 84; four updates as before
        ({"num_samples": 1}, 320, (1280, 320)),
        ({"num_samples": 6}, 42, (252, 63)),  # 7 prompts of 6 samples are 42
        ({"num_samples": 6, "whole_groups": True}, 42, (336, 84)),
        ({"num_samples": 1, "prompts_per_update": 3, "prompts": 3}, 42, (42, 42)),
        ({}, 8, (256, 64)),
    ],
)
def test_the_nearest_batch_is_one_that_the_ranks_divide(change, ranks, near):
    nearest = dataclasses.replace(plan(), **change).nearest(ranks)
    assert (nearest.prompts, nearest.prompts_per_update) == near
    assert nearest.table(ranks)["optimizer updates"] == (4 if near[0] > near[1] else 1)


@pytest.mark.parametrize(("limit", "size"), [(1, 1), (5, 4), (32, 24), (47, 24), (48, 48), (96, 48)])
def test_a_micro_batch_is_an_upper_bound(limit, size):
    """A rank with 48 samples of an update takes the largest divisor of 48 that is not above the setting."""
    counts = plan(micro_batch=limit).table(8)
    assert (counts["micro-batch"], counts["accumulation"]) == (size, 48 // size)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_of_the_tiny_recipe_fits_any_usual_number_of_ranks(method):
    run = parse(["--method", method])
    for ranks in (1, 2, 4, 8, 16):
        counts = check(run, Mesh(torch.device("cpu"), size=ranks, config=ParallelConfig(shard=ranks))).counts
        per_update = counts["samples"] // counts["optimizer updates"]
        assert counts["micro-batch"] * counts["accumulation"] * ranks == per_update, ranks


@given(case=dividing())
def test_the_ranks_partition_the_step(case):
    batch, ranks = plan(*case[0]), case[1]
    shares = [batch.rank_samples(rank, ranks) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(position for share in shares for position in share) == list(range(batch.prompts * batch.num_samples))


@given(case=dividing())
def test_every_update_is_spread_over_all_ranks(case):
    """Update u holds prompts [u G, (u + 1) G): the same samples for any number of ranks."""
    batch, ranks = plan(*case[0]), case[1]
    counts = batch.table(ranks)
    per_update, share = batch.prompts_per_update * batch.num_samples, counts["samples per update and rank"]
    for update in range(counts["optimizer updates"]):
        mine = slice(update * share, (update + 1) * share)
        held = [position for rank in range(ranks) for position in batch.rank_samples(rank, ranks)[mine]]
        assert sorted(held) == list(range(update * per_update, (update + 1) * per_update))
