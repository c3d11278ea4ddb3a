"""The guard's rule on recorded series: dmd2 on the tiny world, seed 0, and runs that go wrong in two ways."""

import json

import pytest

from unified_trainer.basics.errors import UserError
from unified_trainer.data.tiny_world_measures import DISTANCES
from unified_trainer.run.guards.base import Alarm
from unified_trainer.run.guards.distillation import DistillationGuard, DistillationGuardConfig

# critic_to_teacher_error of the student updates in steps 1, 6, 11, ... of `--method dmd2`.
HEALTHY = [
    *(0.590, 0.243, 0.547, 0.578, 0.489, 0.644, 0.540, 0.975, 0.811, 0.492, 0.681, 0.708, 0.966, 0.915, 0.624, 0.814),
    *(0.675, 0.825, 0.977, 0.960, 0.860, 0.710, 0.788, 0.700, 0.925, 0.939, 0.919, 0.706, 0.920, 1.142, 0.875),
]
# The same with --critic.learning-rate 0.
CONTROL = [
    *(0.590, 0.374, 0.609, 0.632, 0.660, 0.757, 0.729, 0.989, 1.011, 0.675, 1.041, 0.905, 1.109, 1.208, 0.862, 1.199),
    *(1.117, 1.146, 1.198, 1.314, 1.155, 1.133, 1.223, 1.121, 1.237, 1.301, 1.217, 1.159, 1.241, 1.266, 1.247),
]


