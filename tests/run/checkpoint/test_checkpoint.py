"""Checkpoints: a resumed run is the run that was never stopped, and nothing half-written is ever taken for whole."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import (
    ALONE,
    SMALL,
    assert_same,
    checkpoint_of,
    copy_of,
    files_of,
    flags,
    metrics_of,
    refused,
    run,
)

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.parallel.reading import fill
from unified_trainer.run.checkpoint import dcp as checkpoint
from unified_trainer.run.checkpoint import manifest
from unified_trainer.run.checkpoint.dcp import CheckpointError, Spec

# Everything that has a state: optimizer, learning-rate schedule, EMA weights; dropout and several epochs in finetune.
STATEFUL = flags(
    {
        "student.ema-decay": 0.9,
        "student.warmup-updates": 4,
        "student.lr-schedule": "cosine",
        "student.lr-decay-updates": 9,
    }
    | {"student.learning-rate": 1e-3, "student.weight-decay": 0.1, "checkpoint-every": 2, "validate-every": 2}
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


# Bit for bit.


@pytest.mark.slow
@pytest.mark.parametrize("method", METHOD)
def test_four_steps_are_two_and_two(method, tmp_path):
    straight, halved = tmp_path / "straight", tmp_path / "halved"
    settings = [*STATEFUL, *METHOD[method]]
    run(method, straight, *settings, "--steps", "4")
    run(method, halved, *settings, "--steps", "2")
    assert main(["--resume", str(halved), "--steps", "4"]) == 0
    assert metrics_of(halved) == metrics_of(straight)
    assert [line["step"] for line in metrics_of(straight)] == [0, 1, 2, 2, 3, 4, 4]
    assert_same(checkpoint_of(halved, 4), checkpoint_of(straight, 4))


@pytest.mark.slow
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


@pytest.mark.slow
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


def flip_a_bit(folder):
    """The newest weights are one bit off; the file is as long as it was."""
    flip(folder / SHARD, 0.9)


def cut_shard(folder):
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-100])


def drop_shard(folder):
    (folder / SHARD).unlink()


def foreign(folder):
    """A foreign shard, which the reader would take for one of these."""
    (folder / "student" / "weights" / "more.safetensors").write_bytes((folder / SHARD).read_bytes())


def older_version(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "version": 1}))


def flip(file: Path, place: float) -> None:
    """One bit of a file, at this share of its length."""
    data = bytearray(file.read_bytes())
    data[int(place * len(data))] ^= 4
    file.write_bytes(data)


SHARD = "student/weights/shard-00001-model-00001-of-00001.safetensors"
DAMAGE = {
    drop_manifest: "manifest.json unreadable",
    cut_manifest: "manifest.json unreadable",
    flip_a_bit: f"{SHARD} is damaged, its checksum is not the manifest's",
    cut_shard: f"{SHARD} is missing or not",
    drop_shard: f"{SHARD} is missing or not",
    foreign: "student/weights/more.safetensors is not in manifest.json: remove it",
    older_version: "format version 1, this program reads 2",
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_newest_checkpoint_that_is_not_whole_is_passed_over_by_name(copied, damage):
    damage(copied / "checkpoints" / "step_3")
    folder, manifest, skipped = checkpoint.newest_sound(copied, ALONE)
    assert folder.name == "step_2" and manifest["step"] == 2
    (why,) = skipped
    assert why.startswith("step_3: ") and DAMAGE[damage] in why


@pytest.mark.slow
@pytest.mark.parametrize("spoil", ["flip", "cut"])
def test_every_file_of_a_checkpoint_is_watched(copied, spoil):
    """One bit anywhere, or one byte less, in weights, moments, EMA weights, counter or manifest."""
    folder = copied / "checkpoints" / "step_3"
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    assert {file.parent.name for file in files} == {"weights", "optimizer", "ema", "updates", "step_3"}
    for file in files:
        whole = file.read_bytes()
        for place in (0.0, 0.3, 0.6, 0.999):
            if spoil == "flip":
                flip(file, place)
            else:
                file.write_bytes(whole[: int(place * len(whole))])
            found, _, skipped = checkpoint.newest_sound(copied, ALONE)
            assert found.name == "step_2" and str(file.relative_to(folder)) in skipped[0]
        file.write_bytes(whole)
    assert checkpoint.newest_sound(copied, ALONE)[0] == folder


@pytest.mark.slow
def test_every_bit_of_the_manifest_counts(copied):
    """Also where it stays readable: another step, another sampler."""
    file = copied / "checkpoints" / "step_3" / "manifest.json"
    whole = file.read_text()
    for said, other in (('"step": 3', '"step": 7'), ('"num_steps": 4', '"num_steps": 5'), ("\n", "\n ")):
        assert said in whole
        file.write_text(whole.replace(said, other, 1))
        assert "manifest.json is damaged, its own checksum is wrong" in checkpoint.newest_sound(copied, ALONE)[2][0]


@pytest.mark.slow
def test_a_resumed_run_says_what_it_skipped(copied, capsys):
    flip_a_bit(copied / "checkpoints" / "step_3")
    before = metrics_of(copied)
    assert main(["--resume", str(copied)]) == 0
    said = capsys.readouterr().out
    assert "continuing after step 2" in said and f"skipped step_3: {SHARD} is damaged" in said
    assert metrics_of(copied) == before
    assert checkpoint.newest_sound(copied, ALONE)[0].name == "step_3"  # written anew


@pytest.mark.slow
def test_a_damaged_later_checkpoint_does_not_push_out_a_good_one(copied):
    """Retention counts what this run has; step 3, which it passed over, is not among them."""
    flip_a_bit(copied / "checkpoints" / "step_3")
    (copied / "checkpoints" / "step_2" / SHARD).unlink()
    assert main(["--resume", str(copied), "--steps", "2", "--keep-last", "1"]) == 0
    assert checkpoint.find(copied)[0].name == "step_3"  # only its checksum tells
    assert checkpoint.newest_sound(copied, ALONE)[0].name == "step_2"


@pytest.mark.slow
def test_a_newer_format_is_an_error_not_a_step_back(copied, capsys):
    folder = copied / "checkpoints" / "step_3"
    metadata, _ = manifest.read(folder)
    (folder / "manifest.json").write_text(
        manifest.as_text({key: value for key, value in metadata.items() if key != "crc32"} | {"version": 3})
    )
    message = refused(capsys, "--resume", str(copied))
    assert f"{folder} has format version 3, this program reads 2: update it" in message


@pytest.mark.slow
def test_a_folder_still_being_written_is_not_a_checkpoint(copied):
    copy_of(copied / "checkpoints" / "step_3", copied / "checkpoints" / ".step_4.tmp")
    copy_of(copied / "checkpoints" / "step_3", copied / "checkpoints" / "step_latest")
    assert checkpoint.find(copied)[0].name == "step_3"


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip_a_bit, drop_manifest])
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


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_begins_again(copied, capsys):
    shutil.rmtree(copied / "checkpoints")
    before, file = metrics_of(copied), copied / "metrics.jsonl"
    file.write_text('{"step": 0, "validation/reward": 1.0}\n' + file.read_text())
    assert main(["--resume", str(copied)]) == 0
    assert "no checkpoint yet: from the beginning" in capsys.readouterr().out
    assert metrics_of(copied) == before


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (9, 10, 100):
        checkpoint.save(tmp_path / "checkpoints", step, {"a/weights/w": torch.tensor(float(step))}, ALONE)
    assert checkpoint.find(tmp_path)[1]["step"] == 100
    assert checkpoint.find(f"{tmp_path}@9")[0].name == "step_9"
    with pytest.raises(CheckpointError, match="has no checkpoint of step 11; it has 9, 10, 100"):
        checkpoint.find(f"{tmp_path}@11")


def test_a_folder_is_called_what_it_is_called(tmp_path):
    odd = tmp_path / "run@7:ema"
    odd.mkdir()
    assert Spec.of(odd) == (odd, None, False)
    assert Spec.of(f"{odd}@3:ema") == (odd, 3, True)
    for spec, kind in ((f"{odd}:emma", "emma"), (f"{odd}@3:Ema", "Ema"), (f"{odd}@latest:EMA", "EMA")):
        with pytest.raises(UserError, match=f"the kind of weights '{kind}' is not known; did you mean ema"):
            Spec.of(spec)
    assert Spec.of("absent:emma").run == Path("absent:emma")
    assert Spec.of("runs/a@12") == (Path("runs/a"), 12, False)
    assert Spec.of("runs/a:ema") == (Path("runs/a"), None, True)


@pytest.mark.slow
def test_keeping_none_is_refused(run_folder, capsys):
    message = refused(capsys, *SMALL["dance_grpo"], "--output", str(run_folder), "--keep-last", "0")
    assert "keep_last" in message and not run_folder.exists()


def test_saving_a_step_again_replaces_it(tmp_path):
    for value in (1.0, 2.0):
        folder = checkpoint.save(tmp_path, 1, {"a/weights/w": torch.tensor([value])}, ALONE)
    loaded = {"a/weights/w": torch.zeros(1)}
    checkpoint.load(folder, loaded, ALONE)
    assert loaded["a/weights/w"].tolist() == [2.0]


# Another model.


def test_a_shape_that_differs_is_named(tmp_path):
    folder = checkpoint.save(tmp_path, 1, {"r/weights/a": torch.zeros(2, 3), "r/weights/b": torch.zeros(1)}, ALONE)
    with pytest.raises(
        CheckpointError, match=r"step_1: r/weights/a is \(2, 3\) in the checkpoint, \(3, 2\) in this run"
    ):
        checkpoint.load(folder, {"r/weights/a": torch.zeros(3, 2), "r/weights/b": torch.zeros(1)}, ALONE)


def test_a_tensor_that_is_not_there_is_named(tmp_path):
    folder = checkpoint.save(tmp_path, 1, {"r/weights/a": torch.zeros(2)}, ALONE)
    wanted = {f"r/weights/{key}": torch.zeros(1 + (key == "a")) for key in "acb"}
    with pytest.raises(CheckpointError, match=r"step_1 lacks 2 tensors, first r/weights/b"):
        checkpoint.load(folder, wanted, ALONE)


def test_one_kind_of_state_is_read_without_the_others(tmp_path):
    """As export does: the weights of one role, where everything else is gone."""
    state = {f"{role}/{kind}/w": torch.ones(2) for role in ("student", "critic") for kind in ("weights", "optimizer")}
    folder = checkpoint.save(tmp_path, 1, state, ALONE)
    for other in ("critic", "student/optimizer"):
        shutil.rmtree(folder / other)
    loaded = {"student/weights/w": torch.zeros(2)}
    checkpoint.load(folder, loaded, ALONE)
    assert loaded["student/weights/w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("keep", [4, 40, -4])
def test_a_damaged_file_is_named_when_it_is_read(tmp_path, keep):
    """Cut inside the header's length, inside the header, and inside the data."""
    folder = checkpoint.save(tmp_path, 1, {"r/weights/a": torch.ones(8)}, ALONE)
    (file,) = (folder / "r" / "weights").iterdir()
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"step_1/r/weights cannot be read"):
        checkpoint.load(folder, {"r/weights/a": torch.zeros(8)}, ALONE)
    with pytest.raises(UserError, match=r"step_1/r/weights cannot be read"):
        fill({"r/weights/a": torch.zeros(8)}, folder / "r" / "weights", ALONE)


