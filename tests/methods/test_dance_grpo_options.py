"""The settings of dance_grpo, each against MATH.md's formulas on the recorded states of a training step."""

import dataclasses
import math

import pytest
import torch
from helpers import Calls, ScriptedScorer, WatchedRollouts, assert_near, dance_grpo, frozen, gradients, trainable
from policy_case import (
    CONFIG,
    ELEMENTS,
    KERNELS,
    ODE,
    REWARDS,
    SDE,
    SIGMAS,
    STEPS,
    A,
    Case,
    divergence,
    ks,
    log_ratios,
    nudge,
    policy_gradient,
)

from unified_trainer.methods.rl.minibatches import Minibatch
from unified_trainer.methods.rl.replay import Replay
from unified_trainer.methods.rl.sde_windows import WindowConfig
from unified_trainer.numerics.flow import sigma_table
from unified_trainer.numerics.objectives import OBJECTIVES, Clip, diagnostics
from unified_trainer.sampling.solver import SamplerConfig, generate

pytestmark = pytest.mark.slow  # seconds together

# Kernels.


@pytest.mark.parametrize("name", KERNELS)
def test_the_first_update_of_every_kernel_is_its_policy_gradient(name):
    case = Case(kernel=name, eta=KERNELS[name])
    assert_near(case.gradient, case.expected(policy_gradient), 1e-4)
    assert case.metrics["log_ratio_abs_max"] == 0


def test_the_unnormalised_density_of_cps():
    case = Case(kernel="cps", eta=0.8, normalised=False)
    assert_near(case.gradient, case.expected(policy_gradient), 1e-4)


def test_auto_follows_the_sampler():
    """auto is dance for an ode sampler, and the renoising x' = (1 - sigma') x0 + sigma' eps for an sde sampler."""
    case = Case(sampler=SDE, eta=0.1)
    assert_near(case.gradient, case.expected(policy_gradient), 1e-4)
    assert_near(Case(eta=0.2).gradient, Case(kernel="dance", eta=0.2).gradient)
    for s in range(STEPS - 1):
        x0 = case.calls.x_t[s] - SIGMAS[s] * case.steps(trainable())[s].velocity.detach()
        drawn = (case.calls.x_t[s + 1] - (1 - SIGMAS[s + 1]) * x0) / SIGMAS[s + 1]
        assert float(drawn.std()) == pytest.approx(1, abs=0.05)


def test_the_policy_of_a_few_step_student_is_its_sampler():
    """With equal noise the rollout ends where `generate` does: training and sampling are one process."""
    decoded = []
    one = dance_grpo(CONFIG, sampler=SDE, scorer=ScriptedScorer(REWARDS))
    begin = one.method.reward.begin
    one.method.reward.begin = lambda x0, prompts, step: (decoded.append(x0), begin(x0, prompts, step))[1]
    calls = Calls.of(one.roles["student"])
    one.step(0)
    role = trainable()
    noises = []
    for s in range(STEPS - 1):
        x_t, x_next = calls.x_t[s], calls.x_t[s + 1]
        with torch.no_grad():
            x0 = x_t - SIGMAS[s] * role.velocity(x_t, torch.full((8,), SIGMAS[s]), one.loader.batch(0).cond)
        noises.append((x_next - (1 - SIGMAS[s + 1]) * x0) / SIGMAS[s + 1])
    made = generate(role, calls.x_t[0], one.loader.batch(0), SDE, lambda s: noises[s])
    torch.testing.assert_close(decoded[0], made, rtol=1e-4, atol=1e-4)


# Weights of transitions.


