"""Advantages: golden numbers, groups by prompt id and not by position, and nothing from nothing."""

import itertools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from unified_trainer.numerics.advantages import (
    below_threshold,
    best_of_n,
    capped_share,
    curriculum,
    gae,
    global_statistics,
    group_advantages,
    spread,
    tilt_weights,
    totals,
    vtrace,
    zero_variance,
)

GRPO = [-1.095445115, -0.547722558, 0.547722558, 1.095445115]  # of rewards 1, 2, 4, 5: Bessel's std is sqrt(10/3)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
GROUPS = st.lists(st.lists(st.floats(-100, 100), min_size=2, max_size=5), min_size=1, max_size=4)


def double(values) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def assert_equal(got, expected, atol=1e-9):
    torch.testing.assert_close(got, double(expected), rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("grpo", GRPO), ("dr_grpo", [-2, -1, 1, 2]), ("rloo", [-8 / 3, -4 / 3, 4 / 3, 8 / 3])],
)
def test_estimators_golden(estimator, expected):
    assert_equal(group_advantages(double([1, 2, 4, 5]), ["p"] * 4, estimator), expected, atol=1e-7)


def test_rloo_is_against_the_mean_of_the_others():
    rewards = double([1, 2, 4, 5, 3, 9])
    others = [r - (sum(rewards.tolist()[:4]) - r) / 3 for r in rewards.tolist()[:4]]
    assert_equal(group_advantages(rewards, [0, 0, 0, 0, 1, 1], "rloo"), [*others, -6, 6])


TWO_GROUPS, TWO_IDS = [1.0, 2, 4, 5, 10, 14], [0, 0, 0, 0, 1, 1]


def test_global_estimators_by_hand():
    """Mean 6 of all, Bessel's variance (25 + 16 + 4 + 1 + 16 + 64) / 5 = 25.2."""
    std = 25.2**0.5
    rewards = double(TWO_GROUPS)
    expected = [(r - 6) / std for r in TWO_GROUPS]
    assert_equal(group_advantages(rewards, TWO_IDS, "global"), expected, atol=1e-7)
    expected = [d / (std + 1e-4) for d in (-2, -1, 1, 2, -2, 2)]
    assert_equal(group_advantages(rewards, TWO_IDS, "global_std"), expected)


def test_the_largest_std_by_hand():
    """Bessel's variances are (4 + 1 + 1 + 4) / 3 and (4 + 4) / 1: both groups are divided by the second's std."""
    expected = [d / (8**0.5 + 1e-8) for d in (-2, -1, 1, 2, -2, 2)]
    assert_equal(group_advantages(double(TWO_GROUPS), TWO_IDS, "largest_std"), expected)


def test_gdpo_by_hand():
    """Each reward in its group, weighted, summed, then over the batch: a reward's scale does not count."""
    first, second = double(TWO_GROUPS), double([3.0, 3, 3, 7, 2, 1])
    one, two = group_advantages(first, TWO_IDS), group_advantages(second, TWO_IDS)
    mixed = 2 * one + 0.5 * two
    expected = (mixed - mixed.mean()) / mixed.std()
    got = group_advantages(torch.stack([first, second], 1), TWO_IDS, "gdpo", weights=(2.0, 0.5))
    assert_equal(got, expected, atol=1e-7)
    scaled = group_advantages(torch.stack([first, 1000 * second], 1), TWO_IDS, "gdpo", weights=(2.0, 0.5))
    assert_equal(scaled, got, atol=1e-6)
    assert_equal(group_advantages(first, TWO_IDS, "gdpo"), one / one.std(), atol=1e-7)


def test_gdpo_alone_takes_several_rewards_and_as_many_weights():
    with pytest.raises(ValueError, match="grpo takes one reward per sample, not 2"):
        group_advantages(double([[1, 2], [3, 4]]), [0, 0])
    with pytest.raises(ValueError, match="2 rewards but 1 weights"):
        group_advantages(double([[1, 2], [3, 4]]), [0, 0], "gdpo", weights=(1.0,))


