"""The clipped objective: the published table of values and slopes, and what holds for every ratio."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unified_trainer.surrogates import LOG_RATIO_LIMIT, outside_clip, surrogate

RATIOS = (0.5, 0.9, 1.0, 1.1, 1.5, 4.0)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def value_and_slope(log_ratio: torch.Tensor, advantage: float, low: float, high: float):
    """J and g = dJ / dlogp of each element."""
    log_ratio = log_ratio.clone().requires_grad_()
    objective = surrogate("clip", log_ratio, torch.full_like(log_ratio, advantage), clip_low=low, clip_high=high)
    (slope,) = torch.autograd.grad(objective.sum(), log_ratio)
    return objective.detach(), slope


@pytest.mark.parametrize(
    ("advantage", "value", "slope"),
    [
        (1.0, [0.5, 0.9, 1.0, 1.1, 1.2, 1.2], [0.5, 0.9, 1.0, 1.1, 0.0, 0.0]),
        (-1.0, [-0.8, -0.9, -1.0, -1.1, -1.5, -4.0], [0.0, -0.9, -1.0, -1.1, -1.5, -4.0]),
    ],
)
def test_clip_golden(advantage, value, slope):
    log_ratio = torch.tensor(RATIOS, dtype=torch.float64).log()
    got = value_and_slope(log_ratio, advantage, 0.2, 0.2)
    torch.testing.assert_close(got[0], torch.tensor(value, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(got[1], torch.tensor(slope, dtype=torch.float64), rtol=0, atol=1e-12)


def test_low_and_high_are_two_ranges():
    """A > 0 is stopped by the upper bound alone, A < 0 by the lower alone."""
    log_ratio = torch.tensor([0.75, 1.25], dtype=torch.float64).log()
    assert value_and_slope(log_ratio, 1.0, 0.5, 0.1)[1].tolist() == pytest.approx([0.75, 0.0])
    assert value_and_slope(log_ratio, -1.0, 0.1, 0.5)[1].tolist() == pytest.approx([0.0, -1.25])
    assert value_and_slope(log_ratio, -1.0, 0.5, 0.1)[1].tolist() == pytest.approx([-0.75, -1.25])


@given(log_ratio=st.floats(-3, 3), advantage=st.floats(-5, 5), low=st.floats(0.01, 0.9), high=st.floats(0.01, 3))
def test_clip_is_a_lower_bound_with_the_slope_of_the_table(log_ratio, advantage, low, high):
    """J <= r A; g = 0 where (A > 0, r > hi) or (A < 0, r < lo), else r A."""
    ratio = math.exp(log_ratio)
    value, slope = value_and_slope(torch.tensor([log_ratio], dtype=torch.float64), advantage, low, high)
    assert float(value) <= ratio * advantage + 1e-12
    if min(abs(ratio - (1 - low)), abs(ratio - (1 + high))) > 1e-9:
        stopped = (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)
        assert float(slope) == pytest.approx(0.0 if stopped else ratio * advantage, abs=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_at_ratio_one_the_slope_is_exactly_the_advantage(dtype, advantage):
    value, slope = value_and_slope(torch.zeros(3, dtype=dtype), advantage, 0.25, 0.25)
    assert value.tolist() == slope.tolist() == [advantage] * 3


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_huge_log_ratio_stays_finite(advantage):
    """d = clip(logp - logp_old, +-20)."""
    value, slope = value_and_slope(torch.tensor([500.0, -500.0], dtype=torch.float64), advantage, 0.2, 0.2)
    assert value.isfinite().all() and slope.tolist() == [0.0, 0.0]
    ratio = torch.tensor([LOG_RATIO_LIMIT, -LOG_RATIO_LIMIT], dtype=torch.float64).exp()
    expected = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    torch.testing.assert_close(value, expected)


def test_outside_is_where_the_ratio_left_the_range():
    log_ratio = torch.tensor([0.79, 0.81, 1.0, 1.19, 1.21], dtype=torch.float64).log()
    assert outside_clip(log_ratio, clip_low=0.2, clip_high=0.2).tolist() == [True, False, False, False, True]


def test_an_unknown_mode_is_named(unchecked):
    with pytest.raises(ValueError, match="unknown surrogate 'clop'; have clip"):
        surrogate("clop", torch.zeros(1), torch.zeros(1), clip_low=0.2, clip_high=0.2)
