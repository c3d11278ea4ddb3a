"""Validations whose results come later than the step that they are of: the whole program, in this process."""

import json
import shutil
import threading

import pytest
from helpers import SMALL, assert_same, checkpoint_of, metrics_of

from unified_trainer.__main__ import main
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.run.checkpoint import manifest
from unified_trainer.run.checkpoint.manager import Saver
from unified_trainer.run.exit_codes import STOPPED
from unified_trainer.run.guards.base import Alarm
from unified_trainer.run.guards.responses import Guards, Response
from unified_trainer.run.settings.config import RunConfig

pytestmark = pytest.mark.slow

EVERY = [
    "--validate-every",
    "2",
    "--validation.num-videos",
    "0",
    "--checkpoint-every",
    "1",
    "--student.ema-decay",
    "0.5",
]
BEST = ["--keep-last", "1", "--keep-best", "1", "--best-metric", "pixels/saturation"]
WORDS = [*SMALL["finetune"], *EVERY, *BEST, "--student.learning-rate", "0.01", "--steps", "5"]
LAG = 2


def late(monkeypatch) -> None:
    """Let results of validations take effect two steps later, as with evaluation workers."""
    monkeypatch.setattr(RunConfig, "validation_lag", LAG)


@pytest.fixture(scope="module")
def at_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("at_once") / "run"
    assert main([*WORDS, "--output", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def later(tmp_path_factory):
    folder = tmp_path_factory.mktemp("later") / "run"
    with pytest.MonkeyPatch.context() as patch:
        late(patch)
        assert main([*WORDS, "--output", str(folder)]) == 0
    return folder


def validations(folder) -> list[dict[str, float]]:
    return [row for row in metrics_of(folder) if "validation/pixels/saturation" in row]


def rated(folder) -> dict[int, float]:
    """Steps of the checkpoints, and what the validation of each measured; None for one without."""
    kept = manifest.folders(folder / "checkpoints")
    found = [manifest.read(one)[0] for one in kept]
    return {row["step"]: row["metrics"].get("pixels/saturation") for row in found}


def test_a_late_result_is_that_of_its_step(at_once, later):
    """Metrics, tensors and the checkpoints that are kept are those of validations at once; lines in another order."""
    steps = [(row["step"], "train/loss" in row) for row in metrics_of(later)]
    train, measured = True, False
    begin = [(1, train), (2, train), (0, measured), (3, train), (4, train), (2, measured), (5, train), (4, measured)]
    assert steps == [*begin, (5, measured)]
    assert validations(later) == validations(at_once) and len({json.dumps(row) for row in validations(later)}) == 4
    assert rated(later) == rated(at_once) and None not in rated(later).values()
    assert_same(checkpoint_of(later, 5), checkpoint_of(at_once, 5))
    assert not any("validation/" in key for key in checkpoint_of(later, 5))


def test_a_run_that_is_cut_off_makes_the_validation_again(tmp_path, later, monkeypatch):
    """With the EMA weights of its step, which the checkpoint of the step after it holds; its line is there once."""
    late(monkeypatch)
    original, folder = Saver.save, tmp_path / "run"

    def fail(self, step, *rest, **named):
        if step == 4:
            raise RuntimeError("the process ends here")
        original(self, step, *rest, **named)

    monkeypatch.setattr(Saver, "save", fail)
    with pytest.raises(RuntimeError, match="the process ends here"):
        main([*WORDS, "--output", str(folder)])
    assert [row["step"] for row in validations(folder)] == [0, 2]  # it took effect, which the checkpoint does not know
    held = manifest.read(folder / "checkpoints" / "step_3")[0]
    assert held["validation_started"] == {"step": 2, "looks": {}} and not held["validation_pending"]
    assert list(rated(folder)) == [2, 3]  # step 2 stays until it is rated
    monkeypatch.setattr(Saver, "save", original)
    shutil.copytree(folder, tmp_path / "at_once")
    assert main(["--resume", str(folder)]) == 0
    assert metrics_of(folder) == metrics_of(later) and rated(folder) == rated(later)
    assert_same(checkpoint_of(folder, 5), checkpoint_of(later, 5))
    monkeypatch.setattr(RunConfig, "validation_lag", 0)  # without workers it is made before the next step
    assert main(["--resume", str(tmp_path / "at_once")]) == 0
    assert validations(tmp_path / "at_once") == validations(later)


def test_a_slow_write_keeps_the_checkpoint_that_a_late_result_is_added_to(tmp_path, monkeypatch):
    """A write of --async-save removes older checkpoints at its end, which here comes when somebody waits for it."""
    late(monkeypatch)
    save, wait, rate, waited_for, there = Saver._save, Saver.wait, Saver._rate, threading.Event(), {}

    def slow(self, *rest):
        assert waited_for.wait(60)
        save(self, *rest)

    def release(self):
        waited_for.set()
        wait(self)
        waited_for.clear()

    def watched(self, step, metrics):
        there[step] = (self._root / f"step_{step}").is_dir()
        rate(self, step, metrics)

    monkeypatch.setattr(Saver, "_rate", watched)
    monkeypatch.setattr(Saver, "_save", slow)
    monkeypatch.setattr(Saver, "wait", release)
    assert main([*WORDS, "--async-save", "--output", str(tmp_path / "run")]) == 0
    assert there == {0: False, 2: True, 4: True}  # there is no checkpoint of step 0


def test_guards_decide_when_the_result_takes_effect(tmp_path, monkeypatch):
    """An alarm of the validation of step 2 stops the run after step 4, whose own validation a resumed run makes."""
    late(monkeypatch)
    alarm = Alarm("guard", "stop", "it looks bad", 1)
    monkeypatch.setattr(Guards, "after_validation", lambda self, step, metrics: alarm if step == 2 else None)
    monkeypatch.setattr(Guards, "respond", lambda self, found, *others: None if found is None else Response(found))
    folder = tmp_path / "run"
    assert main([*WORDS, "--output", str(folder)]) == STOPPED["guard"]
    held = manifest.read(folder / "checkpoints" / "step_4")[0]
    assert held["stopped_by"] == "guard" and held["validation_pending"] and held["validation_started"] is None
    assert [row["step"] for row in validations(folder)] == [0, 2]
    monkeypatch.undo()
    assert not manifest.finished(folder, 4, Mesh.alone("cpu"), validating=True)