@pytest.mark.parametrize("estimator", ["dr_grpo", "rloo", "global", "global_std", "largest_std", "gdpo"])
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_equal_rewards_give_nothing_by_any_estimator(estimator, offset):
    assert not group_advantages(double([0.1 + offset] * 6), TWO_IDS, estimator).any()


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "global_std", "largest_std"])
@pytest.mark.parametrize("size", [1e-3, 4.5, 1e6])
def test_rewards_that_differ_by_rounding_are_equal(estimator, size):
    """A std of rounding would turn rounding into advantages of order 1."""
    exact, ids = size * double([1.0, 1 + 4e-6, 1 - 3e-6, 2.0, 2.0002, 2.0]), [0, 0, 0, 1, 1, 1]
    advantages = group_advantages(exact.float(), ids, estimator)
    assert not advantages[:3].any() and advantages[3:].any()
    assert zero_variance(exact.float(), ids).tolist() == [True] * 3 + [False] * 3
    assert group_advantages(exact, ids, estimator)[:3].any() and not zero_variance(exact, ids).any()  # no rounding


@pytest.mark.parametrize("estimator", ["global", "global_std", "gdpo"])
def test_an_offset_of_all_rewards_does_not_matter(estimator):
    """Sums of squares of values around 1e8 have lost the spread of 1."""
    rewards = double(TWO_GROUPS)
    far = group_advantages(rewards + 1e8, TWO_IDS, estimator)
    assert_equal(far, group_advantages(rewards, TWO_IDS, estimator), atol=1e-6)


@given(values=st.lists(st.floats(-100, 100), min_size=2, max_size=20), cut=st.integers(1, 19))
def test_statistics_from_totals_of_parts_are_those_of_all(values, cut):
    parts = [totals(double(part)) for part in (values[:cut], values[cut:])]
    mean, std = global_statistics(*(parts[0] + parts[1]))
    assert float(mean) == pytest.approx(float(double(values).mean()), abs=1e-9)
    assert float(std) == pytest.approx(float(double(values).std()), abs=1e-4)


def test_statistics_of_one_sample_are_refused():
    with pytest.raises(ValueError, match="at least two samples, not 1"):
        global_statistics(3.0, 9.0, 1)


# Filters.


def test_groups_without_variance():
    ids = [0, 1, 0, 1, 2, 2]
    assert zero_variance(double([1, 5, 1, 5.5, 0.1, 0.1]), ids).tolist() == [True, False, True, False, True, True]


def test_the_best_and_the_worst_of_each_group_are_kept():
    advantages, ids = double([3, -1, 0, 1, -2, 7, 5, 6, 4, 8]), [0] * 5 + [1] * 5
    assert best_of_n(advantages, ids, 4).tolist() == [True, True, False, True, True, True, True, False, True, True]
    assert best_of_n(advantages, ids, 2).tolist() == [True, False, False, False, True] + [False] * 3 + [True, True]


@given(values=st.lists(st.integers(0, 3), min_size=4, max_size=9), half=st.integers(1, 2))
def test_as_many_are_kept_as_asked_also_among_equals(values, half):
    kept = best_of_n(double(values), [0] * len(values), 2 * half)
    chosen, left = double(values)[kept], double(values)[~kept]
    assert len(chosen) == 2 * half
    if len(left):
        assert chosen.sort().values[half - 1] <= left.min() and left.max() <= chosen.sort().values[half]


@pytest.mark.parametrize("keep", [0, 1, 3, 6])
def test_what_cannot_be_kept(keep):
    with pytest.raises(ValueError, match=f"cannot keep {keep} of the 4 samples of prompt 'p'"):
        best_of_n(double([1, 2, 3, 4]), ["p"] * 4, keep)


def test_spread_in_and_between_groups():
    """Stds sqrt(10/3) and sqrt(8) in, means 3 and 12 between."""
    within, between = spread(double(TWO_GROUPS), TWO_IDS)
    assert within == pytest.approx(((10 / 3) ** 0.5 + 8**0.5) / 2)
    assert between == pytest.approx(9 / 2**0.5)
    assert spread(double([1, 2]), [0, 0])[1] == 0


def test_the_curriculum_draws_what_failed():
    assert_equal(curriculum([3, 0, 1]), [4 / 7, 1 / 7, 2 / 7], atol=1e-15)
    with pytest.raises(ValueError, match="failures are counts"):
        curriculum([1, -1])


