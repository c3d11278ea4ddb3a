"""Samples of a diverged student, and more samples than memory has: one line that names the way out."""

import shutil

import pytest
import torch
from helpers import SMALL, WAN, flags, refused, rewrite

from unified_trainer.__main__ import main
from unified_trainer.api import Run, Student
from unified_trainer.basics.errors import NotFiniteError
from unified_trainer.tools.sample import latents

pytestmark = pytest.mark.slow

NOT_FINITE = "the student's samples are not finite ({})"
LAST_LAYER = "proj_out.weight"
ENDLESS = 1e38  # a weight that is finite, and an output that is not
SHORT_OF_MEMORY = (torch.OutOfMemoryError("CUDA out of memory. Tried"), MemoryError("Unable to allocate 4 GiB"))

SMALLEST = {"recipe": "tiny", "steps": 1, "video.frames": 5, "video.height": 32, "video.width": 32}
SMALLEST |= {"sampler.num-steps": 2, "algorithm.batch-size": 2, "algorithm.micro-batch": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert main([*SMALL["dance_grpo"], *flags({"sampler.num-steps": 2}), "--output", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def diverged(trained):
    """The run after a step in which its student diverged; the newest checkpoint holds it."""
    with Run.resume(trained, {"steps": 2}) as run:
        run.step()
        run.roles["student"].weights[LAST_LAYER].detach().fill_(ENDLESS)
        run.save()
    return trained


@pytest.mark.parametrize(("name", "more"), [("sample", ()), ("rollout", ()), ("evaluate", ("--resamples", "10"))])
def test_nan_samples_name_the_checkpoint_and_no_scorer(diverged, tmp_path, capsys, name, more):
    words = (name, str(diverged), "--prompts", "a red circle", "--output", str(tmp_path / "out"), *more)
    said = refused(capsys, *words)
    assert NOT_FINITE.format(f"student from {diverged / 'checkpoints' / 'step_2'}") in said
    assert "go back to an older checkpoint, RUN@STEP, or lower student.learning_rate" in said
    assert said.count("\n") == 1 and "hpsv3" not in said.lower()


def test_nan_samples_of_python_name_the_checkpoint(diverged):
    with pytest.raises(NotFiniteError, match=r"not finite \(student from .*step_2\)"):
        Student.load(str(diverged), device="cpu").sample(["a red circle"])


@pytest.mark.parametrize(
    ("method", "every", "when"),
    [
        ("dance_grpo", 0, "training step 1"),
        ("dance_grpo", 1, "validation after training step 0"),
        ("finetune", 1, "validation after training step 0"),
        ("reward_gradient", 0, "training step 1"),
    ],
)
def test_samples_of_a_run_that_are_not_finite_name_its_step(tmp_path, capsys, method, every, when):
    """The student's weights are finite, and what it computes is not."""
    wan = tmp_path / "wan"
    shutil.copytree(WAN, wan)
    file = wan / "transformer" / "diffusion_pytorch_model.safetensors"
    rewrite(file, lambda tensors: tensors[LAST_LAYER].fill_(ENDLESS))
    settings = {"student.path": wan, "validate-every": every, "output": tmp_path / "run"}
    words = SMALL[method] if method in SMALL else flags({"method": method} | SMALLEST)
    said = refused(capsys, *words, *flags(settings))
    assert NOT_FINITE.format(when) in said and "scor" not in said


def test_rollouts_on_disk_that_are_not_finite_name_their_file(trained, tmp_path, capsys):
    """Latents that an earlier version wrote."""
    folder, reward = tmp_path / "out", tmp_path / "reward.yaml"
    assert main(["rollout", f"{trained}@1", "--prompts", "a red circle", "--output", str(folder)]) == 0
    reward.write_text("reward: {kind: sharpness}\n")
    file = folder / "latents" / "0.safetensors"
    rewrite(file, lambda tensors: tensors["x0"].fill_(torch.nan))
    capsys.readouterr()
    said = refused(capsys, "score", str(folder), "--reward", str(reward), "--name", "other")
    assert NOT_FINITE.format(file) in said


# More than memory has.


@pytest.mark.parametrize("error", SHORT_OF_MEMORY)
@pytest.mark.parametrize("name", ["sample", "rollout", "evaluate"])
def test_a_batch_that_does_not_fit_in_memory_names_the_flag(trained, tmp_path, capsys, monkeypatch, name, error):
    def generate(*_: object) -> None:
        raise error

    monkeypatch.setattr(latents, "generate", generate)
    prompts = ("--prompts", "a red circle", "a blue square")
    said = refused(capsys, name, str(trained), *prompts, "--output", str(tmp_path / "out"))
    assert "a batch of 2 " in said and "does not fit in memory" in said and "lower --batch" in said
    assert said.count("\n") == 1


def test_a_validation_that_does_not_fit_in_memory_names_its_batch(tmp_path, capsys, monkeypatch):
    def generate(*_: object) -> None:
        raise SHORT_OF_MEMORY[0]

    monkeypatch.setattr("unified_trainer.run.validation.samples.generate", generate)
    said = refused(capsys, *SMALL["finetune"], "--validate-every", "1", "--output", str(tmp_path / "run"))
    assert "a batch of 2 samples of the validation does not fit in memory" in said and "lower validation.batch" in said


def test_more_samples_of_a_step_than_memory_has_are_refused_before_weights_are_read(tmp_path, capsys):
    """Of each of 1e9 samples all states of its trajectory are kept."""
    many = flags({"algorithm.num-samples": 10**6, "algorithm.num-prompts": 1000, "algorithm.prompts-per-update": 1000})
    said = refused(capsys, *SMALL["dance_grpo"], *many, "--output", str(tmp_path / "run"))
    assert "a rank's share of a training step, 1000000000 samples (algorithm.num_prompts x" in said
    assert said.endswith("lower algorithm.num_samples\n") and not (tmp_path / "run" / "config.yaml").exists()


def test_seeds_of_an_evaluation_share_no_noise(trained, tmp_path, capsys):
    words = ("--prompts", "a", "b", "--samples", "1000000", "--seeds", "0", "1", "--output", str(tmp_path / "out"))
    assert "share noise from 1000000 samples on: lower --samples" in refused(capsys, "evaluate", str(trained), *words)
