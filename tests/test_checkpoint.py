"""Checkpoints: a resumed run is the run that was never stopped, and nothing half-written is ever taken for whole."""

import json
import shutil
import signal
import subprocess

import pytest
import torch
from helpers import (
    ALONE,
    SMALL,
    assert_same,
    checkpoint_of,
    command,
    copy_of,
    environment,
    files_of,
    flags,
    metrics_of,
    run,
)

from unified_trainer import checkpoint
from unified_trainer.__main__ import main
from unified_trainer.checkpoint import CheckpointError

# Everything that has a state: optimizer, warm-up and decay, averaged weights; dropout and several epochs in finetune.
STATEFUL = flags(
    {"student.ema-decay": 0.9, "student.warmup-updates": 4, "student.decay": "cosine", "student.decay-updates": 9}
    | {"student.learning-rate": 1e-3, "student.weight-decay": 0.1, "checkpoint-every": 3, "validate-every": 3}
)
METHOD = {
    "dance_grpo": flags({"sampler.guidance-scale": 2, "algorithm.timestep-fraction": 0.5}),
    "finetune": flags(
        {"algorithm.caption-dropout": 0.5, "algorithm.batch-size": 4, "algorithm.micro-batch": 2, "data.num-clips": 6}
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with checkpoints after each of its three steps. Tests that change it copy it."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    run("dance_grpo", folder, "--steps", "3", "--checkpoint-every", "1", "--keep-last", "3", *STATEFUL[:2])
    return folder


@pytest.fixture
def copied(saved, tmp_path):
    return copy_of(saved, tmp_path / "copied")


def refused(capsys, *words: str) -> str:
    """The message of a command that must end with code 2."""
    capsys.readouterr()
    assert main(list(words)) == 2
    return capsys.readouterr().err


# Bit for bit.


@pytest.mark.parametrize("method", METHOD)
def test_six_steps_are_three_and_three(method, tmp_path):
    straight, halved = tmp_path / "straight", tmp_path / "halved"
    settings = [*STATEFUL, *METHOD[method]]
    run(method, straight, *settings, "--steps", "6")
    run(method, halved, *settings, "--steps", "3")
    assert main(["--resume", str(halved), "--steps", "6"]) == 0
    assert metrics_of(halved) == metrics_of(straight)
    assert [line["step"] for line in metrics_of(straight)] == [0, 1, 2, 3, 3, 4, 5, 6, 6]
    assert_same(checkpoint_of(halved, 6), checkpoint_of(straight, 6))


def test_a_checkpoint_holds_weights_moments_average_and_counter(saved):
    held = checkpoint_of(saved, 3)
    kinds = {tuple(key.split("/")[1:2]) + tuple(key.split("/")[3:]) for key in held}
    assert kinds == {
        ("weights",),
        ("ema",),
        ("updates",),
        ("optimizer", "step"),
        ("optimizer", "exp_avg"),
        ("optimizer", "exp_avg_sq"),
    }
    assert int(held["student/updates"]) == 3


def test_lines_after_the_checkpoint_are_written_once(copied):
    """A run killed after step 3 whose newest whole checkpoint is of step 2 writes step 3 again, not twice."""
    before = metrics_of(copied)
    shutil.rmtree(copied / "checkpoints" / "step_3")
    assert main(["--resume", str(copied)]) == 0
    assert metrics_of(copied) == before


# Whole or not at all.


def drop_manifest(folder):
    (folder / "manifest.json").unlink()


def cut_manifest(folder):
    (folder / "manifest.json").write_text('{"version": 1, "st')


def cut_shard(folder):
    (shard,) = folder.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-100])


def drop_shard(folder):
    for shard in folder.glob("*.safetensors"):
        shard.unlink()


def another_version(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "version": 99}))


DAMAGE = [drop_manifest, cut_manifest, cut_shard, drop_shard, another_version]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_half_written_newest_checkpoint_is_passed_over(copied, damage):
    damage(copied / "checkpoints" / "step_3")
    folder, manifest = checkpoint.newest(copied)
    assert folder.name == "step_2" and manifest["step"] == 2