# Off-policy.

RHO, GAMMA = double([0.5, 2, 1, 0.8]), double([0.99, 0.99, 0.99, 0])
REWARDS, VALUES = double([0, 1, 0, 2]), double([0.1, 0.2, 0.3, 0.4])


def test_vtrace_golden():
    vs, td = vtrace(RHO.log(), REWARDS, VALUES, GAMMA, 0.0)
    assert_equal(vs, [1.360051, 2.646568, 1.6632, 1.68], atol=5e-7)
    assert_equal(td, [2.520102, 2.446568, 1.3632, 1.6], atol=5e-7)


def test_vtrace_of_many_is_vtrace_of_each():
    other = (RHO.flip(0).log(), REWARDS.flip(0), VALUES.flip(0), 0.9 * torch.ones(4, dtype=torch.float64))
    both = [torch.stack(pair) for pair in zip((RHO.log(), REWARDS, VALUES, GAMMA), other, strict=True)]
    vs, td = vtrace(*both, double([0.0, 0.7]), rho_bar=1.5, c_bar=0.9)
    alone = vtrace(*other, 0.7, rho_bar=1.5, c_bar=0.9)
    assert_equal(vs[1], alone[0], atol=1e-12)
    assert_equal(td[1], alone[1], atol=1e-12)


@given(seed=st.integers(0, 100))
def test_vtrace_on_policy_is_the_discounted_return(seed):
    """rho = 1: vs is the n-step return with the bootstrap at its end, whatever the values."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    vs, td = vtrace(torch.zeros_like(values), rewards, values, torch.full_like(values, 0.9), 3.0)
    returns, after = [], 3.0
    for reward in reversed(rewards.tolist()):
        after = reward + 0.9 * after
        returns.insert(0, after)
    assert_equal(vs, returns, atol=1e-9)
    assert_equal(td, vs - values, atol=1e-9)


def test_vtrace_caps_are_two():
    """rho_bar bounds how a step corrects its own value, c_bar how far later corrections travel back."""
    step = (RHO.log(), REWARDS, VALUES, GAMMA, 0.0)
    near, far = vtrace(*step, rho_bar=2.0, c_bar=1.0)[0], vtrace(*step, rho_bar=2.0, c_bar=0.0)[0]
    following = double([0.2, 0.3, 0.4, 0])
    assert_equal(far, VALUES + RHO * (REWARDS + GAMMA * following - VALUES), atol=1e-12)
    assert not torch.allclose(near, far)


def test_vtrace_has_no_gradient():
    log_rho = RHO.log().requires_grad_()
    assert not any(part.requires_grad for part in vtrace(log_rho, REWARDS, VALUES, GAMMA, 0.0))


STEP = (double([0, 0, 2]), double([0.5, 0.2, 0.4]), double([0.9, 0.9, 0.9]), 0.0)  # rewards, values, discounts, end


def test_gae_golden():
    """By hand: delta = -.32, .16, 1.6, and A = delta + .9 * .5 A' from the end."""
    targets, advantages = gae(*STEP, trace_decay=0.5)
    assert_equal(advantages, [0.076, 0.88, 1.6], atol=1e-12)
    assert_equal(targets, [0.576, 1.08, 2.0], atol=1e-12)


def test_gae_at_its_ends():
    """lambda 1 is the discounted return minus the value, lambda 0 one step of temporal difference."""
    values = STEP[1]
    targets, advantages = gae(*STEP, trace_decay=1.0)
    assert_equal(targets, [0.81 * 2, 0.9 * 2, 2], atol=1e-12)
    assert_equal(advantages, targets - values, atol=1e-12)
    assert_equal(gae(*STEP, trace_decay=0.0)[1], [0.9 * 0.2 - 0.5, 0.9 * 0.4 - 0.2, 2 - 0.4], atol=1e-12)


def test_vtrace_with_a_decay_by_hand():
    """rho = .5, 2, .8; delta = .5 * -.32, 1 * .16, .8 * 1.6; c = .5 min(1, rho)."""
    vs, td = vtrace(double([0.5, 2.0, 0.8]).log(), *STEP, trace_decay=0.5)
    assert_equal(vs, [0.5056, 0.936, 1.68], atol=1e-12)
    assert_equal(td, [0.0112, 0.736, 1.6], atol=1e-12)


