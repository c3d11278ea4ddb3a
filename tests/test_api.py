"""The Python interface: the same runs, videos and scores as those of the command line."""

import ast
import subprocess
import sys

import pytest
import torch
from helpers import REPO, assert_same, checkpoint_of, copy_of, environment, files_of, metrics_of

import unified_trainer as ut
from unified_trainer.__main__ import main
from unified_trainer.basics.requests import Request
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.run.checkpoint import manifest
from unified_trainer.run.guards.base import Alarm
from unified_trainer.run.guards.hacking_monitor import HackingMonitor
from unified_trainer.tools.load_run import load_role
from unified_trainer.tools.report.run_folder import read_run
from unified_trainer.tools.report.status import Status, status_of
from unified_trainer.tools.sample.sample import videos

PROMPTS = ["a red circle moving left", "blue square moves up", "something else"]
ALARM = Alarm("hacking_monitor", "stop", "an alarm", 1)
SETTINGS = {
    "steps": 2,
    "validate_every": 1,
    "validation.num_samples": 2,
    "algorithm": {"batch_size": 2, "micro_batch": 2},
    "student": {"learning_rate": 1e-2, "warmup_updates": 0, "ema_decay": 0.5},
    "reward.scorers.saturation.weight": 0,
    "sampler.num_steps": 2,
}


def run_in(folder, **changes) -> ut.Run:
    return ut.Run(ut.configure("tiny", "finetune", SETTINGS | {"data.num_clips": 4, "output": str(folder)} | changes))


def test_every_public_name_is_declared_once_more_for_type_checkers():
    tree = ast.parse((REPO / "unified_trainer/__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {alias.name: line.module for line in block.body for alias in line.names}
    assert typed == {name: module for module, names in ut._MODULES.items() for name in names}
    assert sorted(typed) == ut.__all__
    assert all(getattr(ut, name) is vars(sys.modules[module])[name] for name, module in typed.items())
    with pytest.raises(AttributeError, match="'unified_trainer' has no attribute 'absent'"):
        _ = ut.absent
    assert (REPO / "unified_trainer/py.typed").is_file()


IMPORTS = """
import sys, unified_trainer
assert "torch" not in sys.modules
import unified_trainer.__main__
assert not {"torch", "pyarrow", "av", "peft", "diffusers"} & sys.modules.keys()
import unified_trainer.run.settings.config
assert not {"pyarrow", "av", "peft", "diffusers", "torch._dynamo"} & sys.modules.keys()
"""


@pytest.mark.slow
def test_a_part_of_the_package_imports_no_more_than_it_needs():
    subprocess.run([sys.executable, "-c", IMPORTS], env=environment(), check=True, timeout=120)


# Settings.


def test_settings_are_keys_or_nested_mappings_over_a_recipe(tmp_path):
    (tmp_path / "mine.yaml").write_text("base: tiny\ncommon: {seed: 4}\nfinetune: {steps: 7, validate_every: 3}\n")
    own = ut.configure(str(tmp_path / "mine.yaml"), "finetune", SETTINGS | {"sampler": {"step_sigmas": (1.0, 0.5)}})
    assert (own.seed, own.steps, own.validate_every) == (4, 2, 1)
    assert own.student.learning_rate == 1e-2 and own.algorithm.batch_size == 2 and own.student.path == "tiny"
    assert own.sampler.step_sigmas == (1.0, 0.5) and own.reward.scorers["saturation"].weight == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tiny", "finetun", {}), "did you mean finetune"),
        (("tinny", "finetune", {}), "did you mean tiny"),
        (("absent.yaml", "finetune", {}), "--recipe absent.yaml: no such file"),
        (("tiny", "finetune", {"student.learning_rat": 1}), "settings: student.learning_rat is not known; did you"),
        (("tiny", "finetune", {"student": {"learning_rate": "fast"}}), "learning_rate must be a number, not 'fast'"),
        (("tiny", "finetune", {"algorithm.eta": 1.0}), "settings: algorithm.eta is a setting of dance_grpo"),
        (("tiny", "finetune", {"sampler.shift": float("nan")}), "settings: sampler.shift must be above 0 .*, not nan"),
    ],
)
def test_wrong_settings_are_named(words, message):
    with pytest.raises(ut.UserError, match=message):
        ut.configure(*words)


