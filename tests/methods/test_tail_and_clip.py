"""Second-order steps after a window, clip ranges from latent size and noise, and the message of skipped updates."""

import dataclasses
import itertools
import math

import pytest
import torch
from helpers import Calls, ScriptedScorer, assert_near, dance_grpo, trainable
from policy_case import ELEMENTS, KERNELS, ODE, A, Case, ks, log_ratios
from test_dance_grpo import EQUAL, stepped

from unified_trainer.methods.rl.sde_windows import WindowConfig
from unified_trainer.numerics.flow import second_order_step, sigma_table
from unified_trainer.numerics.objectives import calibrated_clip, surrogate

# The step.


def end_of(steps: int, order: int, start: float = 0.9, stop: float = 0.1) -> float:
    """Integrate the exact velocity of a Gaussian with std 2 and mean 1 from x = 1.5."""
    levels = torch.linspace(start, stop, steps + 1, dtype=torch.float64)
    x, before = torch.tensor([[1.5]], dtype=torch.float64), None

    for i, (sigma, after) in enumerate(itertools.pairwise(levels)):
        a, variance = 1 - sigma, (1 - sigma) ** 2 * 4 + sigma**2
        x0 = 1 + 4 * a / variance * (x - a)  # E[x0 | x]
        if order == 1 or before is None:
            x = x + (after - sigma) * (x - x0) / sigma
        else:
            x = second_order_step(x, x0, before, levels[i - 1], sigma, after)
        before = x0
    return float(x)


def exact(start: float = 0.9, stop: float = 0.1) -> float:
    """Return the true end: the ODE keeps (x - a mean) / std of the marginal."""
    std = [math.sqrt((1 - sigma) ** 2 * 4 + sigma**2) for sigma in (start, stop)]
    return (1 - stop) + std[1] / std[0] * (1.5 - (1 - start))


def test_its_error_falls_with_the_square_of_the_step():
    error = {order: [abs(end_of(n, order) - exact()) for n in (40, 80, 160)] for order in (1, 2)}
    for coarse, fine in ((0, 1), (1, 2)):
        assert error[1][coarse] / error[1][fine] == pytest.approx(2, rel=0.1)
        assert error[2][coarse] / error[2][fine] == pytest.approx(4, rel=0.2)
    assert error[2][0] < error[1][0] / 10


def test_with_one_prediction_twice_it_is_euler():
    x_t, x0 = torch.randn(2, 2, 3, dtype=torch.float64)
    made = second_order_step(x_t, x0, x0, 0.9, 0.7, 0.4)
    torch.testing.assert_close(made, x_t + (0.4 - 0.7) * (x_t - x0) / 0.7)


def test_it_is_exact_where_x0_is_linear_in_log_snr():
    """x' = s'/s x + s' (integral of x0 d(a/s)) with x0 = p + q l is what the rule gives to second order: by hand.

    Levels .8, .6, .4: l = ln(a/s) = -1.3863, -.4055, .4055; h_before = .9808, h = .8109; D = x0 + .4134 (x0 - before).
    """
    x_t, x0, before = (torch.tensor([[value]], dtype=torch.float64) for value in (1.0, 2.0, 1.0))
    ahead = math.log(0.6 / 0.4 / (0.4 / 0.6)) / (2 * math.log(0.4 / 0.6 / (0.2 / 0.8)))
    expected = 0.4 / 0.6 * 1.0 + (0.6 - 0.4 * 0.4 / 0.6) * (2 + ahead)
    assert float(second_order_step(x_t, x0, before, 0.8, 0.6, 0.4)) == pytest.approx(expected, rel=1e-12)


# The tail.


def test_the_tail_is_second_order_from_its_second_step_on():
    """Of seven transitions, 2 and 3 are the window: Euler before it and in the first step after it."""
    sampler = dataclasses.replace(ODE, num_steps=8)
    sigmas = sigma_table(8, 3.0)
    window = WindowConfig(size=2, every=1, tail="second_order")
    case = Case(sampler=sampler, window=window, step=2)
    role, x0s = trainable(), []
    assert case.metrics["window_first"] == 2
    for s in range(7):
        x_t, x_next = case.calls.x_t[s], case.calls.x_t[s + 1]
        with torch.no_grad():
            velocity = role.velocity(x_t, sigmas[s].expand(8), case.cond)
        x0s.append(x_t - float(sigmas[s]) * velocity)
        euler = x_t + float(sigmas[s + 1] - sigmas[s]) * velocity
        assert torch.allclose(x_next, euler, atol=1e-5) == (s in (0, 1, 4))
        if s in (5, 6):
            second = second_order_step(x_t, x0s[s], x0s[s - 1], *sigmas[s - 1 : s + 2])
            torch.testing.assert_close(x_next, second, rtol=1e-4, atol=1e-5)


def test_a_tail_needs_a_window():
    with pytest.raises(ValueError, match=r"algorithm\.window\.tail second_order needs algorithm\.window\.size above 0"):
        WindowConfig(tail="second_order").check(5)


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
        return -surrogate(d, A[:, None].expand_as(d), clip_low=low, clip_high=high).mean()

    found: list[float] = []
    assert_near(case.gradient, case.expected(loss), 2e-3)
    assert case.metrics["clip_low"] == pytest.approx(found[0], rel=1e-3)
    assert case.metrics["clip_high"] == pytest.approx(found[1], rel=1e-3)
    assert case.metrics["clip_fraction"] == pytest.approx(found[2]) and found[2] > 0


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
