"""Advantages of groups: which reward each filter reads."""

import re

import pytest
import torch
from helpers import ALONE, CAPTIONS, LATENT_SHAPE, reward_of, small_batch, tiny_codec

from unified_trainer.basics.errors import NotFiniteError
from unified_trainer.basics.requests import Request
from unified_trainer.basics.types import Rollout
from unified_trainer.data.loader import Loader
from unified_trainer.data.prompts import Prompts
from unified_trainer.methods.rl.groups import Advantages, GroupConfig, Groups
from unified_trainer.methods.rl.rollouts import ScoredSamples
from unified_trainer.rewards.reward import RewardConfig, RewardSum, Scores

PARTS = torch.tensor([1.0, 3.0, 0.0, 0.2])  # two prompts with two samples each
SIZES = {"num_prompts": 2, "num_samples": 2, "prompts_per_update": 2, "rollout_batch": 4, "update_batch": 4}


def advantages_of(
    penalty: torch.Tensor | None = None, reward: RewardSum | None = None, *, parts: torch.Tensor = PARTS, **changes
) -> tuple[Advantages, dict[str, float]]:
    config = GroupConfig(**SIZES | changes)
    batch = small_batch(4)
    batch = batch.__class__(**vars(batch) | {"prompt_ids": (0, 0, 1, 1)})
    loader = Loader(Prompts(Request.of(CAPTIONS)), tiny_codec(), config.plan(), LATENT_SHAPE, "", 0, ALONE)
    scores = Scores(parts[:, None], {}, torch.zeros(4, 3))
    samples = ScoredSamples(
        batch, Rollout.from_x0(torch.zeros(4, *LATENT_SHAPE)), scores, torch.zeros(4, dtype=torch.int64)
    )
    metrics: dict[str, float] = {}
    return Groups(config, reward or reward_of(), loader).advantages(samples, penalty, metrics), metrics


def test_the_threshold_reads_the_reward_without_the_penalty():
    """Means 2 and 0.1 around a threshold of 0.5: a penalty of 10 drops no further group, and -10 keeps none."""
    for shift in (10.0, -10.0):
        found, metrics = advantages_of(torch.full((4,), shift), reward_threshold=0.5)
        assert found.values.ne(0).tolist() == [True, True, False, False]
        assert metrics["frac_below_threshold_groups"] == 0.5


def test_failures_and_metrics_read_the_reward_without_the_penalty():
    _, metrics = advantages_of(torch.full((4,), 10.0), failure_below=0.5)
    assert metrics["failed_groups"] == 0.5
    assert metrics["reward"] == pytest.approx(float(PARTS.mean()))


def test_advantages_compare_the_rewards_minus_the_penalty():
    """1 - 5 and 3 - 1: the order of the first group stays; 0 - 0 and 0.2 - 1: that of the second is reversed."""
    found, _ = advantages_of(torch.tensor([5.0, 1.0, 0.0, 1.0]))
    assert found.values.sign().tolist() == [-1, 1, 1, -1]


@pytest.mark.parametrize(("weight", "row"), [(1.2e38, 1), (-1e200, 0), (1.7e308, 0)])  # float32 ends at 3.4e38
@pytest.mark.parametrize("advantage", ["grpo", "gdpo", "global"])
def test_a_weighted_sum_that_is_not_finite_names_scorer_prompt_and_sample(weight, row, advantage):
    """Scores of 1 and 3 are real numbers; weighted they are none of float32, whose squares the advantages add up."""
    reward = RewardSum(RewardConfig(kind="near", weight=weight, allow_negative=True))
    said = rf"reward: near: the reward of sample {row} \('{re.escape(CAPTIONS[row])}'\) is not finite"
    with pytest.raises(NotFiniteError, match=said):
        advantages_of(reward=reward, advantage=advantage)


def test_global_trains_on_a_group_of_equal_rewards():
    """(r - mean) / std over all samples: two equal rewards of 1 lie below those of 3 and 5, and teach so."""
    rewards = torch.tensor([1.0, 1.0, 3.0, 5.0])
    everything = (rewards - rewards.mean()) / rewards.std()
    found, metrics = advantages_of(advantage="global", parts=rewards)
    torch.testing.assert_close(found.values, everything)
    assert int(sum(part.real.sum() for part in found.minibatches[0])) == 4 and metrics["frac_zero_std_groups"] == 0.5
    within, _ = advantages_of(advantage="global_std", parts=rewards)
    assert int(sum(part.real.sum() for part in within.minibatches[0])) == 2 and not within.values[:2].any()
    equal, _ = advantages_of(advantage="global", parts=torch.full((4,), 0.1))
    assert equal.minibatches == [[]] and not equal.values.any()
