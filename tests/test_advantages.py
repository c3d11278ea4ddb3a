"""Advantages: golden numbers, groups by prompt id and not by position, and nothing from nothing."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from unified_trainer.advantages import below_threshold, group_advantages

GRPO = [-1.095445115, -0.547722558, 0.547722558, 1.095445115]  # of rewards 1, 2, 4, 5: Bessel's std is sqrt(10/3)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
GROUPS = st.lists(st.lists(st.floats(-100, 100), min_size=2, max_size=5), min_size=1, max_size=4)


def double(values) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def assert_equal(got, expected, atol=1e-9):
    torch.testing.assert_close(got, double(expected), rtol=0, atol=atol)


def test_grpo_golden():
    assert_equal(group_advantages(double([1, 2, 4, 5]), ["p"] * 4), GRPO, atol=1e-7)


def test_groups_are_keyed_by_prompt_id():
    """Two interleaved groups: neither neighbours nor equal shares by position belong together."""
    rewards = double([1, 10, 2, 40, 4, 50, 5, 20])
    advantages = group_advantages(rewards, [7, 3, 7, 3, 7, 3, 7, 3])
    assert_equal(advantages[0::2], GRPO, atol=1e-7)
    assert_equal(advantages[1::2], [GRPO[0], GRPO[2], GRPO[3], GRPO[1]], atol=1e-7)


@pytest.mark.parametrize("ids", [[0, 1, 0, 1], ("a", "b", "a", "b"), torch.tensor([5, 6, 5, 6])])
def test_ids_of_any_kind(ids):
    half = 2**-0.5
    assert_equal(group_advantages(double([0, 3, 1, 1]), ids), [-half, half, half, -half], atol=1e-7)


@given(groups=GROUPS, order=st.randoms(use_true_random=False))
def test_the_order_of_the_samples_does_not_matter(groups, order):
    flat = [(reward, name) for name, group in enumerate(groups) for reward in group]
    places = list(range(len(flat)))
    order.shuffle(places)
    rewards, ids = double([r for r, _ in flat]), [name for _, name in flat]
    shuffled = group_advantages(rewards[places], [ids[i] for i in places])
    assert_equal(shuffled, group_advantages(rewards, ids)[places], atol=1e-6)


@given(groups=GROUPS, gain=st.floats(0.5, 10), offset=st.floats(-10, 10))
def test_scale_and_offset_of_rewards_do_not_matter(groups, gain, offset):
    groups = [[round(r, 1) for r in group] for group in groups]  # spreads far above eps, or none
    rewards = double([r for group in groups for r in group])
    ids = [name for name, group in enumerate(groups) for _ in group]
    advantages = group_advantages(rewards, ids)
    if all(len(set(group)) > 1 for group in groups):
        assert_equal(group_advantages(gain * rewards + offset, ids), advantages, atol=1e-5)
    for name, group in enumerate(groups):
        mine = advantages[[i for i, other in enumerate(ids) if other == name]]
        assert abs(float(mine.sum())) < 1e-6
        assert float(mine.std()) == pytest.approx(1 if len(set(group)) > 1 else 0, abs=1e-5)


@given(reward=st.floats(-1e6, 1e6), size=st.integers(2, 7), dtype=st.sampled_from(DTYPES[2:]))
@example(reward=0.1, size=3, dtype=torch.float64)  # the mean of three .1 is not .1
def test_equal_rewards_give_exactly_nothing(reward, size, dtype):
    """Whatever rounding the mean has: (r - mean) must not be blown up by a tiny std."""
    rewards = torch.full((size,), reward, dtype=dtype)
    assert torch.equal(group_advantages(rewards, [0] * size), torch.zeros(size, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype):
    advantages = group_advantages(torch.tensor([1, 2, 4, 5], dtype=dtype), [0] * 4)
    assert advantages.dtype == dtype
    torch.testing.assert_close(advantages, double(GRPO).to(dtype), rtol=1e-3, atol=1e-3)


def test_a_group_of_one_is_an_error():
    with pytest.raises(ValueError, match="prompt 'b' has a group of one sample"):
        group_advantages(double([1, 2, 3]), ["a", "a", "b"])


def test_counts_must_match():
    with pytest.raises(ValueError, match="3 rewards but 2 prompt ids"):
        group_advantages(double([1, 2, 3]), ["a", "a"])


def test_an_unknown_estimator_is_named(unchecked):
    with pytest.raises(ValueError, match="unknown advantage estimator 'gpro'; have grpo"):
        group_advantages(double([1, 2]), [0, 0], "gpro")


def test_the_threshold_is_strict_and_looks_at_the_mean_of_the_group():
    rewards, ids = double([0, 2, 5, -5.1, 9, 9]), [0, 0, 1, 1, 2, 2]
    assert below_threshold(rewards, ids, 1.0).tolist() == [False, False, True, True, False, False]
    assert below_threshold(rewards, ids, 1.0 + 1e-9).tolist() == [True, True, True, True, False, False]
    assert not below_threshold(rewards, ids, float("-inf")).any()
