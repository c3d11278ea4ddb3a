"""The hacking monitor: its rule by hand, and a run with a planted shortcut that is stopped."""

import json
import os
import signal

import pytest
from helpers import SMALL, copy_of, flags, metrics_of, run
from recorded_validations import HACKED, PLAIN

from unified_trainer.__main__ import main
from unified_trainer.run.checkpoint import manifest
from unified_trainer.run.guards.hacking_monitor import HackingMonitor, HackingMonitorConfig
from unified_trainer.run.trainer import Trainer

FIRST = {
    "reward": 2.0,
    "reward_std": 1.0,
    "accuracy": 0.5,
    "accuracy_std": 0.5,
    "reward/clip": 20.0,
    "reward/clip_std": 3.0,
    "pixels/saturation": 0.2,
    "pixels/saturation_std": 0.01,
    "pixels/diversity": 0.4,
}
UP = {"reward": 3.0}
CONFIG = HackingMonitorConfig(action="warn", rise=0.5, fall=0.4, drift=2.0, collapse=0.5)


def watching(
    config: HackingMonitorConfig = CONFIG, held_out: tuple[str, ...] = ("accuracy", "reward/clip")
) -> HackingMonitor:
    """A monitor after the first validation."""
    one = HackingMonitor(config, held_out)
    assert one.watch(FIRST) is None
    return one


# The rule.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accuracy": 0.25}, "accuracy fell 0.5 -> 0.25 (-0.5 std)"),
        ({"reward/clip": 18.5}, "reward/clip fell 20 -> 18.5 (-0.5 std)"),
        ({"pixels/saturation": 0.225}, "pixels/saturation changed 0.2 -> 0.225 (+2.5 std)"),
        ({"pixels/saturation": 0.175}, "pixels/saturation changed 0.2 -> 0.175 (-2.5 std)"),
        ({"pixels/diversity": 0.19}, "pixels/diversity fell 0.4 -> 0.19"),
        (
            {"accuracy": 0.25, "pixels/saturation": 0.3},
            "accuracy fell 0.5 -> 0.25 (-0.5 std), pixels/saturation changed",
        ),
    ],
)
def test_a_rising_reward_with_evidence_against_it(changes, message):
    alarm = watching().watch(FIRST | UP | changes)
    assert alarm.startswith(f"reward rose 2 -> 3 (+1.0 std) while {message}")


@pytest.mark.parametrize(
    "changes",
    [
        UP,
        UP | {"accuracy": 0.31},  # -0.38
        UP | {"accuracy": 0.9, "reward/clip": 40.0},  # held-out metrics rise too
        UP | {"pixels/saturation": 0.219},  # +1.9
        UP | {"pixels/diversity": 0.21},
        {"reward": 2.4, "accuracy": 0.0},  # +0.4: not a reward that rises
        {"reward": 1.0, "accuracy": 0.0},
    ],
)
def test_no_alarm(changes):
    assert watching().watch(FIRST | changes) is None


def test_the_measure_is_cohens_d():
    """The divisor is the root of the mean variance then and now: std 1 and 7 pool to 5, and a rise of 3 is 0.6."""
    alarm = watching().watch(FIRST | {"reward": 5.0, "reward_std": 7.0, "accuracy": 0.0})
    assert "reward rose 2 -> 5 (+0.6 std)" in alarm
    assert watching().watch(FIRST | {"reward": 4.0, "reward_std": 7.0, "accuracy": 0.0}) is None


def test_an_accuracy_of_one_can_fall():
    """The first spread may be 0; with no spread at all any change is infinite."""
    sure = {"accuracy": 1.0, "accuracy_std": 0.0}
    for now, message in (
        ({"accuracy": 0.8, "accuracy_std": 0.4}, "(-0.7 std)"),
        ({"accuracy": 0.0, "accuracy_std": 0.0}, "(-inf std)"),
    ):
        one = HackingMonitor(CONFIG, ("accuracy",))
        one.watch(FIRST | sure)
        assert one.watch(FIRST | UP | sure) is None
        assert f"accuracy fell 1 -> {now['accuracy']:g} {message}" in one.watch(FIRST | UP | now)


def test_it_compares_with_the_first_validation_and_not_with_the_last():
    one = watching()
    for accuracy in (0.45, 0.4, 0.35, 0.31):
        assert one.watch(FIRST | UP | {"accuracy": accuracy}) is None
    assert one.watch(FIRST | UP | {"accuracy": 0.29}) is not None