def test_inverse_dt_divides_by_the_step():
    case = Case(step_weight="inverse_dt")
    weights = torch.tensor([1 / (SIGMAS[s] - SIGMAS[s + 1]) for s in range(3)])
    expected = case.expected(lambda now, then: -(A[:, None] * weights * log_ratios(now, then)).mean())
    assert_near(case.gradient, expected, 1e-4)


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_equal_pulls_every_velocity_by_its_noise_alone(name, guard):
    """d loss / d v = A eps / D at every transition and for every kernel: a higher density is a lower v along eps."""
    case = Case(kernel=name, eta=KERNELS[name], step_weight="equal", guard=guard)

    def loss(now, then):
        terms = [((a.x_next - b.mean) / b.std * a.velocity).flatten(1).mean(1) for a, b in zip(now, then, strict=True)]
        return (A[:, None] * torch.stack(terms, 1)).mean()

    assert_near(case.gradient, case.expected(loss), 2e-4)


def test_guard_and_inverse_dt_of_dance_weigh_by_std_over_step():
    case = Case(guard=True, step_weight="inverse_dt")
    weights = torch.tensor([0.3 / math.sqrt(SIGMAS[s] - SIGMAS[s + 1]) for s in range(3)])
    expected = case.expected(lambda now, then: -(A[:, None] * weights * log_ratios(now, then)).mean())
    assert_near(case.gradient, expected, 1e-4)


# Objectives, away from ratio 1.

PARAMETERS = {
    "none": {},
    "clip": {},
    "dual_clip": {"dual_clip": 1.003},
    "soft_clip": {"alpha": 40.0},
    "sapo": {"tau_pos": 30.0, "tau_neg": 50.0},
    "ce_gppo": {"beta_low": 0.3, "beta_high": 0.6},
    "cispo": {},
}


@pytest.mark.parametrize("mode", PARAMETERS)
def test_every_objective_with_its_own_parameters(mode):
    case = Case(moved=True, objective=OBJECTIVES[mode](mode, **PARAMETERS[mode]))

    def loss(now, then, mode=mode, parameters=PARAMETERS[mode]):
        d = log_ratios(now, then)
        return -OBJECTIVES[mode](mode, **parameters)(d, A[:, None].expand_as(d), 1e-3, 2e-3).mean()

    assert_near(case.gradient, case.expected(loss), 1e-3)
    assert case.metrics["clip_fraction"] > 0


def test_gspo_has_the_gradient_of_the_whole_sequence():
    """Passes with one graph at a time add up to the gradient of -mean min(s A, clip(s) A), s of all transitions."""
    case = Case(moved=True, objective=OBJECTIVES["gspo"]("gspo"), update_batch=4)

    def loss(now, then):
        return -OBJECTIVES["gspo"]("gspo")(log_ratios(now, then), A, 1e-3, 2e-3).mean()

    assert_near(case.gradient, case.expected(loss), 1e-3)
    assert 0 < case.metrics["zero_gradient_fraction"] < 1
    assert_near(Case(objective=OBJECTIVES["gspo"]("gspo")).gradient, Case().gradient, 1e-5)


def test_the_guard_reads_the_means_before_and_after():
    case = Case(moved=True, guard=True)

    def loss(now, then):
        stds = torch.tensor([step.std for step in now])
        guarded = (log_ratios(now, then) + ks(now, then)) * stds
        return -Clip()(guarded, A[:, None].expand_as(guarded), 1e-3, 2e-3).mean()

    assert_near(case.gradient, case.expected(loss), 1e-3)


def test_the_trust_region_drops_samples_that_moved_far_enough():
    bound = Case(moved=True).metrics["approx_kl"]
    case = Case(moved=True, objective=OBJECTIVES["none"]("none"), correction="dppo", trust_region=bound)
    fractions = []

    def loss(now, then):
        d = log_ratios(now, then)
        leaves = (ks(now, then) >= bound) & (d * A[:, None] > 0)
        fractions.append(leaves.double().mean().item())
        return -(d.exp() * A[:, None]).masked_fill(leaves, 0.0).mean()

    assert_near(case.gradient, case.expected(loss), 1e-3)
    assert 0 < fractions[0] < 1 and case.metrics["trust_region_left"] == pytest.approx(fractions[0])


