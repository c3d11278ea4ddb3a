"""Samples of older weights: the corrected losses by hand, the metrics by lag, and the floor of ess."""

import dataclasses
import sys

import pytest
import torch
from helpers import REPO, ScriptedScorer, assert_near, assert_same, dance_grpo, gradients, setup_of, trainable, weights
from policy_case import (
    CONFIG,
    ELEMENTS,
    ODE,
    REWARDS,
    A,
    Case,
    OlderRollouts,
    ks,
    log_ratios,
    nudge,
)

from unified_trainer.numerics.objectives import Clip, diagnostics

sys.path.insert(0, str(REPO / "scripts"))
from lagged import LaggedRollouts

pytestmark = pytest.mark.slow  # seconds together

MIXED = (0, 1, 1, 3, 0, 1, 3, 3)
CORRECTIONS = [(name, density) for name in ("decoupled", "loglinear", "truncated") for density in ("mean", "joint")]


def power(density: str) -> int:
    return ELEMENTS if density == "joint" else 1


# The loss.


@pytest.mark.parametrize(("correction", "density"), CORRECTIONS)
def test_samples_of_the_present_weights_are_not_corrected(correction, density):
    """Bit for bit, also where the ratio is not 1: the correction reads the lag, not the ratio."""
    plain = Case(moved=True)
    corrected = Case(moved=True, correction=correction, weight_density=density, weight_max=1.0)
    assert_same(corrected.gradient, plain.gradient)
    assert corrected.metrics == plain.metrics


def test_without_a_correction_the_lag_changes_no_gradient():
    assert_same(Case(moved=True, lags=MIXED).gradient, Case(moved=True).gradient)


@pytest.mark.parametrize("density", ["mean", "joint"])
def test_decoupled_starts_at_ratio_1_with_the_weights_of_the_lag(density):
    """J = min(p / b, c) min(r A, clip(r) A), r = 1 before the first update: no sample is clipped."""
    case = Case(moved=True, lags=2, correction="decoupled", weight_density=density, weight_max=1.5)
    shares = []

    def loss(now, then):
        d = log_ratios(now, then)
        weight = (power(density) * d.detach().double()).exp().clamp(max=1.5)
        shares.extend([float(weight.mean()), float((weight >= 1.5).double().mean())])
        return -(weight * A[:, None] * d).mean()

    assert_near(case.gradient, case.expected(loss), 1e-3)
    assert case.metrics["clip_fraction"] == case.metrics["zero_gradient_fraction"] == 0
    assert case.metrics["importance_weight"] == pytest.approx(shares[0], rel=1e-3)
    assert case.metrics["importance_weight_truncated"] == pytest.approx(shares[1])
    assert (density == "joint") == (shares[1] > 0)


@pytest.mark.parametrize("density", ["mean", "joint"])
def test_the_proximal_policy_of_decoupled_is_that_of_the_start_of_the_training_step(density):
    """In the second update the student has left it: r = pi / p is clipped around p, and the weight is p / b still."""
    changes = {"correction": "decoupled", "weight_density": density, "prompts_per_update": 1, "update_batch": 4}
    case = Case(moved=True, between=0.01, lags=2, **changes)
    _, second = case.one.roles["student"].gradients
    now, start, then = trainable(), trainable(), trainable()
    nudge(start)
    nudge(now)
    nudge(now, 0.01)
    with torch.no_grad():
        at_start, at_rollout = case.steps(start), case.steps(then)
    d, p = log_ratios(case.steps(now), at_start), log_ratios(at_start, at_rollout)
    weight = (power(density) * p.double()).exp().clamp(max=2.0)
    objective = Clip()(d, A[:, None].expand_as(d), 1e-3, 2e-3)
    (-(weight * objective)[4:].mean()).backward()
    assert_near(second, gradients(now.network), 1e-3)
    assert case.metrics["zero_gradient_fraction"] > 0