@given(seed=st.integers(0, 100), decay=st.floats(0, 1))
def test_vtrace_without_lag_is_gae(seed, decay):
    generator = torch.Generator().manual_seed(seed)
    rewards, values, discounts = torch.rand(3, 2, 5, generator=generator, dtype=torch.float64)
    for rho_bar, c_bar in ((1.0, 1.0), (2.0, 1.5)):
        got = vtrace(torch.zeros_like(values), rewards, values, discounts, 0.3, rho_bar, c_bar, decay)
        after, expected = torch.zeros(2), []
        for s in reversed(range(5)):
            following = values[:, s + 1] if s < 4 else 0.3
            after = rewards[:, s] + discounts[:, s] * following - values[:, s] + discounts[:, s] * decay * after
            expected.insert(0, after)
        assert_equal(got[1], torch.stack(expected, 1), atol=1e-12)
        assert_equal(got[0], got[1] + values, atol=1e-12)


@pytest.mark.parametrize("bar", [1.0, 1.2, 1e9])
def test_vtrace_targets_are_unbiased_for_the_truncated_policy(bar):
    """Two steps of two actions, enumerated: samples of mu, values of the policy in proportion to min(bar mu, pi).

    At its own values the expectation of every target is the value (arXiv:1802.01561, theorem 1); a bar that truncates
    nothing leaves the values of pi.
    """
    mu, pi = double([0.7, 0.3]), double([0.4, 0.6])
    end = double([[1.0, -2.0], [0.5, 4.0]])  # reward of each pair of actions
    held = torch.minimum(bar * mu, pi)
    policy = held / held.sum()
    second = end @ policy  # after each first action
    first = policy @ second
    expected = 0.0
    for a in range(2):
        for b in range(2):
            log_rho = double([pi[a] / mu[a], pi[b] / mu[b]]).log()
            values = torch.stack([first, second[a]])
            vs, _ = vtrace(log_rho, double([0, end[a, b]]), values, double([1, 1]), 0.0, rho_bar=bar, c_bar=bar)
            expected = expected + mu[a] * mu[b] * vs[0]
    assert_equal(expected, first, atol=1e-12)
    if bar > 10:
        assert_equal(first, pi @ end @ pi, atol=1e-12)


def test_groups_are_keyed_by_prompt_id():
    """Two interleaved groups: neither adjacent samples nor equal shares by position are a group."""
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
    with pytest.raises(ValueError, match="prompt 'b' has one sample"):
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


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_the_tilt_reaches_its_law_for_groups_of_every_size(n, beta):
    """Over all groups of n samples of q = p exp(r / beta) / Z, the weights exp(-r / beta) give back p."""
    rewards, p = double([0, 1 / 3, 2 / 3, 1]), double([0.4, 0.3, 0.2, 0.1])
    q = p * (rewards / beta).exp() / (p * (rewards / beta).exp()).sum()
    groups = torch.tensor([*itertools.product(range(4), repeat=n)])
    weights = tilt_weights(rewards[groups].flatten(), torch.arange(len(groups)).repeat_interleave(n), -beta)
    joint = q[groups].prod(1) * weights.reshape(groups.shape)[:, 0]
    found = torch.zeros(4).double().index_add(0, groups[:, 0], joint)
    assert_equal(found / found.sum(), p)


def test_the_share_of_cut_weights():
    """Exponents 2, -2, 0 and 0: one weight of e^2 is cut at 7, and none at 8."""
    rewards, ids = double([0, 1, 5, 5]), ["a", "a", "b", "b"]
    assert [capped_share(rewards, ids, -0.5, largest) for largest in (1.5, 7.0, 8.0, float("inf"))] == [
        0.25,
        0.25,
        0,
        0,
    ]
    weights = tilt_weights(rewards, ids, -0.5, 7.0)
    assert_equal(weights * (7 + 2 + double(-2).exp()) / 4, [7, double(-2).exp(), 1, 1])