def test_a_folder_still_being_written_is_not_a_checkpoint(copied):
    copy_of(copied / "checkpoints" / "step_3", copied / "checkpoints" / ".step_4.tmp")
    copy_of(copied / "checkpoints" / "step_3", copied / "checkpoints" / "step_latest")
    assert checkpoint.newest(copied)[0].name == "step_3"


@pytest.mark.parametrize("damage", DAMAGE)
def test_no_whole_checkpoint_lists_what_was_wrong(copied, damage, capsys):
    for folder in (copied / "checkpoints").iterdir():
        damage(folder)
    before = files_of(copied)
    message = refused(capsys, "--resume", str(copied))
    assert f"{copied} holds no complete checkpoint" in message
    assert all(f"step_{step}: " in message for step in (1, 2, 3))
    assert files_of(copied) == before


def test_resuming_needs_a_run(tmp_path, capsys):
    message = refused(capsys, "--resume", str(tmp_path / "absent"))
    assert "absent: no config.yaml there, so it is not a run directory" in message


def test_resuming_needs_a_checkpoint(copied, capsys):
    shutil.rmtree(copied / "checkpoints")
    assert "no step_N folder in" in refused(capsys, "--resume", str(copied))


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (9, 10, 100):
        checkpoint.save(tmp_path / "checkpoints", step, {"w": torch.tensor(float(step))}, ALONE, keep=3)
    assert checkpoint.newest(tmp_path)[1]["step"] == 100


@pytest.mark.parametrize("keep", [1, 2])
def test_only_the_last_are_kept(tmp_path, keep):
    for step in (8, 9, 10):
        checkpoint.save(tmp_path, step, {"w": torch.ones(2)}, ALONE, keep)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"step_{step}" for step in (8, 9, 10)[-keep:])


def test_keeping_none_is_refused(run_folder, capsys):
    message = refused(capsys, *SMALL["dance_grpo"], "--output", str(run_folder), "--keep-last", "0")
    assert "keep_last" in message and not run_folder.exists()


def test_saving_a_step_again_replaces_it(tmp_path):
    for value in (1.0, 2.0):
        folder = checkpoint.save(tmp_path, 1, {"w": torch.tensor([value])}, ALONE, 2)
    loaded = {"w": torch.zeros(1)}
    checkpoint.load(folder, loaded, ALONE)
    assert loaded["w"].tolist() == [2.0]


def test_a_save_that_fails_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    checkpoint.save(tmp_path / "checkpoints", 1, {"w": torch.ones(1)}, ALONE, 2)

    def full_disk(*arguments, **options):
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint.dcp, "save", full_disk)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path / "checkpoints", 2, {"w": torch.ones(1)}, ALONE, 2)
    assert checkpoint.newest(tmp_path)[1]["step"] == 1


# Another model.


def test_a_shape_that_differs_is_named(tmp_path):
    folder = checkpoint.save(tmp_path, 1, {"a": torch.zeros(2, 3), "b": torch.zeros(1)}, ALONE, 1)
    with pytest.raises(CheckpointError, match=r"step_1: a is \(2, 3\) there, \(3, 2\) in this run"):
        checkpoint.load(folder, {"a": torch.zeros(3, 2), "b": torch.zeros(1)}, ALONE)


def test_a_tensor_that_is_not_there_is_named(tmp_path):
    folder = checkpoint.save(tmp_path, 1, {"a": torch.zeros(2)}, ALONE, 1)
    with pytest.raises(CheckpointError, match=r"step_1 lacks 2 tensors, first b"):
        checkpoint.load(folder, {"a": torch.zeros(2), "c": torch.zeros(1), "b": torch.zeros(1)}, ALONE)