def test_diversity_that_falls_in_training():
    """The mean since the last validation is compared with the first training step."""
    one = watching()
    for value in (0.4, 0.3):
        one.note({"pixels/diversity": value})
    assert one.watch(FIRST | UP) is None
    for value in (0.3, 0.05):
        one.note({"pixels/diversity": value})
    assert "train/pixels/diversity fell 0.4 -> 0.175" in one.watch(FIRST | UP)


WORLD = {"world/size": 0.5, "world/shape": 0.6, "world/shape_std": 0.3, "world/diversity": 1.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world/size": 0.81}, "world/size rose 0.5 -> 0.81"),
        ({"world/shape": 0.91}, "world/shape rose 0.6 -> 0.91 (+1.0 std)"),
        ({"world/diversity": 0.49}, "world/diversity fell 1 -> 0.49"),
        ({"accuracy": 0.25}, "accuracy fell 0.5 -> 0.25 (-0.5 std)"),
        ({"world/size": 0.79, "world/diversity": 0.51}, None),
        ({"world/size": 0.0, "world/diversity": 3.0}, None),  # nearer to the law, and more diverse
        ({"pixels/saturation": 0.3, "pixels/diversity": 0.1}, None),  # statistics are for videos without a law
    ],
)
def test_in_the_tiny_world_the_signs_are_distances_from_its_law(changes, message):
    one = HackingMonitor(CONFIG, ("accuracy",))
    assert one.watch(FIRST | WORLD) is None
    expected = None if message is None else f"reward rose 2 -> 3 (+1.0 std) while {message}"
    assert one.watch(FIRST | WORLD | UP | changes) == expected


def test_of_recorded_runs_it_reports_the_planted_shortcut_alone():
    said = {}
    for name, (first, later) in {"plain": PLAIN, "planted": HACKED}.items():
        one = HackingMonitor(HackingMonitorConfig(), ("accuracy",))
        assert one.watch(first) is None
        said[name] = one.watch(later)
    assert said["plain"] is None
    assert "world/size rose" in said["planted"] and "world/travel rose" in said["planted"]
    assert "pixels/" not in said["planted"]


def test_off_reports_nothing_and_still_keeps_its_reference():
    one = watching(HackingMonitorConfig(action="off"))
    assert one.watch(FIRST | UP | {"accuracy": 0.0}) is None
    assert one.reference == FIRST


def test_a_held_out_metric_that_is_not_measured_is_ignored():
    assert "reward/pick" not in watching(held_out=("reward/pick",)).reference


def test_its_state_goes_through_a_manifest():
    """The training steps since the last validation too: the next decision is a mean over them."""
    one, other, older = watching(), watching(), watching()
    for value in (0.4, 0.3, 0.05):
        one.note({"pixels/diversity": value})
    state = json.loads(json.dumps(one.state))
    other.load_state(state)
    older.load_state({key: value for key, value in state.items() if key != "hacking_monitor_recent"})
    for each in (one, other, older):
        each.note({"pixels/diversity": 0.05})
    assert one.watch(FIRST | UP) == other.watch(FIRST | UP) is None  # mean 0.2 of 0.4 at first
    assert "train/pixels/diversity fell 0.4 -> 0.05" in older.watch(FIRST | UP)


# Runs.

SHORT = flags(
    {"method": "dance_grpo", "steps": 8, "validate-every": 8, "checkpoint-every": 0, "hacking-monitor.action": "stop"}
    | {"sampler.num-steps": 2, "sampler.shift": 5, "student.ema-decay": 0.9}
    | {"validation.num-samples": 24, "validation.batch": 24, "validation.num-videos": 0}
    | {"algorithm.num-prompts": 4, "algorithm.num-samples": 6, "algorithm.prompts-per-update": 4}
    | {"algorithm.rollout-batch": 24, "algorithm.update-batch": 24}
    | {"student.learning-rate": 1e-3, "student.lr-schedule": "constant", "student.lr-decay-updates": 0}
)
# The planted shortcut: saturated colors give more reward than following the prompt.
PLANTED = flags({"reward.scorers.saturation.weight": 100, "reward.scorers.saturation.frames": "all"})


@pytest.fixture(scope="module")
def hacked(tmp_path_factory):
    """A run that hacks its reward within sixteen steps, which not every seed does, and its exit code."""
    folder = tmp_path_factory.mktemp("hacked") / "run"
    return folder, main([*SHORT, *PLANTED, "--seed", "3", "--steps", "16", "--output", str(folder)])


