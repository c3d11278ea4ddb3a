"""An update on more samples than one network call holds: the gradient of its parts, added up."""

import dataclasses

import pytest
import torch
from helpers import Calls, ScriptedScorer, assert_near, assert_same, dance_grpo, weights
from policy_case import CONFIG, ODE, REWARDS


def trainer(rewards=REWARDS, **changes):
    return dance_grpo(dataclasses.replace(CONFIG, **changes), scorer=ScriptedScorer(rewards), sampler=ODE)


def mean(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: (first[key] + second[key]) / 2 for key in first}


@pytest.mark.slow
def test_an_update_on_many_prompts_is_the_mean_over_parts_that_are_made_one_after_another():
    """Four prompts in one update have the mean gradient of two updates of two prompts, and no call has more samples."""
    sizes = {"num_prompts": 4, "rollout_batch": 4, "update_batch": 4}
    apart = trainer(rewards=REWARDS + REWARDS[::-1], **sizes)
    of_two = apart.step(0)
    large = trainer(rewards=REWARDS + REWARDS[::-1], **sizes, prompts_per_update=4)
    calls = Calls.of(large.roles["student"])
    metrics = large.step(0)
    updates, (whole,) = apart.roles["student"].gradients, large.roles["student"].gradients
    assert len(updates) == 2
    assert_near(whole, mean(*updates), 1e-5)
    assert {name: metrics[name] for name in metrics if "reward" in name} == {
        name: of_two[name] for name in of_two if "reward" in name
    }
    assert max(map(len, calls.x_t)) == 4
    assert_same(weights(large.roles["student"].network), weights(trainer().roles["student"].network))
