"""Checkpoints by the clock: after so many minutes without one, as the main rank's clock says."""

import itertools
from functools import partial

import pytest
from helpers import ALONE, CPU, SMALL, assert_same, checkpoint_of, refused, run

from unified_trainer.parallel.mesh import Mesh
from unified_trainer.run.checkpoint import manager as module
from unified_trainer.run.checkpoint import manifest
from unified_trainer.run.checkpoint.manager import ByMinutes, at_risk, due


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class OtherRank(Mesh):
    """A rank that hears from the main one whether a flag is set there, and sets none itself."""

    flags: list[bool] = []

    def any(self, flag: bool) -> bool:
        assert not flag
        return self.flags.pop(0)


def test_minutes_count_from_the_last_checkpoint():
    clock = Clock()
    rule = ByMinutes(lambda step: step % 4 == 0, 10, ALONE, clock)
    found = []
    for step, minute in enumerate([5, 10, 11, 12, 21, 22, 31.9, 32.0], 1):
        clock.now = 1000 + 60 * minute
        found.append((minute, rule(step)))
    # By the clock after 10, by the step after 12 (step 4), by the clock again at 22; at 32 both are due.
    assert [minute for minute, saved in found if saved] == [10, 12, 22, 32.0]


def test_other_ranks_follow_the_clock_of_the_main_one():
    clock, mesh = Clock(), OtherRank(CPU, 1, 2)
    rule = ByMinutes(lambda step: False, 10, mesh, clock)
    clock.now += 10**6  # of this rank, which nobody asks
    mesh.flags.extend([False, True, False])
    assert [rule(step) for step in (1, 2, 3)] == [False, True, False]


def test_without_minutes_no_clock_is_read_and_nothing_is_asked_of_other_ranks():
    rule = due(3, 0.0, OtherRank(CPU, 1, 2))
    assert [rule(step) for step in range(1, 7)] == [False, False, True, False, False, True]
    assert not due(0, 0.0, ALONE)(20)
    assert isinstance(due(3, 0.5, ALONE), ByMinutes)


def test_what_a_failure_costs():
    assert at_risk(25, 60).startswith("a failure costs at most 25 steps or 60 minutes, whichever is less,")
    assert at_risk(0, 30).startswith("a failure costs at most 30 minutes,")


@pytest.mark.slow
def test_a_run_saves_by_the_clock_and_its_numbers_stay(tmp_path, monkeypatch, capsys):
    """Each reading of the clock is half a minute later: a checkpoint after every second step."""
    run("finetune", tmp_path / "plain", "--steps", "5", "--checkpoint-every", "0")
    ticks = itertools.count(0, 30)
    monkeypatch.setattr(module, "ByMinutes", partial(ByMinutes, clock=lambda: float(next(ticks))))
    words = ["--steps", "5", "--checkpoint-every", "0", "--checkpoint-minutes", "1", "--keep-last", "9"]
    run("finetune", tmp_path / "run", *words)
    assert [path.name for path in manifest.folders(tmp_path / "run" / "checkpoints")] == ["step_2", "step_4", "step_5"]
    assert_same(checkpoint_of(tmp_path / "run", 5), checkpoint_of(tmp_path / "plain", 5))
    assert "a failure costs at most 1 minutes" in capsys.readouterr().out


def test_a_guard_that_goes_back_needs_checkpoints_by_steps(capsys, tmp_path):
    """Else where it goes back to, and all numbers after it, would be a matter of the machine."""
    words = [*SMALL["dance_grpo"], "--output", tmp_path / "run", "--validate-every", "1", "--student.ema-decay", "0.5"]
    said = refused(capsys, *words, "--hacking-monitor.action", "roll_back", "--checkpoint-minutes", "5")
    assert "set checkpoint_minutes 0" in said