@pytest.mark.parametrize("density", ["mean", "joint"])
def test_loglinear_by_hand(density):
    """With lag n the proximal log-ratio is n / (n + 1) of the present one, sample by sample."""
    changes = {"correction": "loglinear", "weight_density": density, "clip_low": 0.01, "clip_high": 0.01}
    case = Case(moved=True, lags=MIXED, **changes)
    share = torch.tensor([n / (n + 1) for n in MIXED], dtype=torch.float64)[:, None]

    def loss(now, then):
        d = log_ratios(now, then).double()
        p = share * d.detach()
        weight = (power(density) * p).exp().clamp(max=2.0)
        return -(weight * Clip()(d - p, A[:, None].expand_as(d), 0.01, 0.01)).mean()

    assert_near(case.gradient, case.expected(loss), 1e-3)
    assert 0 < case.metrics["zero_gradient_fraction"] < Case(moved=True, lags=MIXED).metrics["zero_gradient_fraction"]


def test_truncated_has_no_clip_and_weighs_by_the_present_policy():
    """g = min(pi / b, c) A for samples that lag; those of lag 0 are clipped as ever."""
    case = Case(moved=True, lags=MIXED, correction="truncated", weight_density="joint", weight_max=1.2)
    lagging = torch.tensor(MIXED)[:, None] > 0

    def loss(now, then):
        d = log_ratios(now, then).double()
        advantage = A[:, None].expand_as(d)
        weight = (ELEMENTS * d.detach()).exp().clamp(max=1.2)
        clipped = Clip()(d, advantage, 1e-3, 2e-3)
        return -torch.where(lagging, weight * advantage * d, clipped).mean()

    assert_near(case.gradient, case.expected(loss), 1e-3)
    assert case.metrics["zero_gradient_fraction/lag_3"] == 0 < case.metrics["zero_gradient_fraction/lag_0"]


@pytest.mark.parametrize(("lags", "calls"), [(0, 0), (2, 3)])
def test_only_decoupled_calls_the_network_once_more_and_only_if_samples_lag(lags, calls):
    """The rollout makes four calls without gradient; then one for each of the three trained transitions."""
    for correction in ("none", "decoupled", "loglinear", "truncated"):
        case = Case(moved=True, lags=lags, correction=correction)
        more = calls if correction == "decoupled" else 0
        assert len(case.calls.where(graph=False)) == 4 + more


@pytest.mark.parametrize("changes", [{"update_batch": 2}, {"update_batch": 1, "best_of_n": 2}])
def test_the_corrected_gradient_does_not_depend_on_the_update_batch(changes):
    rest = {"moved": True, "lags": MIXED, "correction": "decoupled", "weight_density": "joint"}
    parts, whole = Case(**rest, **changes), Case(**rest, **changes | {"update_batch": 8})
    assert_near(parts.gradient, whole.gradient, 1e-3)
    assert parts.metrics == pytest.approx(whole.metrics, rel=2e-3, abs=1e-6)


# Metrics.


def test_metrics_by_lag_are_those_of_the_samples_of_that_lag():
    case = Case(moved=True, lags=MIXED)
    now, then = trainable(), trainable()
    nudge(now)
    with torch.no_grad():
        after, before = case.steps(now), case.steps(then)
    d, k = log_ratios(after, before), ks(after, before)
    for lag in (0, 1, 3):
        rows = torch.tensor(MIXED) == lag
        ratio, advantage = d[rows].flatten(), A[rows, None].expand(-1, 3).flatten()
        wanted = diagnostics(Clip(), ratio, advantage, clip_low=1e-3, clip_high=2e-3)
        assert case.metrics[f"approx_kl/lag_{lag}"] == pytest.approx(float(k[rows].mean()), rel=1e-3)
        for name in ("clip_fraction", "zero_gradient_fraction", "ess"):
            assert case.metrics[f"{name}/lag_{lag}"] == pytest.approx(wanted[name], rel=1e-3)
    assert (case.metrics["lag"], case.metrics["lag_max"]) == (1.5, 3)


def test_there_are_none_without_a_lag():
    names = Case(moved=True, correction="decoupled").metrics
    assert not [name for name in names if "lag" in name or name.startswith("importance_weight")]


# The floor of ess.