# Runs.


@pytest.fixture(scope="module")
def stepped(tmp_path_factory):
    """A run of two steps and a checkpoint, driven from Python, and what it gave."""
    folder, losses = tmp_path_factory.mktemp("api") / "run", []
    with run_in(folder) as run:
        while run.steps_done < 2:
            losses.append(run.step()["loss"])
        with pytest.raises(ut.UserError, match="has all its 2 steps: set steps higher"):
            run.step()
        measured = run.validate()
        video = run.sample(PROMPTS, seed=5, batch=2)
        raw = run.sample(PROMPTS, seed=5, batch=2, ema=False)
        scores = run.score(video, PROMPTS)
        saved = run.save()
    return folder, losses, measured, video, raw, scores, saved


@pytest.mark.slow
def test_a_loop_of_steps_leaves_the_folder_of_the_command_line(stepped, tmp_path):
    """Its lines of metrics but for times, checkpoints with their manifests, samples, and its state in lists of runs."""
    folder, losses, measured, *_, saved = stepped
    command = tmp_path / "command"
    assert main(["--config", str(folder / "config.yaml"), "--output", str(command)]) == 0
    assert saved == folder / "checkpoints" / "step_2"
    lines = metrics_of(command)
    assert metrics_of(folder) == lines and [line["step"] for line in lines] == [0, 1, 1, 2, 2]
    assert [line["train/loss"] for line in lines if "train/loss" in line] == losses
    assert lines[-1].items() >= measured.items() and all("seconds" not in name for name in measured)
    files = [{file.relative_to(root) for file in root.rglob("*") if file.is_file()} for root in (folder, command)]
    assert files[0] == files[1]
    assert_same(checkpoint_of(folder, 2), checkpoint_of(command, 2))
    said = [manifest.read(root / "checkpoints" / "step_2")[0] for root in (folder, command)]
    assert all(said[0][key] == said[1][key] for key in said[0].keys() - {"crc32"} if key != "files")
    for name in files[0]:
        if name.parts[0] == "validation" and name.suffix != ".mp4":  # which holds its time
            assert (folder / name).read_bytes() == (command / name).read_bytes(), name
    assert [status_of(read_run(root)) for root in (folder, command)] == [Status("finished", 2, 2, ())] * 2


@pytest.mark.slow
def test_a_guard_that_stops_a_run_stops_its_loop(tmp_path, monkeypatch):
    monkeypatch.setattr(HackingMonitor, "after_validation", lambda self, step, metrics: ALARM)
    size = {"video.frames": 5, "video.height": 32, "video.width": 32, "steps": 9, "checkpoint_every": 0}
    of_samples = {"validate_every": 1, "validation.num_samples": 2, "sampler.num_steps": 2, "algorithm.num_prompts": 2}
    settings = size | of_samples | {"algorithm.prompts_per_update": 2, "algorithm.num_samples": 2}
    with ut.Run(ut.configure("tiny", "dance_grpo", settings | {"output": str(tmp_path / "run")})) as run:
        while not run.stopped_by:
            run.step()
        assert run.stopped_by == "hacking_monitor" and run.steps_done == 1
        with pytest.raises(ut.UserError, match=r"hacking_monitor stopped this run: .* hacking_monitor\.action"):
            run.step()
    assert status_of(read_run(tmp_path / "run")).state == "hacked"