def test_the_trust_region_reads_the_ratio_of_the_objective():
    """Under guard the ratio is centred: samples 0 and 1 left by the raw log-ratio or the guarded one, never by both."""
    config = dataclasses.replace(CONFIG, guard=True, correction="dppo", trust_region=0.5)
    update = dance_grpo(dataclasses.replace(config, objective=OBJECTIVES["none"]("none"))).method.update
    log_ratio, ratio = torch.tensor([-0.1, 0.1, 0.1, 0.1]), torch.tensor([0.1, -0.1, 0.1, 0.1])
    zeros, kl = torch.zeros(4), torch.tensor([1.0, 1.0, 1.0, 0.1])
    replay = Replay(log_ratio, ratio, kl, None, (1e-3, 1e-3), zeros.long(), zeros, ELEMENTS)
    minibatch = Minibatch(torch.arange(4), torch.tensor([1.0, 10.0, 100.0, 1000.0]))
    weight = update.correction.weight(replay, torch.ones(4))
    loss = update._loss(replay, torch.ones(4), weight, minibatch, 0)
    assert float(loss) == pytest.approx(-10 * math.exp(-0.1) - 1000 * math.exp(0.1), rel=1e-5)


# KL to a reference.


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *((kind, {}) for kind in ("exact", "kl", "abs", "mse", "low_var_kl")),
        ("low_var_kl", {"kernel": "cps", "eta": 0.8, "normalised": False}),  # the KL is that of the normalised density
    ],
)
def test_kl_in_the_loss(kind, changes):
    reference = frozen("reference", seed=1)
    case = Case(reference=reference, kl_estimate=kind, kl_coefficient=0.7, **changes)
    with torch.no_grad():
        ref = case.steps(reference)
    values = []

    def loss(now, then):
        kl = divergence(kind, now, ref)
        values.append(kl.mean().item())
        return policy_gradient(now, then) + 0.7 * kl.mean()

    assert_near(case.gradient, case.expected(loss), 1e-3)
    assert case.metrics["kl"] == pytest.approx(values[0], rel=1e-4)
    assert not gradients(reference.network)


def test_an_adapted_coefficient_is_that_of_the_loss():
    """Not the one of the settings: from 0.1 adapted to 0.7, the gradient is that of 0.7."""
    changes = {"clip_low": 1e-3, "clip_high": 2e-3, "kl_coefficient": 0.1, "kl_target": 1e-3}
    scorer, reference = ScriptedScorer(REWARDS), frozen("reference", seed=1)
    one = dance_grpo(dataclasses.replace(CONFIG, **changes), sampler=ODE, scorer=scorer, reference=reference)
    one.method.load_state_dict({"kl_coefficient": torch.tensor(0.7, dtype=torch.float64)})
    assert one.step(0)["kl_coefficient"] == 0.7
    fixed = Case(reference=frozen("reference", seed=1), kl_coefficient=0.7)
    assert_near(one.roles["student"].gradients[0], fixed.gradient, 1e-6)


def test_a_reference_equal_to_the_student_has_no_effect():
    """Its KL and the gradient of its KL are exactly 0."""
    case = Case(reference=frozen("reference"), kl_coefficient=100.0)
    assert case.metrics["kl"] == 0
    assert_near(case.gradient, Case().gradient)


def test_the_gradient_with_kl_does_not_depend_on_the_update_batch():
    changes = {"kl_coefficient": 0.7, "best_of_n": 2}
    whole = Case(reference=frozen("reference", seed=1), **changes)
    parts = Case(reference=frozen("reference", seed=1), update_batch=2, **changes)
    assert_near(parts.gradient, whole.gradient, 1e-4)


# Windows.


def test_a_window_alone_is_stochastic_stored_and_trained():
    window = WindowConfig(size=2, every=1)
    sampler = SamplerConfig(num_steps=6, guidance_scale=1.0)
    sigmas = sigma_table(6, 3.0)
    for step, first in enumerate([0, 1, 2, 3, 0]):
        case = Case(sampler=sampler, window=window, step=step)
        trained = [int((sigmas - case.calls.sigma[i][0]).abs().argmin()) for i in case.calls.where(graph=True)]
        assert trained == [first, first + 1] and case.metrics["window_first"] == first
        role = trainable()
        for s in range(5):
            x_t, x_next = case.calls.x_t[s], case.calls.x_t[s + 1]
            with torch.no_grad():
                euler = x_t + float(sigmas[s + 1] - sigmas[s]) * role.velocity(x_t, sigmas[s].expand(8), case.cond)
            assert torch.allclose(x_next, euler, atol=1e-5) == (s not in trained)