def test_samples_that_lag_too_far_are_said_and_made_less_ahead():
    ess = Case(moved=True, lags=1).metrics["ess"]
    high, low = (Case(moved=True, lags=1, ess_floor=ess + move) for move in (0.01, -0.01))
    (message,) = high.one.messages
    assert message.startswith(f"ess is {ess:.2g}, below algorithm.ess_floor {ess + 0.01:g}: samples lag too far")
    assert high.one.method.rollouts.lowered == 1
    assert not low.one.messages and low.one.method.rollouts.lowered == 0


def test_the_floor_is_of_samples_that_lag_and_of_the_first_update():
    """Later updates of a step leave the rollout's policy by themselves."""
    assert not Case(moved=True, lags=0, ess_floor=1.0).one.messages
    case = Case(between=0.02, lags=1, ess_floor=0.9999, prompts_per_update=1, update_batch=4)
    assert case.metrics["ess"] < 0.9 and not case.one.messages and case.one.method.rollouts.lowered == 0


def test_in_one_process_there_is_nothing_to_lower():
    one = dance_grpo(CONFIG, sampler=ODE, scorer=ScriptedScorer(REWARDS))
    one.method.rollouts.lower_ahead()
    assert one.step(0).get("lag", 0) == 0


# Samples made ahead of training.


def lagged(ahead: int, steps: int, **changes):
    """Return a trainer whose student moves, after some training steps, its samples, and its weights at each step."""
    one = dance_grpo(dataclasses.replace(CONFIG, **changes), sampler=ODE, scorer=ScriptedScorer(REWARDS), moves=True)
    student = one.roles["student"]
    one.method.sample_from(LaggedRollouts(OlderRollouts(one.method.rollouts, 0), student, ahead))
    before, metrics = [], []
    for step in range(steps):
        before.append(weights(student.network))
        metrics.append(one.step(step))
    return one, before, metrics


def test_samples_of_step_k_come_from_the_weights_after_k_minus_ahead_steps():
    one, before, metrics = lagged(2, 5)
    assert [row.get("lag", 0) for row in metrics] == [0, 1, 2, 2, 2]
    made = one.method.rollouts._rollouts.seen
    for step, version in enumerate([0, 0, 0, 1, 2]):
        fresh = dance_grpo(CONFIG, sampler=ODE, scorer=ScriptedScorer(REWARDS))
        student = fresh.roles["student"]
        with torch.no_grad():
            for key, weight in student.network.named_parameters():
                weight.copy_(before[version][key])
        fresh.method.sample_from(watched := OlderRollouts(fresh.method.rollouts, 0))
        fresh.step(step)
        assert torch.equal(made[step].rollout.states, watched.seen[0].rollout.states)


def test_ahead_0_is_the_run_without_it_and_a_correction_changes_nothing_there():
    plain = dance_grpo(CONFIG, sampler=ODE, scorer=ScriptedScorer(REWARDS), moves=True)
    for step in range(3):
        plain.step(step)
    one, _, _ = lagged(0, 3, correction="decoupled", weight_density="joint")
    assert_same(weights(one.roles["student"].network), weights(plain.roles["student"].network))


def test_a_source_that_was_asked_to_lag_less_does():
    """From step 1 on every step asks for it: ahead 3, then 2, 1 and 0; samples never come from older weights again."""
    _, _, metrics = lagged(3, 6, ess_floor=1.0, clip_low=1e-6, clip_high=1e-6)
    assert [row.get("lag", 0) for row in metrics] == [0, 1, 2, 1, 0, 0]


# Wrong settings.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"correction": "decoupled", "guard": True}, r"cannot be combined with algorithm\.guard"),
        ({"correction": "truncated", "guard": True}, r"cannot be combined with algorithm\.guard"),
        ({"correction": "vtrace"}, r"algorithm\.correction vtrace corrects the targets of a value function"),
        ({"weight_max": 3.0}, r"algorithm\.weight_max needs algorithm\.correction decoupled or loglinear or truncated"),
        ({"trust_region": 0.1}, r"algorithm\.trust_region needs algorithm\.correction dppo"),
        (
            {"correction": "decoupled", "weight_density": "joint", "kernel": "cps", "eta": 0.5, "normalised": False},
            r"algorithm\.weight_density joint needs the normalised density",
        ),
    ],
)
def test_a_wrong_setting_names_its_key(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes).check(setup_of(ODE))