@pytest.mark.slow
def test_a_validation_that_is_asked_for_is_logged_once_and_rates_the_checkpoint(tmp_path):
    with run_in(tmp_path / "run", validate_every=100, keep_best=1, best_metric="pixels/motion_energy") as run:
        before = run.validate()  # that of the start
        run.step()
        after = run.validate()
        assert run.validate() == after != before
        folder = run.save()
    lines = metrics_of(tmp_path / "run")
    assert [(line["step"], "train/loss" in line) for line in lines] == [(0, False), (1, True), (1, False)]
    name = "pixels/motion_energy"
    assert manifest.read(folder)[0]["metrics"][name] == after[f"validation/{name}"] == lines[-1][f"validation/{name}"]
    assert status_of(read_run(tmp_path / "run")).state == "stopped"


@pytest.mark.slow
def test_videos_are_those_of_the_command_sample(stepped):
    folder, _, _, video, raw, *_ = stepped
    for spec, ours in ((":ema", video), ("", raw)):
        one = load_role(f"{folder}{spec}", "student", None, Mesh.alone("auto"), causal=True)
        assert torch.equal(torch.cat(list(videos(one, Request.of(PROMPTS), 5, 2))), ours)
        assert torch.equal(ut.Student.load(f"{folder}{spec}").sample(PROMPTS, seed=5, batch=2), ours)
    assert video.shape == (3, 3, 17, 64, 64) and not torch.equal(video, raw)


@pytest.mark.slow
def test_scores_hold_every_scorer_and_the_reward(stepped):
    *_, video, _, scores, _ = stepped
    assert scores.keys() == {"reward", "hpsv3", "saturation"} and torch.equal(scores["reward"], scores["hpsv3"])
    first = video[:, :, 0]
    torch.testing.assert_close(scores["saturation"], (first.amax(1) - first.amin(1)).mean((1, 2)))
    assert all(score.shape == (3,) and bool(score.isfinite().all()) for score in scores.values())


@pytest.mark.slow
def test_a_run_goes_on_from_python_and_from_the_command_line(stepped, tmp_path):
    ours, theirs = (copy_of(stepped[0], tmp_path / name) for name in ("ours", "theirs"))
    with ut.Run.resume(ours, {"steps": 3}) as run:
        assert run.steps_done == 2
        run.step()
        run.save()
    assert main(["--resume", str(theirs), "--steps", "3"]) == 0
    assert_same(checkpoint_of(ours, 3), checkpoint_of(theirs, 3))
    with pytest.raises(ut.UserError, match=r"cannot change student\.learning_rate"):
        ut.Run.resume(ours, {"student.learning_rate": 1.0})


@pytest.mark.slow
def test_a_run_leaves_another_ones_files_alone_and_gives_its_folder_back(stepped, tmp_path):
    before = files_of(stepped[0])
    with pytest.raises(ut.UserError, match="already holds a run"):
        run_in(stepped[0])
    assert files_of(stepped[0]) == before
    with run_in(tmp_path / "run", validate_every=0) as run:
        with pytest.raises(ut.UserError, match="another run is writing into"):
            ut.Run.resume(tmp_path / "run")
        with pytest.raises(ut.UserError, match="validate_every 0"):
            run.validate()
        with pytest.raises(ut.UserError, match="at least one prompt"):
            run.sample([])
    with ut.Run.resume(tmp_path / "run") as run:
        assert run.steps_done == 0 and "student" in run.roles


@pytest.mark.slow
def test_a_run_without_scorers_says_so(tmp_path):
    settings = ut.configure(
        "tiny", "finetune", {"output": str(tmp_path / "run"), "data.num_clips": 4, "reward.path": ""}
    )
    with ut.Run(settings) as run, pytest.raises(ut.UserError, match=r"set reward\.path, reward\.kind"):
        run.score(torch.zeros(1, 3, 17, 64, 64), PROMPTS[:1])


@pytest.mark.slow
def test_videos_of_an_expert_that_was_left_out_are_refused(tmp_path):
    experts = {"student.boundary": 0.9, "student.low.trained": False, "validate_every": 0}
    with run_in(tmp_path / "run", **experts) as run:
        run.step()
        with pytest.raises(ut.UserError, match="the low expert of the student was not loaded: set validate_every"):
            run.sample(["a red circle moving left"])
