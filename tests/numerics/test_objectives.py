"""Policy objectives: the published table of values and slopes, what holds for every ratio, and the diagnostics."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unified_trainer.numerics.kernels import log_prob
from unified_trainer.numerics.objectives import (
    LOG_RATIO_LIMIT,
    OBJECTIVES,
    Clip,
    clips_ratios,
    diagnostics,
    guarded_log_ratio,
    outside_clip,
)
from unified_trainer.numerics.trust_region import leaves_trust_region

RATIOS = (0.5, 0.9, 1.0, 1.1, 1.5, 4.0)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


LOG_RATIOS = torch.tensor(RATIOS, dtype=torch.float64).log()


def value_and_slope(log_ratio: torch.Tensor, advantage: float, low: float, high: float, mode="clip", **shape):
    """J and g = dJ / dlogp of each element."""
    log_ratio = log_ratio.clone().requires_grad_()
    advantages = torch.full_like(log_ratio, advantage)
    objective = OBJECTIVES[mode](mode, **shape)(log_ratio, advantages, low, high)
    (slope,) = torch.autograd.grad(objective.sum(), log_ratio)
    return objective.detach(), slope


SAPO_POS = [1.5102, 1.9001, 2.0, 2.0999, 2.4898, 3.8103], [0.4700, 0.8978, 1.0, 1.0973, 1.4100, 0.7228]
SAPO_NEG = [-1.4159, -1.8049, -1.9048, -2.0047, -2.3936, -3.6530], [-0.4671, -0.8975, -1.0, -1.0970, -1.4012, -0.6304]
SOFT_SQUARED = [0.125, 0.729, 1.0, 0.9091, 0.6667, 0.25]
FREE = [0.5, 0.9, 1.0, 1.1, 1.5, 4.0]


def minus(values: list[float]) -> list[float]:
    return [-value for value in values]


@pytest.mark.parametrize(
    ("mode", "shape", "advantage", "value", "slope"),
    [
        ("none", {}, 1.0, FREE, FREE),
        ("none", {}, -1.0, minus(FREE), minus(FREE)),
        ("clip", {}, 1.0, [0.5, 0.9, 1.0, 1.1, 1.2, 1.2], [0.5, 0.9, 1.0, 1.1, 0.0, 0.0]),
        ("clip", {}, -1.0, [-0.8, -0.9, -1.0, -1.1, -1.5, -4.0], [0.0, -0.9, -1.0, -1.1, -1.5, -4.0]),
        ("dual_clip", {}, 1.0, [0.5, 0.9, 1.0, 1.1, 1.2, 1.2], [0.5, 0.9, 1.0, 1.1, 0.0, 0.0]),
        ("dual_clip", {}, -1.0, [-0.8, -0.9, -1.0, -1.1, -1.5, -3.0], [0.0, -0.9, -1.0, -1.1, -1.5, 0.0]),
        ("dual_clip", {"dual_clip": 1.25}, -1.0, [-0.8, -0.9, -1, -1.1, -1.25, -1.25], [0, -0.9, -1, -1.1, 0, 0]),
        ("soft_clip", {}, 1.0, [0.25, 0.81, 1, 1, 1, 1], [0.25, 0.81, 1, 1, 1, 1]),
        ("soft_clip", {"alpha": 2.0}, 1.0, SOFT_SQUARED, SOFT_SQUARED),
        ("soft_clip", {}, -1.0, [-0.25, -0.81, -1, -1, -1, -1], [-0.25, -0.81, -1, -1, -1, -1]),
        ("sapo", {}, 1.0, *SAPO_POS),
        ("sapo", {}, -1.0, *SAPO_NEG),
        ("ce_gppo", {}, 1.0, [0.5, 0.9, 1, 1.1, 1.2, 1.2], [0.5, 0.9, 1, 1.1, 1.2, 1.2]),
        ("ce_gppo", {}, -1.0, [-0.6, -0.9, -1, -1.1, -1.5, -4], [-0.6, -0.9, -1, -1.1, -1.5, -4]),
        ("ce_gppo", {"beta_high": 0.5}, 1.0, [0.5, 0.9, 1, 1.1, 0.6, 0.6], [0.5, 0.9, 1, 1.1, 0.6, 0.6]),
        ("ce_gppo", {"beta_low": 0.0}, -1.0, [0, -0.9, -1, -1.1, -1.5, -4], [0, -0.9, -1, -1.1, -1.5, -4]),
    ],
)
def test_objectives_golden(mode, shape, advantage, value, slope):
    got = value_and_slope(LOG_RATIOS, advantage, 0.2, 0.2, mode, **shape)
    for tensor, expected in zip(got, (value, slope), strict=True):
        torch.testing.assert_close(tensor, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=6e-5)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_cispo_golden(sign):
    """Canonically without a lower bound; J = g."""
    value, slope = value_and_slope(LOG_RATIOS, sign, 1.0, 0.2, "cispo")
    expected = sign * torch.tensor([0.5, 0.9, 1.0, 1.1, 1.2, 1.2], dtype=torch.float64)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(slope, expected)
    bounded = value_and_slope(LOG_RATIOS, sign, 0.2, 0.2, "cispo")[0]
    assert float(bounded[0]) == pytest.approx(0.8 * sign)


def test_gspo_has_one_ratio_for_all_steps():
    """s = exp(mean of d): min(s A, clip(s) A), and s A / T for each step."""
    log_ratio = torch.tensor([[0.1, -0.3, 0.5], [0.9, 0.2, 0.4]], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([2.0, 1.0], dtype=torch.float64)
    objective = OBJECTIVES["gspo"]("gspo")(log_ratio, advantage, 0.2, 0.3)
    (slope,) = torch.autograd.grad(objective.sum(), log_ratio)
    assert objective.tolist() == pytest.approx([2 * math.exp(0.1), 1.3])
    assert slope.tolist() == [pytest.approx([2 * math.exp(0.1) / 3] * 3), [0.0, 0.0, 0.0]]
    of_samples = OBJECTIVES["gspo"]("gspo")(log_ratio.mean(1), advantage, 0.2, 0.3)  # log-ratios that are means already
    assert torch.equal(of_samples, objective)


MODES = ("none", "clip", "dual_clip", "soft_clip", "sapo", "ce_gppo", "cispo")


@pytest.mark.parametrize("mode", MODES)
@given(advantage=st.floats(-5, 5), low=st.floats(0.05, 0.9), high=st.floats(0.05, 3))
def test_every_objective_starts_with_the_policy_gradient(mode, advantage, low, high):
    """At ratio 1 the slope is the advantage, whatever the mode and its parameters."""
    assert float(value_and_slope(torch.zeros(1, dtype=torch.float64), advantage, low, high, mode)[1]) == pytest.approx(
        advantage, abs=1e-12
    )


@pytest.mark.parametrize("mode", ["none", "clip", "dual_clip", "sapo", "ce_gppo"])
@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_slopes_are_those_of_the_value_where_nothing_is_detached(mode, advantage):
    """Central differences."""
    points = torch.tensor([0.85, 1.02, 1.15], dtype=torch.float64).log()
    up, down = (value_and_slope(points + step, advantage, 0.2, 0.2, mode)[0] for step in (1e-6, -1e-6))
    slope = value_and_slope(points, advantage, 0.2, 0.2, mode)[1]
    torch.testing.assert_close(slope, (up - down) / 2e-6, rtol=1e-6, atol=1e-8)


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


# The guard and the trust region.


def step_of(seed: int = 0, shift: float = 0.05, std: float = 0.3):
    """Means before and after a move, their std, and what was drawn from the old one; float64, 500 elements."""
    generator = torch.Generator().manual_seed(seed)
    old, move, eps = torch.randn(3, 4, 5, 100, generator=generator, dtype=torch.float64)
    return old, old + shift * move, torch.tensor([[[std]]], dtype=torch.float64), eps


def test_the_guarded_log_ratio_by_hand():
    """(dlogp + mean(dmu^2) / (2 std^2)) std; dmu = (.3, -.1), std .5: mean square .05, over .5."""
    mean, old = torch.tensor([[1.3, 0.9]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
    log_ratio = torch.tensor([-0.02], dtype=torch.float64)
    got = guarded_log_ratio(log_ratio, mean, old, torch.tensor(0.5, dtype=torch.float64))
    assert got.tolist() == pytest.approx([(-0.02 + 0.1) * 0.5])


def test_the_guard_takes_the_bias_away_exactly():
    """log-ratio = mean(eps dmu) / std - k, so that the guarded one is mean(eps dmu): odd in eps, no k left."""
    old, new, std, eps = step_of()
    guarded = []
    for sign in (1, -1):
        x_next = old + sign * std * eps
        log_ratio = log_prob(x_next, new, std) - log_prob(x_next, old, std)
        guarded.append(guarded_log_ratio(log_ratio, new, old, std))
        torch.testing.assert_close(guarded[-1], sign * (eps * (new - old)).flatten(1).mean(1))
    torch.testing.assert_close(guarded[0], -guarded[1])


def test_the_gradient_of_the_guard_is_the_drawn_noise():
    """d guarded / d mean = eps / D: the gradient of k cancels, and no std is left."""
    old, new, std, eps = step_of()
    mean = new.clone().requires_grad_()
    log_ratio = log_prob(old + std * eps, mean, std) - log_prob(old + std * eps, old, std)
    guarded_log_ratio(log_ratio, mean, old, std).sum().backward()
    torch.testing.assert_close(mean.grad, eps / 500)


@pytest.mark.slow
def test_clip_decisions_are_those_of_float64_arithmetic():
    """Guarded ratios of 300,000 elements, 2e-4 of their distance to 1 beyond or before the end of the clip range.

    That distance is about 1e-5, and the spacing of float32 numbers near 1 is 1e-7: in float32 arithmetic some of the
    ratios are on the other side. Samples outside the range have no gradient, since the advantage pushes them outwards.
    """
    old, move, eps = torch.randn(3, 8, 300_000, generator=torch.Generator().manual_seed(0))
    std = torch.full((1, 1), 0.07)
    new, x_next = old + 0.05 * std * move, old + std * eps

    def guarded(dtype: torch.dtype) -> torch.Tensor:
        x, after, before, spread = (tensor.to(dtype) for tensor in (x_next, new, old, std))
        densities = [-0.5 * ((x - mean) / spread).square() - spread.log() for mean in (after, before)]
        log_ratio = densities[0].mean(1) - densities[1].mean(1)
        return (log_ratio + ((after - before) / spread).square().mean(1) / 2) * spread[0]

    exact = guarded(torch.float64)
    beyond = torch.tensor([True, False]).repeat(4)
    bound = exact.expm1().abs() * torch.where(beyond, 0.9998, 1.0002)
    assert 1e-7 < float(bound.min()) < float(bound.max()) < 1e-4
    rounded = (guarded(torch.float32).exp() - 1).abs() > bound.float()
    assert not torch.equal(rounded, beyond)  # else the test shows nothing

    mean = new.clone().requires_grad_()
    log_ratio = log_prob(x_next, mean, std) - log_prob(x_next, old, std)
    ratio = guarded_log_ratio(log_ratio, mean, old, std)
    assert torch.equal(outside_clip(ratio.detach(), clip_low=bound, clip_high=bound), beyond)
    objective = OBJECTIVES["clip"]("clip")(ratio, exact.sign().float(), bound, bound)
    objective.sum().backward()
    assert torch.equal(mean.grad.abs().amax(1) == 0, beyond)
    assert log_ratio.dtype == ratio.dtype == objective.dtype == torch.float64 and mean.grad.dtype == torch.float32


def test_who_leaves_the_trust_region():
    """Only where k has reached the bound and the ratio went where the advantage pushes it."""
    log_ratio = torch.tensor([0.1, 0.1, -0.1, -0.1, 0.1, 0.0])
    advantage = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, 1.0])
    kl = torch.tensor([0.5, 0.5, 0.6, 0.5, 0.49, 0.5])
    assert leaves_trust_region(log_ratio, advantage, kl, 0.5).tolist() == [True, False, True, False, False, False]


# Diagnostics.


def test_diagnostics_by_hand():
    """Ratios .5 1 1.5 1.1 and advantages 1 2 3 0 under clip .2: two ratios outside, one stopped; U = .5, 1, 0."""
    log_ratio = torch.tensor([0.5, 1.0, 1.5, 1.1], dtype=torch.float64).log()
    got = diagnostics(Clip(), log_ratio, torch.tensor([1.0, 2.0, 3.0, 0.0]), clip_low=0.2, clip_high=0.2)
    assert got == {
        "clip_fraction": 0.5,
        "zero_gradient_fraction": 0.25,
        "u_mean": pytest.approx(0.5),
        "u_p50": pytest.approx(0.5),
        "u_p90": pytest.approx(0.9),
        "u_p99": pytest.approx(0.99),
        "ess": pytest.approx(1.5**2 / (3 * 1.25)),
    }


@pytest.mark.parametrize("mode", MODES)
def test_the_clip_share_depends_on_the_ratio_alone_and_dead_gradients_on_the_objective(mode):
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    got = diagnostics(OBJECTIVES[mode](mode), LOG_RATIOS, advantage, clip_low=0.2, clip_high=0.2)
    assert got["clip_fraction"] == pytest.approx(3 / 6)
    dead = {"clip": 1 / 6, "dual_clip": 2 / 6}.get(mode, 0.0)  # 1.5: A = +1, r > hi; 4: A = -1, r > dual_clip
    assert got["zero_gradient_fraction"] == pytest.approx(dead)
    _, slope = value_and_slope(LOG_RATIOS, 1.0, 0.2, 0.2, mode)
    up = diagnostics(OBJECTIVES[mode](mode), LOG_RATIOS, torch.full((6,), 7.0), clip_low=0.2, clip_high=0.2)
    assert up["u_mean"] == pytest.approx(float(slope.mean()))
    assert up["ess"] == pytest.approx(float(slope.sum() ** 2 / (6 * slope.square().sum())))


def test_the_diagnostics_of_gspo_are_of_whole_sequences():
    """Sequence ratios exp(.1) and exp(.5): the second is stopped."""
    log_ratio = torch.tensor([[0.0, 0.2], [0.9, 0.1]], dtype=torch.float64)
    got = diagnostics(OBJECTIVES["gspo"]("gspo"), log_ratio, torch.ones(2), clip_low=0.2, clip_high=0.2)
    assert (got["clip_fraction"], got["zero_gradient_fraction"], got["ess"]) == (0.5, 0.5, pytest.approx(0.5))
    assert got["u_mean"] == pytest.approx(math.exp(0.1) / 2)


@pytest.mark.parametrize("advantage", [0.0, 1.0])
def test_no_slope_at_all_is_an_effective_size_of_zero(advantage):
    got = diagnostics(Clip(), torch.full((3,), 2.0), torch.full((3,), advantage), clip_low=0.2, clip_high=0.2)
    assert got["ess"] == got["u_mean"] == got["u_p99"] == 0


def test_diagnostics_need_no_graph_and_leave_none():
    log_ratio = torch.zeros(3, requires_grad=True)
    with torch.no_grad():
        got = diagnostics(OBJECTIVES["sapo"]("sapo"), log_ratio, torch.ones(3), clip_low=0.2, clip_high=0.2)
    assert got["u_mean"] == got["ess"] == 1 and log_ratio.grad is None


def test_the_gate_of_sapo_is_saturated_where_a_tenth_of_its_slope_is_left():
    """4 p (1 - p) at tau (r - 1) = 3 and 4 is .181 and .071."""
    log_ratio = torch.tensor([4.0, 5.0, 2.5, 3.0], dtype=torch.float64).log()
    sapo = OBJECTIVES["sapo"]("sapo", tau_pos=1.0, tau_neg=2.0)
    got = diagnostics(sapo, log_ratio, torch.tensor([1.0, 1.0, -1.0, -1.0]), clip_low=0.2, clip_high=0.2)
    assert got["saturated_fraction"] == 0.5
    assert "saturated_fraction" not in diagnostics(Clip(), log_ratio, torch.ones(4), clip_low=0.2, clip_high=0.2)


def test_a_weight_of_zero_is_a_dead_gradient():
    got = diagnostics(
        Clip(), torch.zeros(2), torch.ones(2), clip_low=0.2, clip_high=0.2, weight=torch.tensor([0.0, 2.0])
    )
    assert (got["zero_gradient_fraction"], got["u_mean"], got["ess"]) == (0.5, 1.0, 0.5)


def test_which_objectives_read_their_clip_range():
    reading = {name for name, kind in OBJECTIVES.items() if clips_ratios(kind(name))}
    assert reading == {"clip", "dual_clip", "ce_gppo", "cispo", "gspo"}
