"""Randomness is a function of (seed, step, name, sample) and of nothing else."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unified_trainer.parallel.random import Streams, generator

SHAPE = (16, 2, 4, 4)
IDS = st.lists(st.integers(0, 1000), min_size=1, max_size=6, unique=True)


@pytest.mark.slow
@given(seed=st.integers(0, 2**31), step=st.integers(0, 10**6), ids=IDS, order=st.randoms(use_true_random=False))
def test_a_sample_draws_the_same_in_any_company(seed, step, ids, order):
    """Micro-batches, ranks and order cannot matter: each row depends on its own key."""
    together = Streams(seed, step).noise("x", ids, (3, 2))
    shuffled = list(ids)
    order.shuffle(shuffled)
    rng = Streams(seed, step)
    for sample in shuffled:
        assert torch.equal(rng.noise("x", [sample], (3, 2))[0], together[ids.index(sample)])
    levels = rng.uniform("y", ids)
    assert torch.equal(levels, torch.cat([rng.uniform("y", [sample]) for sample in ids]))
    assert levels.dtype == torch.float64 and bool(((levels >= 0) & (levels < 1)).all())


def test_equal_keys_are_equal_noise():
    drawn = Streams(0, 0).noise("x", [4, 9, 4], SHAPE)
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


def test_seed_step_name_and_sample_each_change_everything():
    """The correlation of independent standard normals over 512 elements is below 5 / sqrt(512) = .22."""
    keys = itertools.product((0, 1), (0, 1, 10), ("a", "b"), (0, 1, 10))
    drawn = torch.stack([Streams(seed, step).noise(name, [key], SHAPE)[0].flatten() for seed, step, name, key in keys])
    correlation = torch.corrcoef(drawn) - torch.eye(len(drawn))
    assert float(correlation.abs().max()) < 0.22


def test_noise_is_standard_normal():
    drawn = Streams(0, 0).noise("x", range(64), (16, 4, 4))
    assert drawn.dtype == torch.float32
    assert float(drawn.mean()) == pytest.approx(0, abs=0.02)
    assert float(drawn.var()) == pytest.approx(1, abs=0.03)
    assert float(drawn.pow(4).mean()) == pytest.approx(3, abs=0.2)


def test_the_shared_stream_is_equal_on_all_ranks_and_micro_batches():
    """Draws for the samples of a micro-batch do not advance the shared stream."""
    quiet, busy = Streams(3, 5), Streams(3, 5)
    busy.noise("x", range(7), SHAPE)
    busy.uniform("y", range(3))
    assert quiet.shared.permutation(20).tolist() == busy.shared.permutation(20).tolist()
    assert not np.array_equal(Streams(3, 5).shared.random(8), Streams(3, 6).shared.random(8))
    assert not np.array_equal(Streams(3, 5).shared.random(8), Streams(4, 5).shared.random(8))


def test_keys_do_not_run_into_each_other():
    assert generator(1, 23).random() != generator(12, 3).random()


def test_numbered_streams_draw_anew_and_share_what_is_shared():
    rng = Streams(3, 5)
    drawn = torch.stack([rng.numbered(number).noise("x", [4], SHAPE)[0].flatten() for number in range(3)])
    assert float((torch.corrcoef(drawn) - torch.eye(3)).abs().max()) < 0.22
    assert rng.numbered(0) is rng and rng.numbered(1).shared is rng.shared
    assert torch.equal(rng.numbered(2).noise("x", [4], SHAPE), Streams(3, 5).numbered(2).noise("x", [4], SHAPE))
    again = rng.numbered(2).restarted()
    assert torch.equal(again.noise("x", [4], SHAPE)[0].flatten(), drawn[2])
    assert again.shared is not rng.shared
