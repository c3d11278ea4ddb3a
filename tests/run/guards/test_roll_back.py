"""Roll-backs of a small dmd2 run whose student is destroyed: the same bits as by hand, resumed, and on two ranks."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from helpers import ALONE, REPO, SMALL, assert_same, checkpoint_of, copy_of, flags, metrics_of, small_pipeline

from unified_trainer.__main__ import main
from unified_trainer.api import Run
from unified_trainer.roles import learner
from unified_trainer.run.checkpoint import manifest
from unified_trainer.run.exit_codes import COLLAPSED, HACKED
from unified_trainer.run.guards.hacking_monitor import HackingMonitor
from unified_trainer.run.trainer import Trainer
from unified_trainer.tools.report.run_folder import read_run
from unified_trainer.tools.report.status import status_of

sys.path.insert(0, str(REPO / "tests" / "parallel"))
from launch import fork_ranks

pytestmark = pytest.mark.slow

STEPS, RATE = 9, 1e-3
SETTINGS = {
    "method": "dmd2",
    "recipe": "tiny",
    "device": "cpu",
    "steps": STEPS,
    "checkpoint-every": 2,
    "validate-every": 0,
    "keep-last": 1,
    "video.frames": 5,
    "video.height": 32,
    "video.width": 32,
    "sampler.num-steps": 1,
    "algorithm.batch-size": 2,
    "algorithm.micro-batch": 1,
    "algorithm.student-every": 1,
    "student.learning-rate": RATE,
    "student.lr-schedule": "constant",
    "student.lr-decay-updates": 0,
    "student.ema-decay": 0.5,
    "critic.learning-rate": 1e-3,
    "guard.window": 2,
    "guard.critic-error": 100,
    "guard.max-rollbacks": 1,
    "guard.rate-factor": 0.25,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return small_pipeline(tmp_path_factory.mktemp("base") / "wan")


@pytest.fixture(scope="module", autouse=True)
def planted():
    """The student's sixth update is four hundred times too large, and destroys it: its samples explode."""
    original = learner.learning_rate_factor

    def too_large(config, updates):
        return original(config, updates) * (400 if updates == 5 and config.ema_decay else 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner, "learning_rate_factor", too_large)
        yield


def words(base: Path, run: Path, **more: object) -> list[str]:
    return flags(SETTINGS | {"student.path": base, "output": run} | more)


def newest(run: Path) -> dict:
    return manifest.newest_sound(run, ALONE)[1]


@pytest.fixture(scope="module")
def rolled_back(base, tmp_path_factory):
    """A run that went back once, collapsed again, and was stopped."""
    run = tmp_path_factory.mktemp("rolled") / "run"
    assert main(words(base, run, **{"guard.action": "roll_back"})) == COLLAPSED
    return run


def test_a_run_goes_back_before_the_window_that_fired_and_then_stops(rolled_back, capsys):
    """Updates 5 and 6 are the first window with samples of the destroyed student: step 4 is from before them."""
    found = newest(rolled_back)
    [once] = found["rollbacks"]
    assert (once["from"], once["to"], once["guard"], once["rate_factor"]) == (6, 4, "guard", 0.25)
    assert once["why"].startswith("sample_power ") and found["step"] == 6
    rows = metrics_of(rolled_back)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["train/rollbacks"] for row in rows] == [0, 0, 0, 0, 1, 1]
    assert [row.get("train/guard_alarm") for row in rows] == [None, 0, 0, 0, 0, 1]
    rates = [row["train/student/learning_rate"] for row in rows]
    assert rates == [RATE] * 4 + [RATE / 4, RATE / 4 * 400]
    kept = [path.name for path in manifest.folders(rolled_back / "checkpoints")]
    assert kept == ["step_4", "step_6"]  # with keep_last 1, the one to go back to stays
    status = status_of(read_run(rolled_back))
    assert (status.state, status.rollbacks, status.alarms) == ("collapsed", 1, (6,))
    assert main(["runs", str(rolled_back)]) == 0
    assert "collapsed, rolled back 1 time" in " ".join(capsys.readouterr().out.split())


def test_it_is_the_run_that_is_started_again_by_hand(base, rolled_back, tmp_path):
    """From the EMA weights of step 4, with the optimizers of step 4 and a quarter of the learning rate."""
    run = tmp_path / "run"
    assert main(words(base, run, **{"steps": 4, "guard.action": "off"})) == 0
    changes = {"student.learning_rate": RATE / 4, "allow": ["student.learning_rate"], "steps": 6}
    with Run.resume(run, changes) as resumed, torch.no_grad():
        tensors = resumed._built.trainer.tensors()
        averages = {key: value for key, value in tensors.items() if key.startswith("student/ema/")}
        assert averages
        for key, average in averages.items():
            tensors[key.replace("/ema/", "/weights/")].copy_(average)
        resumed.save()
    assert main(["--resume", str(run)]) == 0
    assert_same(checkpoint_of(run, 6), checkpoint_of(rolled_back, 6))
    own = ("train/rollbacks", "train/guard_alarm")
    rows = [{key: value for key, value in row.items() if key not in own} for row in metrics_of(rolled_back)]
    assert metrics_of(run) == rows