# Resuming with other settings.


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        (["--student.learning-rate", "0.5"], "student.learning_rate: 0.00015 -> 0.5"),
        (["--seed", "3"], "seed: 0 -> 3"),
        (["--algorithm.eta", "0.1"], "algorithm.eta: 1.0 -> 0.1"),
        (["--sampler.guidance-scale", "4"], "sampler.guidance_scale: 1.0 -> 4.0"),
        (["--video.frames", "9"], "video.frames: 5 -> 9"),
        (["--reward.scale", "2"], "reward.scale: 1.0 -> 2.0"),
    ],
)
def test_a_setting_that_changes_the_run_is_refused_by_name(copied, changed, key, capsys):
    before = files_of(copied)
    message = refused(capsys, "--resume", str(copied), *changed)
    assert key in message and "--init-from" in message
    assert files_of(copied) == before


def test_a_setting_that_does_not_is_taken(copied):
    harmless = flags({"steps": 4, "checkpoint-every": 0, "keep-last": 1, "validate-every": 4})
    assert main(["--resume", str(copied), *harmless]) == 0
    assert [line["step"] for line in metrics_of(copied)][-2:] == [4, 4]
    assert [path.name for path in (copied / "checkpoints").iterdir()] == ["step_4"]


def test_a_moved_run_continues_where_it_is(copied, saved):
    before = files_of(saved)
    assert main(["--resume", str(copied), "--steps", "4"]) == 0
    assert checkpoint.newest(copied)[1]["step"] == 4
    assert files_of(saved) == before


def test_another_method_is_refused(copied, capsys):
    assert "is a run of dance_grpo" in refused(capsys, "--resume", str(copied), "--method", "finetune")


# Starting from another run's weights.


@pytest.mark.parametrize("method", ["dance_grpo", "finetune"])
def test_weights_are_carried_and_nothing_else(saved, run_folder, method):
    """With learning rate 0 the weights after a step are those carried; counter and moments start anew."""
    frozen = ["--student.learning-rate", "0", "--student.warmup-updates", "0", "--student.ema-decay", "0.5"]
    run(method, run_folder, "--init-from", str(saved), *frozen)
    carried, source = checkpoint_of(run_folder, 1), checkpoint_of(saved, 3)
    for key in source:
        if "/weights/" in key:
            assert torch.equal(carried[key], source[key]), key
            assert torch.equal(carried[key.replace("/weights/", "/ema/")], source[key]), key
    assert int(carried["student/updates"]) == 1


def test_starting_from_nothing_is_refused(tmp_path, run_folder, capsys):
    words = [*SMALL["dance_grpo"], "--output", str(run_folder), "--init-from", str(tmp_path / "absent")]
    assert "absent holds no complete checkpoint" in refused(capsys, *words)
    assert not run_folder.exists()


# Ctrl-C.


def interrupt_after(line: str, folder, *extra: str) -> tuple[int, str]:
    """Exit code and output of a run that gets a Ctrl-C as soon as it has said `line`."""
    words = command(*SMALL["dance_grpo"], "--output", str(folder), *extra)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    said = []
    with subprocess.Popen(words, env=environment(), **pipes) as process:
        for text in process.stdout:
            said.append(text)
            if text.startswith(line):
                process.send_signal(signal.SIGINT)
    return process.returncode, "".join(said)


def test_ctrl_c_saves_and_says_how_to_continue(run_folder):
    endless = flags({"steps": 5000, "validate-every": 1, "checkpoint-every": 0})
    code, said = interrupt_after("step 2:", run_folder, *endless)
    assert code == 0, said
    done = checkpoint.newest(run_folder)[1]["step"]
    assert f"stopped after step {done}; continue with:" in said
    assert f"python -m unified_trainer --resume {run_folder}" in said
    assert "Traceback" not in said
    steps = [line["step"] for line in metrics_of(run_folder) if "validation/reward" in line]
    assert steps == list(range(done + 1))  # the validation of the last step too: a resumed run will not repeat it


# An output that exists.


def test_an_existing_run_is_never_overwritten(copied, capsys):
    before = files_of(copied)
    message = refused(capsys, *SMALL["dance_grpo"], "--output", str(copied))
    assert f"--output {copied} already holds a run: continue it with --resume {copied}" in message
    assert files_of(copied) == before