# Resuming with other settings.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "key"),
    [
        (["--student.learning-rate", "0.5"], "student.learning_rate: 0.0002 -> 0.5"),
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
    assert key in message and "--init-from" in message and f"--allow {key.split(':')[0]}" in message
    assert files_of(copied) == before


@pytest.mark.slow
def test_allow_takes_it_and_the_run_says_so(copied, capsys):
    words = ["--student.learning-rate", "0.5", "--reward.scale", "2", "--steps", "4"]
    allowed = ["--allow", "student.learning-rate", "--allow", "reward.scale"]
    assert "reward.scale" in refused(capsys, "--resume", str(copied), *words, *allowed[:2])
    assert main(["--resume", str(copied), *words, *allowed]) == 0
    said = capsys.readouterr().out
    for change in ("student.learning_rate: 0.0002 -> 0.5", "reward.scale: 1.0 -> 2.0", "steps: 3 -> 4"):
        assert f"changed {change}" in said
    assert metrics_of(copied)[-1]["train/student/learning_rate"] > 0.4
    assert main(["--resume", str(copied), "--steps", "5"]) == 0  # the new settings are the run's own now


@pytest.mark.slow
def test_allowing_what_does_not_differ_is_refused(copied, capsys):
    message = refused(capsys, "--resume", str(copied), "--allow", "seed")
    assert "--allow seed: this setting does not differ" in message


@pytest.mark.slow
def test_a_setting_that_does_not_is_taken(copied):
    harmless = flags({"steps": 4, "checkpoint-every": 0, "keep-last": 1, "validate-every": 4})
    assert main(["--resume", str(copied), *harmless]) == 0
    assert [line["step"] for line in metrics_of(copied)][-2:] == [4, 4]
    assert [path.name for path in (copied / "checkpoints").iterdir()] == ["step_4"]


@pytest.mark.slow
def test_a_moved_run_continues_where_it_is(copied, saved):
    before = files_of(saved)
    assert main(["--resume", str(copied), "--steps", "4"]) == 0
    assert checkpoint.find(copied)[1]["step"] == 4
    assert files_of(saved) == before


def edit(run: Path, old: str, new: str) -> Path:
    """A hand in config.yaml."""
    file = run / "config.yaml"
    assert file.read_text().count(old) == 1
    file.write_text(file.read_text().replace(old, new))
    return file


@pytest.mark.slow
def test_a_config_that_was_cut_off_is_refused(copied, capsys):
    """Its lost settings would come back as defaults."""
    file = copied / "config.yaml"
    file.write_text(file.read_text().partition("tracking:")[0])
    message = refused(capsys, "--resume", str(copied), "--steps", "4")
    assert f"{file} was edited by hand or cut off" in message and "--allow config" in message


@pytest.mark.slow
def test_a_config_edited_by_hand_is_refused(copied, capsys):
    file = edit(copied, "learning_rate: 0.0002", "learning_rate: 0.5")
    before = files_of(copied)
    message = refused(capsys, "--resume", str(copied), "--steps", "4")
    assert f"{file} was edited by hand" in message and "--allow config" in message and files_of(copied) == before
    assert main(["--resume", str(copied), "--steps", "4", "--allow", "config"]) == 0
    assert f"changed {file}: edited by hand" in capsys.readouterr().out
    assert metrics_of(copied)[-1]["train/student/learning_rate"] > 0.4
    assert "does not differ" in refused(capsys, "--resume", str(copied), "--allow", "config")  # it is the run's own now


@pytest.mark.slow
def test_comments_in_a_config_are_no_edit(copied, capsys):
    edit(copied, "steps: 3\n", "# mine\nsteps:   3  # three\n")
    assert "config: this setting does not differ" in refused(capsys, "--resume", str(copied), "--allow", "config")


@pytest.mark.slow
def test_another_method_is_refused(copied, capsys):
    assert "is a run of dance_grpo" in refused(capsys, "--resume", str(copied), "--method", "finetune")


# An output that exists.


@pytest.mark.slow
def test_a_run_is_not_continued_in_another_directory(copied, tmp_path, capsys):
    before = files_of(copied)
    message = refused(capsys, "--resume", str(copied), "--steps", "9", "--output", str(tmp_path / "other"))
    assert f"--output {tmp_path / 'other'}: --resume continues a run in its own directory, {copied}" in message
    assert f"--init-from {copied}" in message and files_of(copied) == before and not (tmp_path / "other").exists()


@pytest.mark.slow
def test_an_existing_run_is_never_overwritten(copied, capsys):
    before = files_of(copied)
    message = refused(capsys, *SMALL["dance_grpo"], "--output", str(copied))
    assert f"--output {copied} already holds a run: continue it with --resume {copied}" in message
    assert files_of(copied) == before
