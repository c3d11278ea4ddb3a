"""Which transitions are trained: those of a range of noise levels or of a list, of which a fraction may be drawn."""

import dataclasses

import numpy as np
import pytest
from helpers import assert_near, dance_grpo, setup_of, small_batch
from policy_case import CONFIG, ODE, SDE, SIGMAS, STEPS, A, Case, log_ratios

from unified_trainer.basics.errors import UserError
from unified_trainer.methods.dance_ppo import DancePPOConfig
from unified_trainer.methods.rl.policy import sample_policy
from unified_trainer.methods.rl.sde_windows import WindowConfig
from unified_trainer.parallel.random import Streams

NINE = dataclasses.replace(ODE, num_steps=9)  # eight stochastic transitions
CHOICES = {  # of the transitions 0, 1 and 2, from noise levels 1, .9 and .75
    "range": ({"noise_range": (0.8, 1.0)}, [0, 1]),
    "without the first": ({"noise_range": (0.0, 0.95)}, [1, 2]),
    "list": ({"trained_steps": (0, 2)}, [0, 2]),
    "both": ({"noise_range": (0.0, 0.95), "trained_steps": (0, 2)}, [2]),
}


def test_the_levels_of_the_case():
    assert [round(sigma, 4) for sigma in SIGMAS] == [1.0, 0.9, 0.75, 0.5, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [ODE, SDE], ids=["ode", "sde"])
@pytest.mark.parametrize("choice", CHOICES)
def test_the_update_is_the_policy_gradient_of_the_chosen_transitions(choice, sampler):
    """-mean A log r over samples and these transitions alone; all transitions keep their noise."""
    changes, chosen = CHOICES[choice]
    case = Case(sampler=sampler, **changes)
    assert len(case.calls.graph) == STEPS + len(chosen)
    assert_near(case.gradient, case.expected(lambda *of: -(A[:, None] * log_ratios(*of))[:, chosen].mean()), 1e-3)


def test_a_fraction_is_drawn_from_them_alone():
    drawn = set()
    one = dance_grpo(dataclasses.replace(CONFIG, noise_range=(0.5, 0.95), timestep_fraction=0.4), sampler=NINE)
    allowed = [s for s, sigma in enumerate(NINE.sigmas()[:8].tolist()) if 0.5 <= sigma <= 0.95]
    for step in range(20):
        window, trained = one.method.update.transitions(step, Streams(0, step), {})
        assert window == range(8) and len(trained) == round(0.4 * len(allowed))
        drawn |= set(trained)
    assert drawn == set(allowed) and 0 not in drawn


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["progressive", "random"])
def test_windows_lie_in_the_range_in_rollout_and_update(schedule):
    """A window of two in the noisier half, as published for windows of few steps: noise only there."""
    window = WindowConfig(size=2, schedule=schedule, every=1)
    config = dataclasses.replace(CONFIG, window=window, noise_range=(0.8, 1.0))
    sigmas = NINE.sigmas().tolist()
    last = max(s for s in range(8) if sigmas[s] >= 0.8)
    one, seen = dance_grpo(config, sampler=NINE), set()
    assert 2 <= last < 7
    for step in range(12):
        place, trained = one.method.update.transitions(step, Streams(0, step), {})
        assert trained == list(place) and len(place) == 2 and place.stop - 1 <= last
        student = one.roles["student"]
        made = sample_policy(config, NINE, student, small_batch(2), step, Streams(0, step), same_noise=False)
        assert made.states.shape[1] == 3
        seen.add(place.start)
    assert seen == set(range(last))
    assert {range(place, place + 2) for place in seen} == set(config.windows(NINE))


def test_all_levels_and_no_list_are_what_was_there_before():
    """Draws of the shared stream are those of a run without the settings."""
    for step in range(5):
        config, shared = CONFIG, Streams(0, step).shared
        assert config.window_at(step, NINE, shared) == range(8)
        assert config.candidates(NINE, 8) == list(range(8))
        moved = dataclasses.replace(config, window=WindowConfig(size=3, schedule="random"))
        ours = moved.window_at(step, NINE, np.random.default_rng(step))
        assert ours == moved.window.at(step, 8, np.random.default_rng(step))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_range": (0.5, 0.5)}, r"algorithm\.noise_range must rise, not \(0\.5, 0\.5\)"),
        ({"noise_range": (0.1, 0.4)}, r"no step is trained with algorithm\.noise_range .* steps 0 to 2 are 1, 0\.9, 0"),
        ({"trained_steps": (0, 3)}, r"algorithm\.trained_steps must lie in 0 to 2 with this sampler\.num_steps, not 3"),
        ({"trained_steps": (0,), "noise_range": (0.0, 0.95)}, r"no step is trained with .*trained_steps \(0,\)"),
        ({"trained_steps": (0,), "window": WindowConfig(size=2)}, r"trained_steps must be empty with .*window\.size"),
        ({"noise_range": (0.8, 1.0), "window": WindowConfig(size=3)}, r"window\.size must be at most 2, .*noise_range"),
    ],
)
def test_a_wrong_setting_names_its_key(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(CONFIG, **changes).check(setup_of(ODE))


def test_the_states_that_are_kept_of_a_sample():
    """Those of the longest window that may be trained, and x0; the memory of a training step is checked with them."""
    assert CONFIG.kept_states(NINE) == 8 + 2
    windowed = dataclasses.replace(CONFIG, window=WindowConfig(size=3))
    early = dataclasses.replace(CONFIG, trained_steps=(1, 3))
    of_all = dataclasses.replace(early, kl_in="reward")
    for config, states in ((CONFIG, 10), (windowed, 3 + 2), (early, 3 + 2), (of_all, 10)):
        one = dance_grpo(config, sampler=NINE)
        made = sample_policy(config, NINE, one.roles["student"], small_batch(2), 0, Streams(0, 0), same_noise=False)
        assert config.kept_states(NINE) == states == made.states.shape[1] + 1


def test_states_that_no_update_reads_change_no_other():
    """Bit for bit the states, log-densities and ends of a rollout that keeps all of them; values of PPO are of all."""
    early = dataclasses.replace(CONFIG, trained_steps=(1, 3))
    role, given = dance_grpo(CONFIG, sampler=NINE).roles["student"], (small_batch(2), 0)
    whole, part = (
        sample_policy(config, NINE, role, *given, Streams(0, 0), same_noise=True) for config in (CONFIG, early)
    )
    assert part.states.equal(whole.states[:, 1:5]) and part.log_probs.equal(whole.log_probs[:, 1:4])
    assert part.x0.equal(whole.x0)
    assert DancePPOConfig(trained_steps=(1, 3)).kept_states(NINE) == 10