def fed(errors, powers=(), *, every: int = 5, **settings) -> tuple[DistillationGuard, list[tuple[int, Alarm]]]:
    """A guard that has seen an error in every `every`-th step and a power in every step, and its alarms by step."""
    guard, alarms = DistillationGuard(DistillationGuardConfig(**settings)), []
    for step in range(1, every * (len(errors) - 1) + 2):
        metrics = {"sample_power": powers[step - 1] if powers else 1.0}
        if (step - 1) % every == 0:
            metrics["critic_to_teacher_error"] = errors[(step - 1) // every]
        alarm = guard.after_step(step, metrics)
        alarms += [] if alarm is None else [(step, alarm)]
    return guard, alarms


def test_it_is_silent_on_the_healthy_run_and_fires_on_the_frozen_critic():
    """The eight updates of steps 41 to 76 are the first whose mean is above 1: 8.01 / 8."""
    assert fed(HEALTHY)[1] == []
    [(step, alarm)] = fed(CONTROL)[1]  # warn: said once while it lasts
    assert (step, alarm.first) == (76, 41)
    assert alarm.why == "critic_to_teacher_error 1.001 on average over 8 student updates, above 1"
    stopping = fed(CONTROL, action="stop")[1]
    assert [step for step, _ in stopping] == list(range(76, 152, 5)) and stopping[-1][1].first == 116


def test_single_values_above_the_limit_are_no_alarm():
    assert fed([0.9] * 8 + [1.6] + [0.9] * 8)[1] == []
    assert [step for step, _ in fed([0.9] * 8 + [1.9] + [0.9] * 8)[1]] == [41]


def test_a_value_that_is_no_number_is_an_alarm():
    assert len(fed([0.5] * 7 + [float("nan")])[1]) == 1


@pytest.mark.parametrize(("change", "fires"), [(2.9, False), (3.2, True), (0.35, False), (0.32, True)])
def test_the_power_is_that_of_the_errors_window_over_the_first_one(change, fires):
    """Two updates, every second step, are three powers: 2 at first and 2 x change at the end."""
    powers = [1.0, 2.0, 3.0, 2.0, *[2.0 * change] * 3]
    _, alarms = fed([0.5] * 4, powers, every=2, window=2)
    assert [step for step, _ in alarms] == ([7] if fires else [])
    if fires:
        assert f"sample_power 2 -> {2 * change:.3g}, outside 0.33 to 3 times its first mean" in alarms[0][1].why
        assert alarms[0][1].first == 5


def looks(**values: float) -> dict[str, float]:
    whole = {"power": 0.9, "saturation": 0.95, "motion": 0.8, "diversity": 0.9} | values
    return {f"{name}_to_teacher": value for name, value in whole.items()}


@pytest.mark.parametrize("name", ["power", "saturation", "motion", "diversity"])
def test_samples_unlike_the_teachers(name):
    guard = DistillationGuard(DistillationGuardConfig())
    assert guard.after_validation(0, looks()) is None and guard.after_validation(50, looks()) is None
    for value in (0.3, 3.1):
        alarm = guard.after_validation(100, looks(**{name: value}))
        assert (
            alarm and alarm.first == 51 and alarm.why.startswith(f"{name} of the samples {value} times the teacher's")
        )
        assert guard.verdict == {"guard_alarm": 1.0}
    assert guard.after_validation(150, looks(**{name: 1.9})) is None and guard.window_starts == (151,)


@pytest.mark.parametrize("name", DISTANCES)
def test_samples_further_from_the_law_of_the_tiny_world_than_the_teachers(name):
    guard = DistillationGuard(DistillationGuardConfig(departure=0.5))
    near = {f"{other}_to_teacher": 0.1 for other in DISTANCES} | {"power_to_teacher": 1.0}
    assert guard.after_validation(0, near | {f"{name}_to_teacher": 0.7}) is None  # a student that starts there
    assert guard.after_validation(50, near | {f"{name}_to_teacher": -2.0}) is None  # nearer than the teacher
    alarm = guard.after_validation(100, near | {f"{name}_to_teacher": 0.75})
    assert alarm and alarm.first == 51
    assert alarm.why == f"{name} of the samples +0.75 from the teacher's, +0.7 at first, at most 0.5"


def test_a_student_that_starts_unlike_its_teacher_must_not_go_further():
    guard = DistillationGuard(DistillationGuardConfig())
    assert guard.after_validation(0, looks(motion=0.2)) is None
    assert guard.after_validation(1, looks(motion=0.25)) is None
    assert guard.after_validation(2, looks(motion=0.19)) is not None


def test_a_healthy_causal_student_is_more_diverse_than_its_teacher():
    """The looks of `self_forcing` with seed 0 before and during its training, in which the accuracy rises to .94."""
    guard = DistillationGuard(DistillationGuardConfig(action="stop"))
    for step, diversity in ((0, 2.02), (100, 2.21), (200, 2.20), (300, 1.97)):
        assert guard.after_validation(step, looks(diversity=diversity)) is None


def test_the_planted_collapse_is_seen_in_its_samples_alone():
    """`--student.learning-rate 1e-2`: the critic knows noise better than the teacher does, but the colors are gone."""
    errors = (0.590, 0.563, 0.429, 0.459, 0.325, 0.371, 0.571, 0.342, 0.499, 0.611, 0.534, 0.547, 0.424, 0.628, 0.517)
    guard, alarms = fed(errors)
    assert alarms == []
    guard.after_validation(0, looks(saturation=0.111 / 0.125))
    assert "saturation" in guard.after_validation(50, looks(saturation=0.050 / 0.125)).why


def test_its_state_goes_through_a_manifest():
    """Where it is cut does not matter: a guard that continues from the state raises the same alarms."""
    for cut in (8, 43, 60, 84):
        whole, other = (DistillationGuard(DistillationGuardConfig(action="stop")) for _ in range(2))
        whole.after_validation(0, looks(motion=0.3))
        found = []
        for step in range(1, 100):
            metrics = {"sample_power": 1.0 + step}
            if step % 5 == 1:
                metrics["critic_to_teacher_error"] = CONTROL[step // 5]
            alarm = whole.after_step(step, metrics)
            if step > cut:
                assert other.after_step(step, metrics) == alarm
                found.append(alarm)
            elif step == cut:
                other.load_state(json.loads(json.dumps(whole.state)))
        assert any(found) and other.state == whole.state
        assert other.after_validation(99, looks(motion=0.35)) is None


@pytest.mark.parametrize("bounds", [(1.5, 0.5), (1.1, 2.0), (0.2, 0.9)])
def test_a_range_holds_the_teacher_itself(bounds):
    with pytest.raises(UserError, match=r"guard\.motion must be a range around 1"):
        DistillationGuardConfig(motion=bounds).check()
