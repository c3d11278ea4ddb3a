"""Returns and advantages of chunks: discounted sums, one chunk, and branches that share their first chunks."""

import pytest
import torch

from unified_trainer.numerics.advantages import group_advantages
from unified_trainer.numerics.chunk_credit import chunk_advantages, chunk_log_ratios, chunk_returns
from unified_trainer.numerics.flow import sigma_table
from unified_trainer.numerics.kernels import Policy

REWARDS = torch.tensor([[1.0, 2.0, 4.0], [0.0, -1.0, 3.0], [5.0, 0.5, 0.0], [2.0, 2.0, 2.0]])
IDS = torch.tensor([7, 7, 3, 3])


def test_a_return_is_the_discounted_sum_of_the_rewards_from_its_chunk_on():
    """1 + .5 (2 + .5 x 4) = 3, 2 + .5 x 4 = 4, 4."""
    assert chunk_returns(REWARDS, 0.5)[0].tolist() == [3.0, 4.0, 4.0]
    assert chunk_returns(REWARDS, 1.0)[1].tolist() == [2.0, 2.0, 3.0]
    powers = torch.tensor([0.9**j for j in range(3)])
    for i in range(3):
        expected = (REWARDS[:, i:] * powers[: 3 - i]).sum(1)
        torch.testing.assert_close(chunk_returns(REWARDS, 0.9)[:, i], expected)


def test_without_discount_weight_a_chunk_has_its_own_reward_alone():
    assert torch.equal(chunk_returns(REWARDS, 0.0), REWARDS)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "global", "global_std"])
def test_one_chunk_has_the_advantages_of_the_clip_bit_for_bit(estimator):
    clip = group_advantages(REWARDS[:, 0], IDS, estimator)
    chunks = chunk_advantages(chunk_returns(REWARDS[:, :1], 0.7), IDS, estimator)
    assert chunks.shape == (4, 1) and torch.equal(chunks[:, 0], clip)


def test_a_reward_of_the_last_chunk_is_that_of_the_clip_in_every_chunk():
    rewards = torch.zeros(4, 3)
    rewards[:, 2] = REWARDS[:, 0]
    advantages = chunk_advantages(chunk_returns(rewards, 1.0), IDS, "grpo")
    assert torch.equal(advantages, group_advantages(REWARDS[:, 0], IDS)[:, None].expand(-1, 3))


def test_chunks_after_the_rewarded_one_have_no_advantage():
    rewards = torch.zeros(4, 3)
    rewards[:, 1] = REWARDS[:, 0]
    for discount, without in ((1.0, [2]), (0.0, [0, 2])):
        advantages = chunk_advantages(chunk_returns(rewards, discount), IDS, "grpo")
        assert not advantages[:, without].any() and advantages[:, 1].all()


def test_branches_are_compared_within_themselves_and_their_shared_chunk_by_their_means():
    """One prompt, two branches of two samples, dr_grpo: deviations from the branch's mean, and of it from the mean."""
    returns = torch.tensor([[4.0, 1.0], [2.0, 3.0], [0.0, 10.0], [-2.0, 30.0]])
    branches = torch.tensor([5, 5, 4, 4])
    found = chunk_advantages(returns, torch.zeros(4, dtype=torch.int64), "dr_grpo", branches, shared=1)
    assert found[:, 1].tolist() == [-1.0, 1.0, -10.0, 10.0]  # 20 apart, but compared within the branch alone
    assert found[:, 0].tolist() == [2.0, 2.0, -2.0, -2.0]  # means 3 and -1 around 1
    alone = chunk_advantages(returns, branches, "dr_grpo", branches, shared=1)
    assert not alone[:, 0].any() and torch.equal(alone[:, 1], found[:, 1])


def test_the_log_ratios_of_chunks_sum_to_that_of_the_clip_by_their_frames():
    generator = torch.Generator().manual_seed(0)
    x_next, mean, old = torch.randn(3, 2, 4, 5, 2, 2, generator=generator)
    policy, std = Policy("cps", 1.0, sigma_table(4, 3.0)), torch.tensor(0.8)
    ranges = [(0, 1), (1, 3), (3, 5)]
    ratios = chunk_log_ratios(policy, x_next, mean, old, std, ranges)
    clip = policy.log_prob(x_next, mean, std) - policy.log_prob(x_next, old, std)
    torch.testing.assert_close(ratios @ torch.tensor([0.2, 0.4, 0.4]).double(), clip)
    moved = mean.clone()
    moved[:, :, 1:3] += 1
    changed = chunk_log_ratios(policy, x_next, moved, old, std, ranges) != ratios
    assert changed.tolist() == [[False, True, False]] * 2