def test_only_the_states_of_the_window_are_kept():
    one = dance_grpo(
        dataclasses.replace(CONFIG, window=WindowConfig(size=2)),
        sampler=dataclasses.replace(ODE, num_steps=9),
        scorer=ScriptedScorer(REWARDS),
    )
    one.method.sample_from(watched := WatchedRollouts(one.method.rollouts))
    one.step(0)
    kept = watched.seen[0].rollout
    assert kept.states.shape[1] == 3 and kept.log_probs.shape[1] == 2


def test_a_random_window_is_one_for_all_parts_of_a_rollout():
    """The window is drawn anew for each part and for the update, from the same stream."""
    for step in range(3):
        rollouts = []
        for size in (2, 8):
            config = dataclasses.replace(CONFIG, window=WindowConfig(size=2, schedule="random"), rollout_batch=size)
            one = dance_grpo(config, sampler=dataclasses.replace(ODE, num_steps=9), scorer=ScriptedScorer(REWARDS))
            one.method.sample_from(watched := WatchedRollouts(one.method.rollouts))
            one.step(step)
            rollouts.append(watched.seen[0].rollout)
        torch.testing.assert_close(rollouts[0].states, rollouts[1].states, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fraction", [0.1, 0.5, 1.0])
def test_a_window_is_trained_whole_whatever_the_fraction(fraction):
    sampler, window = dataclasses.replace(ODE, num_steps=9), WindowConfig(size=4, every=1)
    case = Case(sampler=sampler, window=window, step=3, timestep_fraction=fraction)
    levels = [float(case.calls.sigma[i][0]) for i in case.calls.where(graph=True)]
    assert levels == pytest.approx(sigma_table(9, 3.0)[3:7].tolist())


# Metrics.


def test_k_and_its_noise_floor():
    case = Case(moved=True)
    now, then = trainable(), trainable()
    nudge(now)
    with torch.no_grad():
        after, before = case.steps(now), case.steps(then)
    k, d = ks(after, before), log_ratios(after, before)
    assert case.metrics["approx_kl"] == pytest.approx(float(k.mean()), rel=1e-3)
    assert case.metrics["log_ratio_noise_floor"] == pytest.approx(math.sqrt(2 * float(k.mean()) / ELEMENTS), rel=1e-3)
    for s in range(3):
        assert case.metrics[f"approx_kl/{s}"] == pytest.approx(float(k[:, s].mean()), rel=1e-3)
    assert case.metrics["log_ratio"] == pytest.approx(float(d.mean()), abs=1e-5)
    wanted = diagnostics(Clip(), d.flatten(), A[:, None].expand_as(d).flatten(), clip_low=1e-3, clip_high=2e-3)
    assert {key: case.metrics[key] for key in wanted} == pytest.approx(wanted, rel=1e-2)
    assert 0 < wanted["zero_gradient_fraction"] < 1


def test_k_of_unchanged_weights_is_rounding():
    """The old means come from the states and the redrawn noise, with an error far below the KL of an update."""
    for sampler in (ODE, SDE):
        assert Case(sampler=sampler).metrics["approx_kl"] < 1e-10


@pytest.mark.parametrize("changes", [{"update_batch": 2}, {"update_batch": 1, "best_of_n": 2}])
def test_what_is_logged_does_not_depend_on_the_update_batch(changes):
    """Quantiles and effective sizes are of the whole update, without padding."""
    parts, whole = Case(moved=True, **changes).metrics, Case(moved=True, **changes | {"update_batch": 8}).metrics
    assert parts.keys() == whole.keys()
    assert parts == pytest.approx(whole, rel=2e-3, abs=1e-6)
