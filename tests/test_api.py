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
from unified_trainer.tools.load_run import load_role
from unified_trainer.tools.sample.sample import videos

PROMPTS = ["a red circle moving left", "blue square moves up", "something else"]
SETTINGS = {
    "steps": 3,
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
    assert (own.seed, own.steps, own.validate_every) == (4, 3, 1)
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
    folder = tmp_path_factory.mktemp("api") / "run"
    with run_in(folder) as run:
        losses = [run.step()["loss"] for _ in range(2)]
        measured = run.validate()
        video = run.sample(PROMPTS, seed=5, batch=2)
        raw = run.sample(PROMPTS, seed=5, batch=2, ema=False)
        scores = run.score(video, PROMPTS)
        saved = run.save()
    return folder, losses, measured, video, raw, scores, saved


@pytest.mark.slow
def test_steps_and_checkpoints_are_those_of_the_command_line(stepped, tmp_path):
    folder, losses, measured, *_, saved = stepped
    words = ["--config", str(folder / "config.yaml"), "--steps", "2", "--output", str(tmp_path / "command")]
    assert main([*words, "--validate-every", "2"]) == 0
    assert saved == folder / "checkpoints" / "step_2" and saved.is_dir()
    assert_same(checkpoint_of(folder, 2), checkpoint_of(tmp_path / "command", 2))
    lines = metrics_of(tmp_path / "command")
    assert [line["train/loss"] for line in lines if "train/loss" in line] == losses
    assert lines[-1].items() >= {k: v for k, v in measured.items() if "seconds" not in k}.items()
    ours, theirs = (root / "validation/step_2/samples.jsonl" for root in (folder, tmp_path / "command"))
    assert ours.read_bytes() == theirs.read_bytes()


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
    with ut.Run.resume(ours) as run:
        assert run.steps_done == 2
        run.step()
        run.save()
    assert main(["--resume", str(theirs)]) == 0
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
