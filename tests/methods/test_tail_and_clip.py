"""Clip ranges from latent size and noise, and the message of skipped updates."""

import math

import pytest
import torch
from helpers import Calls, ScriptedScorer, assert_near, dance_grpo, setup_of
from policy_case import ELEMENTS, KERNELS, ODE, A, Case, ks, log_ratios
from test_dance_grpo import EQUAL, stepped

from unified_trainer.numerics.objectives import GSPO, Clip, calibrated_clip

# The clip range.


def test_the_range_is_where_a_shifted_policy_gets():
    """Compare with sampled log-ratios: draws of 2000 elements from N(0, 1) under a mean shifted by .02."""
    draws = torch.randn(4000, 2000, generator=torch.Generator().manual_seed(0))
    shift = 0.02 * torch.randn(2000, generator=torch.Generator().manual_seed(1)).sign()
    log_ratio = (draws * shift - shift.square() / 2).mean(1)
    low, high = calibrated_clip(0.02, 2000)
    mean, deviation = float(log_ratio.mean()), float(log_ratio.std())
    assert math.log(1 - low) == pytest.approx(mean - deviation, rel=0.05)
    assert math.log(1 + high) == pytest.approx(deviation, rel=0.05)
    low, high = calibrated_clip(0.02, 2000, 0.1)
    guarded = (log_ratio + 0.02**2 / 2) * 0.1
    assert math.log(1 + high) == pytest.approx(float(guarded.std()), rel=0.05)
    assert -math.log(1 - low) == pytest.approx(math.log(1 + high))


@pytest.mark.slow
@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_every_transition_has_its_own_range(name, guard):
    """The range follows std (MATH.md 4) and |dmean / dv|, in the gradient and in the metrics."""
    case = Case(moved=True, kernel=name, eta=KERNELS[name], guard=guard, clip_velocity=0.01)

    def loss(now, then):
        d, k = log_ratios(now, then), ks(now, then)
        stds = torch.tensor([step.std for step in now])
        if guard:
            d = (d + k) * stds
        gains = [(a.mean - b.mean) / (a.velocity - b.velocity) for a, b in zip(now, then, strict=True)]
        gains = torch.stack([gain.detach().flatten().median().abs() for gain in gains])
        shift = 0.01 * gains / stds
        deviation = shift / math.sqrt(ELEMENTS) * (stds if guard else 1)
        low = 1 - (-deviation - (0 if guard else shift**2 / 2)).exp()
        high = deviation.exp() - 1
        found.extend(
            [float(low.mean()), float(high.mean()), ((d.exp() < 1 - low) | (d.exp() > 1 + high)).double().mean().item()]
        )
        return -Clip()(d, A[:, None].expand_as(d), low, high).mean()

    found: list[float] = []
    assert_near(case.gradient, case.expected(loss), 2e-3)
    assert case.metrics["clip_low"] == pytest.approx(found[0], rel=1e-3)
    assert case.metrics["clip_high"] == pytest.approx(found[1], rel=1e-3)
    assert case.metrics["clip_fraction"] == pytest.approx(found[2]) and found[2] > 0


def test_a_range_for_each_transition_is_none_for_gspo():
    with pytest.raises(ValueError, match=r"algorithm\.clip_velocity must be 0 for algorithm\.objective\.kind gspo"):
        Case(objective=GSPO("gspo"), clip_velocity=0.1).config.check(setup_of(ODE))


# Messages.


def test_a_skipped_update_is_said_once():
    one, metrics, _ = stepped(scorer=EQUAL)
    (message,) = one.messages
    assert message.startswith("1 of 1 updates skipped") and "of 2 groups 2 have equal rewards, 0 are below" in message
    assert metrics["skipped_updates"] == 1


def test_what_is_said_is_of_the_last_step():
    scorer = ScriptedScorer([0.1] * 8 + [1.0, 2.0, 4.0, 5.0, -1.0, 2.0, -3.0, 1.0])
    one = dance_grpo(stepped()[0].method.config, scorer=scorer)
    calls = Calls.of(one.roles["student"])
    one.step(0)
    assert one.messages and not calls.where(graph=True)
    one.step(1)
    assert list(one.messages) == ["on-policy check: largest log-ratio before the first update is 0% of the clip range"]
