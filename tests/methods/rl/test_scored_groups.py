"""A group with a sample that could not be scored: the step is that of a batch without the group."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers import ALONE, CAPTIONS, LATENT_SHAPE, reward_of, small_batch, tiny_codec

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Request
from unified_trainer.basics.types import Rollout
from unified_trainer.data.loader import Loader
from unified_trainer.data.prompts import Prompts
from unified_trainer.methods.distill_rl import DistillRL
from unified_trainer.methods.rl.groups import GroupConfig, Groups
from unified_trainer.methods.rl.rollouts import ScoredSamples
from unified_trainer.rewards.reward import RewardConfig, RewardSum, Scores

LOST = [1.0, 3.0, math.nan, 7.0, 0.0, 0.5]  # three prompts with two samples each


def step_of(rewards: list[float], reward: RewardSum | None = None, **changes):
    """Return advantages, the weight of each sample in the update, metrics and messages."""
    count = len(rewards)
    config = GroupConfig(**{"num_prompts": count // 2, "num_samples": 2, "prompts_per_update": count // 2} | changes)
    batch = small_batch(count)
    batch = batch.__class__(**vars(batch) | {"prompt_ids": tuple(i // 2 for i in range(count))})
    loader = Loader(Prompts(Request.of(CAPTIONS)), tiny_codec(), config.plan(), LATENT_SHAPE, "", 0, ALONE)
    scores = Scores(torch.tensor(rewards)[:, None], {}, torch.zeros(count, 3))
    rollout = Rollout.from_x0(torch.zeros(count, *LATENT_SHAPE))
    samples = ScoredSamples(batch, rollout, scores, torch.zeros(count, dtype=torch.int64))
    metrics: dict[str, float] = {}
    found = Groups(config, reward or reward_of(), loader).advantages(samples, changes.pop("penalty", None), metrics)
    weights = torch.zeros(count)
    for minibatch in found.minibatches[0]:
        weights[minibatch.rows[minibatch.real]] = minibatch.weights[minibatch.real]
    return found, weights, metrics


@pytest.mark.parametrize("advantage", ["grpo", "global", "global_std", "largest_std", "gdpo"])
def test_the_other_groups_are_those_of_a_batch_without_it(advantage):
    """Advantage and weight of each sample, and so its gradient, and the metrics are equal; the group has neither."""
    found, weights, metrics = step_of(LOST, advantage=advantage)
    without, plain, alone = step_of([*LOST[:2], *LOST[4:]], advantage=advantage)
    kept = [0, 1, 4, 5]
    assert torch.equal(found.values[kept], without.values) and torch.equal(weights[kept], plain)
    assert not found.values[2:4].any() and not weights[2:4].any()
    assert metrics == alone | {"reward/unscored": 1.0}
    assert found.messages == ("2 of 6 samples are left out: 1 of them cannot be scored",)


def test_more_than_the_share_end_the_run():
    """0.01 of 6 samples is 1, rounded up; with 0 none may be lost."""
    with pytest.raises(UserError, match=r"2 of 6 samples cannot be scored, more than reward\.unscored 0\.01"):
        step_of([math.nan, *LOST[1:]])
    with pytest.raises(UserError, match=r"1 of 6 samples cannot be scored, more than reward\.unscored 0 "):
        step_of(LOST, RewardSum(RewardConfig(kind="near", unscored=0.0)))
    step_of([math.nan, *LOST[1:]], RewardSum(RewardConfig(kind="near", unscored=0.2)))


def test_a_step_of_one_group_makes_no_update():
    found, weights, metrics = step_of([math.nan, 1.0], best_of_n=2)
    assert found.minibatches == [[]] and not weights.any() and metrics == {"reward/unscored": 1.0}


def test_the_critic_of_distill_rl_learns_as_from_a_batch_without_it():
    """Its loss is a mean over all samples of weight x error: weights are 0, or those of the batch without x 6 / 4."""
    method = SimpleNamespace(config=SimpleNamespace(tilt=SimpleNamespace(max_weight=10.0)))
    found, _, _ = step_of(LOST)
    without, _, _ = step_of([*LOST[:2], *LOST[4:]])
    weights, plain = (DistillRL._critic_weights(method, one.groups, 0.5, ALONE, {}) for one in (found, without))
    torch.testing.assert_close(weights, torch.cat([plain[:2], torch.zeros(2), plain[2:]]) * 6 / 4)