@pytest.mark.slow
def test_a_run_that_hacks_is_stopped_and_saved(hacked):
    folder, code = hacked
    assert code == 3
    last = metrics_of(folder)[-1]
    assert last["step"] == 8 and last["validation/reward_hacking"] == 1
    metadata = json.loads((folder / "checkpoints" / "step_8" / "manifest.json").read_text())
    first = {key.removeprefix("validation/"): value for key, value in metrics_of(folder)[0].items()}
    assert metadata["hacking_monitor"]["pixels/saturation"] == first["pixels/saturation"]
    assert last["validation/pixels/saturation"] > first["pixels/saturation"] + first["pixels/saturation_std"]
    # what saturates the pixels: shapes grow, and their colors stay
    assert last["validation/world/size"] > first["world/size"] + 1 and last["validation/world/color"] < 0.2


@pytest.mark.slow
def test_it_is_stopped_again_when_it_is_resumed(hacked, capsys):
    """The reference is that of the first validation, not of the one after resuming."""
    folder, _ = hacked
    before = metrics_of(folder)[0]["validation/world/size"]
    assert main(["--resume", str(folder), "--validate-every", "1"]) == 3
    out = capsys.readouterr().out
    assert f"world/size rose {before:.3g} ->" in out and "after step 9" in out
    assert (
        main(["--resume", str(folder), "--validate-every", "1", "--hacking-monitor.action", "warn", "--steps", "10"])
        == 0
    )
    out = capsys.readouterr().out
    assert "warning: reward hacking suspected: reward rose" in out and "stopped" not in out


# The diversity of the first training step is .142 and of the second .088: below the limit alone, above it as a mean.
TWO_STEPS = [
    *SMALL["dance_grpo"],
    *flags({"steps": 2, "validate-every": 2, "validation.num-videos": 0, "validation.seed": 1, "checkpoint-every": 0}),
    *flags({"sampler.shift": 3.0, "algorithm.advantage": "grpo", "student.learning-rate": 1e-3}),
    *flags({"algorithm.no-init-same-noise": True, "hacking-monitor.action": "stop"}),
    *flags({"hacking-monitor.rise": 1e-3, "hacking-monitor.fall": 1e9, "hacking-monitor.drift": 1e9}),
    *flags({"hacking-monitor.collapse": 0.7}),
]


@pytest.mark.slow
def test_a_run_that_is_stopped_and_resumed_decides_as_one_that_was_not(tmp_path, monkeypatch, capsys):
    straight, stopped, older = (tmp_path / name for name in ("straight", "stopped", "older"))
    assert main([*TWO_STEPS, "--output", str(straight)]) == 0
    original = Trainer.step

    def ask_to_stop(self, step):
        metrics = original(self, step)
        os.kill(os.getpid(), signal.SIGTERM)
        return metrics

    monkeypatch.setattr(Trainer, "step", ask_to_stop)
    assert main([*TWO_STEPS, "--output", str(stopped)]) == 0
    monkeypatch.undo()
    assert "stopped after step 1" in capsys.readouterr().out
    file = copy_of(stopped, older) / "checkpoints" / "step_1" / "manifest.json"
    metadata = json.loads(file.read_text())
    kept = {key: value for key, value in metadata.items() if key not in ("hacking_monitor_recent", "crc32")}
    file.write_text(manifest.as_text(kept))  # as an earlier version wrote it
    assert main(["--resume", str(stopped)]) == 0
    assert metrics_of(stopped) == metrics_of(straight)
    assert metrics_of(stopped)[-1]["validation/reward_hacking"] == 0
    assert main(["--resume", str(older)]) == 3


@pytest.mark.slow
def test_a_healthy_run_is_left_alone(run_folder):
    """The same student, steps and learning rate without the planted scorer."""
    run("dance_grpo", run_folder, *SHORT)
    assert metrics_of(run_folder)[-1]["validation/reward_hacking"] == 0


@pytest.mark.slow
def test_a_method_without_a_reward_has_no_monitor(run_folder, capsys):
    run("finetune", run_folder, "--validate-every", "1")
    assert all("validation/reward_hacking" not in line for line in metrics_of(run_folder))
    assert main(["--method", "finetune", "--output", str(run_folder / "x"), "--hacking-monitor.action", "stop"]) == 2
    assert "--hacking-monitor.*: finetune trains on no reward" in capsys.readouterr().err


def test_action_stop_needs_validations(run_folder, capsys):
    assert main([*SHORT, "--validate-every", "0", "--output", str(run_folder)]) == 2
    assert "hacking_monitor.action stop needs validations to compare: set validate_every" in capsys.readouterr().err