@pytest.mark.parametrize("how", ["killed", "asked"])
def test_stopped_after_a_roll_back_and_resumed_is_never_stopped(base, rolled_back, tmp_path, monkeypatch, how):
    """Killed before the next checkpoint it repeats the roll-back; asked to stop it saves that it went back."""
    run, original, seen = tmp_path / "run", Trainer.step, []

    def step(self, number):
        seen.append(number)
        if seen.count(4) == 2:  # the first one after the roll-back
            if how == "killed":
                raise InterruptedError
            os.kill(os.getpid(), signal.SIGTERM)
            seen.append(4)
        return original(self, number)

    monkeypatch.setattr(Trainer, "step", step)
    start = words(base, run, **{"guard.action": "roll_back"})
    if how == "killed":
        with pytest.raises(InterruptedError):
            main(start)
        assert newest(run)["rollbacks"] == []
    else:
        assert main(start) == 0
        assert newest(run)["step"] == 5 and len(newest(run)["rollbacks"]) == 1
        assert status_of(read_run(run)).state == "stopped"
    monkeypatch.setattr(Trainer, "step", original)
    assert main(["--resume", str(run)]) == COLLAPSED
    assert metrics_of(run) == metrics_of(rolled_back)
    assert newest(run)["rollbacks"] == newest(rolled_back)["rollbacks"]
    assert_same(checkpoint_of(run, 6), checkpoint_of(rolled_back, 6))


def test_warn_goes_on_and_stop_saves(base, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(words(base, run, **{"guard.action": "stop"})) == COLLAPSED
    out = capsys.readouterr().out
    assert "warning: collapse suspected: sample_power" in out and "stopped by the guard after step 6" in out
    assert f"--resume {run} --guard.action warn" in out
    assert newest(run)["stopped_by"] == "guard" and "rollbacks" not in metrics_of(run)[-1]
    more = copy_of(run, tmp_path / "more")
    assert main(["--resume", str(more), "--guard.action", "warn", "--steps", "8"]) == 0
    assert newest(more)["stopped_by"] is None and status_of(read_run(more)).state == "finished"


def test_without_a_checkpoint_from_before_it_stops(base, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(words(base, run, **{"guard.action": "roll_back", "checkpoint-every": 5})) == COLLAPSED
    assert "no checkpoint is from before step 5, lower checkpoint_every" in capsys.readouterr().out


@pytest.mark.ranks
def test_two_ranks_go_back_together(base, rolled_back, tmp_path, monkeypatch):
    for key in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK"):
        monkeypatch.setenv(key, "")  # restored at the end: forks inherit the fault that is planted here
    run = tmp_path / "run"
    fork_ranks(2, main, words(base, run, **{"guard.action": "roll_back"}))
    found = newest(run)
    assert found["ranks"] == 2 and (found["step"], found["stopped_by"]) == (6, "guard")
    keys = ("from", "to", "guard", "rate_factor")
    assert [[one[key] for key in keys] for one in found["rollbacks"]] == [[6, 4, "guard", 0.25]]
    for row, other in zip(metrics_of(run), metrics_of(rolled_back), strict=True):
        assert row["train/sample_power"] == pytest.approx(other["train/sample_power"], rel=1e-4)


def test_the_hacking_monitor_goes_back_by_the_same_code(tmp_path, monkeypatch):
    """Its rule is replaced by one that fires in the validation of step 4: back to step 2, once, then it stops."""
    calls = []

    def watch(self, metrics):
        calls.append(metrics)
        return "planted" if len(calls) in (3, 4) else None

    monkeypatch.setattr(HackingMonitor, "watch", watch)
    run = tmp_path / "run"
    more = {
        "steps": 6,
        "checkpoint-every": 2,
        "validate-every": 2,
        "validation.num-videos": 0,
        "student.ema-decay": 0.5,
    }
    more |= {"hacking-monitor.action": "roll_back", "hacking-monitor.max-rollbacks": 1}
    assert main([*SMALL["dance_grpo"], *flags(more), "--output", str(run)]) == HACKED
    [once] = newest(run)["rollbacks"]
    assert (once["from"], once["to"], once["guard"], once["why"]) == (4, 2, "hacking_monitor", "planted")
    status = status_of(read_run(run))
    assert (status.state, status.rollbacks, status.hacking) == ("hacked", 1, (4,))
    rates = [row["train/student/learning_rate"] for row in metrics_of(run) if "train/rollbacks" in row]
    assert rates[3] < 0.51 * rates[1]


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        ("finetune", {"guard.action": "stop"}, "--guard.*: finetune has no teacher and critic to compare"),
        ("dmd2", {"guard.action": "roll_back", "checkpoint-every": 0}, "needs checkpoints to go back to"),
        ("dmd2", {"guard.action": "roll_back", "student.ema-decay": 0}, "goes on from EMA weights: set student.ema_"),
        ("dance_grpo", {"hacking-monitor.action": "roll_back", "student.ema-decay": 0}, "hacking_monitor.action roll_"),
        ("dmd2", {"guard.motion": "1.5 2"}, "guard.motion must be a range around 1"),
        ("dmd2", {"guard.rate-factor": 1}, "guard.rate_factor"),
    ],
)
def test_nonsense_is_refused_before_anything_is_written(tmp_path, capsys, method, given, message):
    run = tmp_path / "run"
    given = [word for key, value in given.items() for word in (f"--{key}", *str(value).split())]
    assert main(["--method", method, "--output", str(run), *given]) == 2
    assert message in capsys.readouterr().err and not run.exists()


def test_what_a_checkpoint_says_is_json(rolled_back):
    file = rolled_back / "checkpoints" / "step_6" / "manifest.json"
    assert json.loads(file.read_text())["guard"]["first_power"] > 0
