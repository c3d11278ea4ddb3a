"""Several rewards in dance_grpo: each part is compared in its group before weighting (GDPO, arXiv:2601.05242)."""

import dataclasses

import pytest
import torch
from helpers import ScriptedScorer, dance_grpo, tiny_codec

from unified_trainer.methods.dance_grpo import DanceGRPOConfig
from unified_trainer.parallel.random import Streams
from unified_trainer.rewards.reward import Reward, RewardConfig, ScorerConfig

REWARDS = (1.0, 2.0, 4.0, 5.0, -1.0, 2.0, -3.0, 1.0)  # of two groups of four
CONFIG = DanceGRPOConfig(
    num_prompts=2, num_samples=4, prompts_per_update=2, rollout_batch=8, update_batch=8, timestep_fraction=1.0
)


def column_of(row: torch.Tensor):
    """Return a scorer of videos that gives these rewards in order."""
    images = ScriptedScorer(row.tolist())
    return lambda video, prompts: images(video[:, :, 0], prompts)


def standard(row: torch.Tensor) -> torch.Tensor:
    return (row - row.mean()) / row.std()


def test_gdpo_compares_each_part_with_its_group_before_they_are_weighted():
    """The second part is a hundred times as large, which has no effect: only the weights count."""
    config = RewardConfig(kind="first", weight=0.5, allow_negative=True, scorers={"second": ScorerConfig(weight=-2.0)})
    parts = torch.tensor([REWARDS, [100 * value**2 for value in REWARDS]])
    scorers = {name: column_of(row) for name, row in zip(("first", "second"), parts, strict=True)}
    one = dance_grpo(dataclasses.replace(CONFIG, advantage="gdpo"), reward=Reward(scorers, tiny_codec(), config))
    batch = one.loader.batch(0)
    samples, metrics = one.method.rollouts.samples(batch, 0, Streams(0, 0)), {}
    advantages = one.method.groups.advantages(samples, None, metrics).values
    by_group = [torch.stack([standard(row[:4]), standard(row[4:])]).flatten() for row in parts]
    mixed = 0.5 * by_group[0] - 2 * by_group[1]
    torch.testing.assert_close(advantages, (mixed - mixed.mean()) / mixed.std(), rtol=1e-4, atol=1e-5)
    assert metrics["reward"] == pytest.approx(float((0.5 * parts[0] - 2 * parts[1]).mean()), rel=1e-5)
    assert metrics["reward/second"] == pytest.approx(float(parts[1].mean()), rel=1e-5)


def test_gdpo_keeps_a_group_whose_rewards_are_equal_but_whose_parts_are_not():
    """Two parts cancel: their sum has no spread, each of them has."""
    config = RewardConfig(kind="first", scorers={"second": ScorerConfig(weight=2.0)})
    up = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 5.0, 5.0])
    scorers = {"first": column_of(up), "second": column_of(-up / 2)}
    filtered = {}
    for estimator in ("gdpo", "grpo"):
        reward = Reward(dict(scorers), tiny_codec(), config)
        filtered[estimator] = dance_grpo(dataclasses.replace(CONFIG, advantage=estimator), reward=reward).step(0)
    assert filtered["gdpo"]["frac_zero_std_groups"] == 0.5 and filtered["grpo"]["frac_zero_std_groups"] == 1
