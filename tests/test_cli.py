"""The command line: every wrong input gives one clear message before anything is written, and a run can be watched."""

import json
import re
import shutil
from datetime import datetime

import av
import pytest
import torch
import yaml
from forked import program
from helpers import (
    HPSV3,
    SMALL,
    WAN,
    assert_same,
    checkpoint_of,
    copy_of,
    files_of,
    flags,
    metrics_of,
    rewrite,
    run,
)
from PIL import Image

from unified_trainer.__main__ import main

pytestmark = pytest.mark.slow

TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"
TEXT_ENCODER = "text_encoder/model.safetensors"


@pytest.fixture
def wan(tmp_path):
    """A copy of the tiny model to spoil."""
    return copy_of(WAN, tmp_path / "wan")


@pytest.fixture
def hpsv3(tmp_path):
    return copy_of(HPSV3, tmp_path / "hpsv3")


@pytest.fixture
def refused(run_folder, capsys):
    """Run with these flags; they must be refused with code 2 before a file is written. Gives the message."""

    def attempt(*flags: str, method: str = "dance_grpo") -> str:
        capsys.readouterr()
        code = main([*SMALL[method], "--output", str(run_folder), *flags])
        said = capsys.readouterr()
        assert code == 2, said
        assert not run_folder.exists()
        assert "Traceback" not in said.err
        return said.err

    return attempt


# Values.


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["--student.learning-rate", "nan"], "student.learning_rate"),
        (["--sampler.step-sigmas", "nan", "500"], "sampler.step_sigmas"),
        (["--reward.scorers.hpsv3.weight", "nan"], "reward.scorers.hpsv3.weight"),
    ],
)
def test_nan_is_no_number(refused, flags, key):
    assert f"{key} must " in refused(*flags)


@pytest.mark.parametrize("text", ["- 1\n", "{a: [}\n"])
def test_a_saved_file_that_is_not_settings_is_named(refused, tmp_path, text):
    (tmp_path / "odd.yaml").write_text(text)
    assert "odd.yaml" in refused("--config", str(tmp_path / "odd.yaml"))


# Folders.


@pytest.mark.parametrize("key", ["student", "reward"])
def test_a_missing_folder_is_named(refused, tmp_path, key):
    assert str(tmp_path / "absent") in refused(f"--{key}.path", str(tmp_path / "absent"))


@pytest.mark.parametrize(
    "name",
    [
        "model_index.json",
        "transformer/config.json",
        TRANSFORMER,
        "vae/config.json",
        VAE,
        "text_encoder/config.json",
        TEXT_ENCODER,
        "tokenizer/tokenizer.json",
    ],
)
def test_a_file_that_is_not_there_is_named(refused, wan, name):
    (wan / name).unlink()
    message = refused("--student.path", str(wan))
    assert str((wan / name).parent) in message


def test_a_missing_tokenizer_is_named(refused, wan):
    shutil.rmtree(wan / "tokenizer")
    assert str(wan / "tokenizer") in refused("--student.path", str(wan))


@pytest.mark.parametrize("name", [TRANSFORMER, VAE, TEXT_ENCODER])
def test_a_file_cut_short_is_named(refused, wan, name):
    whole = (wan / name).read_bytes()
    (wan / name).write_bytes(whole[: len(whole) // 2])
    assert str(wan / name) in refused("--student.path", str(wan))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (TRANSFORMER, "proj_out.bias"),
        (VAE, "decoder.conv_out.bias"),
        (TEXT_ENCODER, "encoder.block.1.layer.1.DenseReluDense.wo.weight"),
    ],
)
def test_a_tensor_that_is_not_there_is_named(refused, wan, name, key):
    """Not filled with random numbers: a half-converted text encoder would otherwise pass for one."""
    rewrite(wan / name, lambda tensors: tensors.pop(key))
    message = refused("--student.path", str(wan))
    assert key in message and str((wan / name).parent) in message


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (TRANSFORMER, "proj_out.bias"),
        (VAE, "decoder.conv_out.bias"),
        (TEXT_ENCODER, "encoder.block.1.layer.1.DenseReluDense.wo.weight"),
    ],
)
def test_a_nan_in_the_weights_is_named(refused, wan, name, key):
    rewrite(wan / name, lambda tensors: tensors[key].view(-1)[:1].fill_(torch.nan))
    message = refused("--student.path", str(wan))
    assert key in message and "not finite" in message and str((wan / name).parent) in message


def test_a_half_written_reward_is_named(refused, hpsv3):
    (hpsv3 / "hpsv3.json").unlink()
    assert "hpsv3.json" in refused("--reward.path", str(hpsv3))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NoPipeline", "model_index.json: NoPipeline is no pipeline of diffusers"),
        ("FluxPipeline", "model_index.json: a pipeline needs a transformer and a vae, and this one has no component"),
    ],
)
def test_another_pipeline_is_named(refused, wan, name, said):
    (wan / "model_index.json").write_text(f'{{"_class_name": "{name}"}}')
    assert said in refused("--student.path", str(wan))


# Sets of scorers.


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--reward.weight", "0"], "every scorer has weight 0 (hpsv3): there is no reward"),
        (["--reward.scale", "-1"], "sum to -1 (hpsv3 -1): the student would learn to lower their scores"),
        (
            ["--reward.scorers.nice.weight", "1"],
            "reward.scorers.nice.kind nice is no scorer; have aesthetic, background_consistency, clip",
        ),
        (["--reward.scorers.clip.weight", "1"], "reward.scorers.clip.path must be the folder of a clip scorer, not ''"),
        (["--reward.scorers.a.kind", "clip", "--reward.scorers.a.path", "nowhere"], "nowhere/preprocessor_config.json"),
        (["--reward.device", "abacus"], "reward.device 'abacus' is no device that torch knows"),
        (["--reward.kind", "os:system", "--reward.path", ""], "os:system must take two arguments, videos and prompts"),
        (["--algorithm.clip-low", "0"], "algorithm.clip_low must be above 0"),
        (["--reward.kind", "clip"], "reward.path must be the folder of a clip scorer, not ''"),
        (["--reward.kind", "sharpness", "--reward.path", "tiny"], "reward.path tiny: sharpness has no weights; leave"),
        (["--reward.kind", "sharpness", "--reward.device", "cpu"], "reward.device cpu: sharpness has no weights"),
        (
            ["--reward.scorers.motion-energy.weight", "1"],
            "motion_energy needs at least 2 frames of a video",
        ),
        (["--reward.scorers.hpsv3.weight", "1"], "reward.scorers.hpsv3 has the name of the scorer that reward.path"),
        (["--reward.scorers.sharpness.wait", "1"], "did you mean --reward.scorers.sharpness.weight?"),
    ],
)
def test_a_set_that_cannot_be_is_refused_before_any_weight_loads(refused, wan, flags, message):
    """The VAE is damaged: reading it would be another message."""
    (wan / VAE).write_bytes(b"no weights")
    paths = [] if "nowhere" in flags else ["--student.path", str(wan)]
    assert message in refused(*paths, *flags)


def test_a_set_of_scorers_from_flags_and_from_its_saved_config(run_folder, tmp_path):
    """Two scorers make the reward, a third is measured in validation alone; config.yaml says it all again."""
    some = ["--reward.scorers.sharpness.weight", "0.5", "--reward.scorers.sharpness.scale", "10"]
    some += ["--reward.scorers.look.kind", "saturation", "--reward.scorers.look.weight", "0"]
    some += ["--reward.scorers.look.frames", "all"]
    run("dance_grpo", run_folder, *some, "--validate-every", "1", "--algorithm.advantage", "gdpo")
    first, train, last = metrics_of(run_folder)
    assert train["train/reward"] == pytest.approx(train["train/reward/hpsv3"] + 0.5 * train["train/reward/sharpness"])
    assert "train/reward/look" not in train and train["train/pixels/saturation"] > 0
    for line in (first, last):
        parts = line["validation/reward/hpsv3"] + 0.5 * line["validation/reward/sharpness"]
        assert line["validation/reward"] == pytest.approx(parts)
        assert line["validation/reward/look"] == pytest.approx(line["validation/pixels/saturation"])
    again = ["--config", str(run_folder / "config.yaml"), "--output", str(tmp_path / "again")]
    assert main(again) == 0
    assert metrics_of(tmp_path / "again") == metrics_of(run_folder)


# A score that is not finite.


@pytest.mark.parametrize("validate_every", ["0", "1"])
def test_a_nan_in_the_reward_stops_the_run(run_folder, hpsv3, capsys, validate_every):
    """It names the sample, in the first rollout or validation, and no metric or checkpoint is written."""
    rewrite(hpsv3 / "HPSv3.safetensors", lambda tensors: tensors["rm_head.5.bias"].fill_(torch.nan))
    flags = ["--reward.path", str(hpsv3), "--validate-every", validate_every]
    assert main([*SMALL["dance_grpo"], "--output", str(run_folder), *flags]) == 2
    assert "the score of sample 0 is [nan, nan]" in capsys.readouterr().err
    assert (run_folder / "metrics.jsonl").read_text() == ""
    assert not (run_folder / "checkpoints").exists()


# Numbers that do not fit.


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--algorithm.num-samples", "1"], "algorithm.num_samples must be at least 2: a group of one"),
        (
            ["--algorithm.num-prompts", "3"],
            "algorithm.num_prompts (3) must be divisible by algorithm.prompts_per_update (2)",
        ),
        (["--algorithm.prompts-per-update", "0"], "algorithm.prompts_per_update must be from 1 to 1000000, not 0"),
        (["--algorithm.update-batch", "0"], "algorithm.update_batch must be from 1 to 1000000, not 0"),
        (["--algorithm.rollout-batch", "0"], "algorithm.rollout_batch must be from 1 to 1000000, not 0"),
        (["--video.frames", "6"], "video.frames must be 4k + 1 for this VAE, not 6: set 5 or 9"),
        (["--video.width", "33"], "video.width must be a multiple of 16 for this VAE, not 33: set 32 or 48"),
        (["--validation.num-samples", "1"], "validation.num_samples must be from 2 to 1000000, not 1"),
        (["--reward.batch", "0"], "reward.batch must be from 1 to 1000000, not 0"),
        (["--student.ema-decay", "1.5"], "student.ema_decay must be at least 0 and below 1, not 1.5"),
    ],
)
def test_numbers_that_do_not_fit_name_their_key(refused, flags, message):
    assert message in refused(*flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--algorithm.micro-batch", "0"], "algorithm.micro_batch must be from 1 to 1000000, not 0"),
        (["--algorithm.batch-size", "0"], "algorithm.batch_size must be from 1 to 1000000, not 0"),
        (["--video.frames", "5"], "video.frames"),
        (["--data.num-clips", "0"], "data.num_clips"),
    ],
)
def test_finetune_numbers_that_do_not_fit_name_their_key(refused, flags, message):
    assert message in refused(*flags, method="finetune")


# Prompt files.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "prompts.txt is empty"),
        (" \n\n", "prompts.txt is empty"),
    ],
)
@pytest.mark.parametrize("key", ["--prompts", "--validation.prompts"])
def test_a_bad_prompt_file_is_named_with_its_line(refused, tmp_path, key, text, message):
    (tmp_path / "prompts.txt").write_text(text)
    said = refused(key, str(tmp_path / "prompts.txt"))
    assert message in said and key in said


def test_a_missing_prompt_file_is_named(refused, tmp_path):
    assert "absent.txt: no such file" in refused("--prompts", str(tmp_path / "absent.txt"))


# A run that a person watches.


@pytest.fixture(scope="module")
def watched_run(tmp_path_factory):
    """A run of the tiny world's own size with everything that a person looks at."""
    folder = tmp_path_factory.mktemp("watched") / "run"
    flags = "--steps 2 --validate-every 2 --validation.num-samples 4 --validation.batch 3 --validation.num-videos 3"
    size = "--video.frames 17 --video.height 64 --video.width 64 --student.ema-decay 0.5"
    run("dance_grpo", folder, *flags.split(), *size.split())
    return folder


def test_metrics_have_their_names(watched_run):
    validation, first, second, last = metrics_of(watched_run)
    assert [line["step"] for line in (validation, first, second, last)] == [0, 1, 2, 2]
    accuracies = {"accuracy", "accuracy/color", "accuracy/shape", "accuracy/direction"}
    pixels = {f"pixels/{name}" for name in ("saturation", "dark_share", "edge_density", "motion_energy")}
    watched = {"reward", "reward/hpsv3", "accuracy"} | pixels
    watched |= {f"drawn/{name}" for name in ("size", "x", "y", "travel")} | {"world/color", "world/shape"}
    world = {f"world/{name}" for name in ("size", "place", "travel", "frechet")}  # no subject has two of four samples
    names = accuracies | watched | {f"{name}_std" for name in watched} | world | {"frechet", "reward_hacking"}
    assert validation.keys() == last.keys() == {"step"} | {f"validation/{name}" for name in names}
    assert {"train/reward", "train/log_ratio", "train/student/grad_norm", "train/student/learning_rate"} <= first.keys()
    assert first.keys() == second.keys()
    raw = json.loads((watched_run / "metrics.jsonl").read_text().splitlines()[1])
    assert raw["train/samples_per_second"] > 0
    assert first["train/log_ratio_abs_max"] == 0


def test_validation_can_be_looked_at(watched_run):
    for step in (0, 2):
        folder = watched_run / "validation" / f"step_{step}"
        videos = [f"{i}.mp4" for i in range(4)]  # the fourth is of the two best or the two worst
        assert sorted(path.name for path in folder.iterdir()) == [*videos, "contact_sheet.png", "samples.jsonl"]
        for file in folder.glob("*.mp4"):
            with av.open(str(file)) as video:
                assert video.streams.video[0].average_rate == 8  # the tiny recipe's video.fps
                frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
            assert len(frames) == 17 and frames[0].shape == (64, 64, 3)
        with Image.open(folder / "contact_sheet.png") as sheet:
            assert sheet.width == 6 * 128 and sheet.height == 3 * (128 + 2 * 16)


def test_every_validation_sample_has_a_line(watched_run):
    """The means of all samples are the metrics."""
    metrics = metrics_of(watched_run)[-1]
    lines = (watched_run / "validation" / "step_2" / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["sample"], row["seed"], row["video"]) for row in rows] == [(i, 1000, f"{i}.mp4") for i in range(4)]
    assert sum(row["reward"] for row in rows) / 4 == pytest.approx(metrics["validation/reward"])
    assert sum(row["scores"]["hpsv3"] for row in rows) / 4 == pytest.approx(metrics["validation/reward/hpsv3"])
    assert sum(row["accuracy"]["all"] for row in rows) / 4 == metrics["validation/accuracy"]
    assert sum(row["accuracy"]["color"] for row in rows) / 4 == metrics["validation/accuracy/color"]
    assert all(row["prompt"] for row in rows)


def test_a_row_says_what_the_step_cost(watched_run):
    lines = [json.loads(line) for line in (watched_run / "metrics.jsonl").read_text().splitlines()]
    first, last = lines[1], lines[-1]
    phases = {name.rpartition("/")[2] for name in first if name.startswith("train/seconds/")}
    assert phases == {"other", "data", "rollout", "decode", "score", "update", "optimizer"}
    parts = sum(value for name, value in first.items() if name.startswith("train/seconds/"))
    assert parts == pytest.approx(first["train/seconds"])
    assert first["train/tokens_per_second"] > 0 and "train/mfu" not in first
    per_token = first["train/model_flops_per_second"] / first["train/tokens_per_second"]
    assert 1e5 < per_token < 1e7  # two to six times the weights of the tiny network, and attention
    assert last["validation/seconds"] > 0 and last["time"] >= first["time"]


def test_a_start_notes_its_environment_and_a_continuation_adds_its_own(watched_run, tmp_path):
    copied = copy_of(watched_run, tmp_path / "run")
    assert main(["--resume", str(copied), "--steps", "3", "--validate-every", "0"]) == 0
    start, again = [json.loads(line) for line in (copied / "environment.jsonl").read_text().splitlines()]
    assert (start["step"], again["step"]) == (0, 2)
    assert again["command"] == f"python -m unified_trainer --resume {copied} --steps 3 --validate-every 0"
    assert start["seed"] == 0 and start["ranks"] == 1 and start["device"] == "cpu"
    assert start["versions"].keys() >= {"python", "unified-trainer", "torch", "diffusers", "transformers", "cuda"}
    assert datetime.fromisoformat(start["time"]) <= datetime.fromisoformat(again["time"])


@pytest.mark.parametrize("size", [("32", "64"), ("64", "32")])
def test_a_size_that_shares_one_side_with_the_tiny_world(run_folder, size):
    """Other sizes and prompts have no attribute checker; a run of them still validates."""
    flags = ["--validate-every", "1", "--video.height", size[0], "--video.width", size[1]]
    run("dance_grpo", run_folder, *flags)
    assert not any("accuracy" in key for line in metrics_of(run_folder) for key in line)


def test_validation_is_the_same_before_any_learning(run_folder):
    """Fixed prompts and noise: with learning rate 0 every validation gives the first one's numbers."""
    flags = ["--steps", "2", "--validate-every", "1", "--student.learning-rate", "0", "--seed", "5"]
    run("dance_grpo", run_folder, *flags)
    rows = [{k: v for k, v in line.items() if k != "step"} for line in metrics_of(run_folder)]
    rows = [row for row in rows if "validation/reward" in row]
    assert len(rows) == 3 and rows[0] == rows[1] == rows[2]


def test_validation_does_not_touch_the_run(tmp_path):
    """With and without it the training is the same."""
    often, never = tmp_path / "often", tmp_path / "never"
    run("dance_grpo", often, "--steps", "2", "--validate-every", "1", "--student.ema-decay", "0.5")
    run("dance_grpo", never, "--steps", "2", "--student.ema-decay", "0.5")
    assert_same(checkpoint_of(often, 2), checkpoint_of(never, 2))


def test_the_saved_settings_run_again_and_a_seed_changes_the_run(tmp_path):
    first, second, other = (tmp_path / name for name in ("first", "second", "other"))
    run("dance_grpo", first, "--steps", "2", "--algorithm.eta", "0.25", "--student.betas", "0.5", "0.9")
    assert main(["--config", str(first / "config.yaml"), "--output", str(second)]) == 0
    assert metrics_of(second) == metrics_of(first)
    assert_same(checkpoint_of(second, 2), checkpoint_of(first, 2))
    one, again = (yaml.safe_load((folder / "config.yaml").read_text()) for folder in (first, second))
    assert one == again
    assert one["algorithm"]["eta"] == 0.25 and one["student"]["betas"] == [0.5, 0.9]
    assert main(["--config", str(first / "config.yaml"), "--output", str(other), "--steps", "1", "--seed", "1"]) == 0
    assert metrics_of(other)[0] != metrics_of(first)[0]


def test_own_prompts(run_folder, tmp_path):
    (tmp_path / "mine.txt").write_text("a red circle moving left\nsomething of my own\n")
    (tmp_path / "held.txt").write_text("another of my own\n")
    flags = ["--prompts", str(tmp_path / "mine.txt"), "--validation.prompts", str(tmp_path / "held.txt")]
    run("dance_grpo", run_folder, "--validate-every", "1", *flags)
    assert all("validation/accuracy" not in line for line in metrics_of(run_folder))
    saved = yaml.safe_load((run_folder / "config.yaml").read_text())
    assert saved["prompts"] == str(tmp_path / "mine.txt")


def test_without_a_name_a_run_gets_a_free_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "dance_grpo-1").mkdir(parents=True)
    assert main([*SMALL["dance_grpo"]]) == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["dance_grpo-1", "dance_grpo-2"]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # torch: a slower kernel
def test_bf16_trains(run_folder):
    """The replay is exact in bf16 too: both sides are rounded alike."""
    run("dance_grpo", run_folder, "--student.precision", "bf16")
    assert metrics_of(run_folder)[0]["train/log_ratio_abs_max"] == 0


# Errors of the user, and bugs.


# A method outside the package, which fails in its step in a way that a setting names.
FAULTY = """
from dataclasses import dataclass

import torch

from unified_trainer.basics.errors import UserError
from unified_trainer.methods.base import Method, SingleUpdateConfig, trained


@dataclass(frozen=True)
class FaultyConfig(SingleUpdateConfig):
    fault: str = "bug"


class Faulty(Method):
    config_class = FaultyConfig
    roles = {"student": trained()}

    def step(self, batch, step, rng, mesh):
        if self.config.fault == "bug":
            raise ValueError("two shapes differ")
        if self.config.fault == "user":
            raise UserError("algorithm.fault must be none, not user")
        if self.config.fault == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory")
        yield


def score(videos, prompts):
    raise KeyError("a scorer of one's own")
"""


@pytest.fixture
def faulty(tmp_path):
    """A folder with the file of that method, and of a scorer that raises."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    return tmp_path


def faulty_flags(folder, fault: str) -> list[str]:
    """A run of the faulty method on the small model."""
    settings = {"method": f"{folder / 'faulty.py'}:Faulty", "steps": 1, "validate-every": 0, "reward.frames": "first"}
    settings |= {"video.frames": 5, "video.height": 32, "video.width": 32, "output": folder / "run"}
    return flags(settings | {"algorithm.batch-size": 4, "algorithm.micro-batch": 2, "algorithm.fault": fault})


def test_a_bug_keeps_its_traceback(faulty):
    """It ends with a note of what was at work, and the program with exit code 1."""
    done = program("-m", "unified_trainer", *faulty_flags(faulty, "bug"))
    assert done.returncode == 1
    lines = done.stderr.rstrip().splitlines()
    assert lines[-2:] == ["ValueError: two shapes differ", "while working on method Faulty, training step 1"]
    assert "Traceback (most recent call last):" in lines
    assert any("faulty.py" in line and line.endswith("in step") for line in lines)  # the line of the bug itself
    assert "error:" not in done.stderr


def test_an_error_of_the_user_is_one_line(faulty):
    done = program("-m", "unified_trainer", *faulty_flags(faulty, "user"))
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: algorithm.fault must be none, not user"]


def test_a_scorer_that_raises_is_named_with_its_prompts(faulty):
    """At most three prompts are named."""
    (faulty / "prompts.txt").write_text("a red circle\na blue square\n")
    kind = ["--reward.kind", f"{faulty / 'faulty.py'}:score", "--reward.path", ""]
    words = [*kind, "--prompts", str(faulty / "prompts.txt"), "--output", str(faulty / "run")]
    done = program("-m", "unified_trainer", *SMALL["dance_grpo"], *words)
    assert done.returncode == 1
    lines = done.stderr.rstrip().splitlines()
    assert lines[-3] == 'KeyError: "a scorer of one\'s own"' and "Traceback (most recent call last):" in lines
    named = re.fullmatch(r"while working on scorer (\S+), prompts (.*), \.\.\.", lines[-2])
    assert named and named[1].endswith("score"), lines[-2]
    prompts = named[2].split(", ")
    assert len(prompts) == 3 and set(prompts) == {"'a red circle'", "'a blue square'"}
    assert lines[-1] == "while working on method DanceGRPO, training step 1"


@pytest.mark.parametrize(
    ("more", "advice"),
    [
        (
            [],
            "set --student.activation-memory selective; lower --algorithm.micro-batch (now 2); "
            "train an adapter: --student.adapter.rank 16",
        ),
        (
            ["--student.activation-memory", "full", "--algorithm.micro-batch", "1"],
            "train an adapter: --student.adapter.rank 16; set --student.precision bf16; "
            "keep moments in CPU memory: --parallel.offload-optimizer",
        ),
    ],
)
def test_a_run_out_of_memory_names_three_settings(faulty, more, advice):
    """Those with the largest effect that this run has not taken yet."""
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as error:
        main([*faulty_flags(faulty, "memory"), *more])
    notes = ["while working on method Faulty, training step 1", f"out of memory: {advice}"]
    assert error.value.__notes__ == notes


def test_a_refused_run_leaves_other_files_alone(run_folder, tmp_path, capsys):
    """A folder that holds something else keeps it."""
    run_folder.mkdir()
    (run_folder / "notes.txt").write_text("mine")
    assert main([*SMALL["dance_grpo"], "--output", str(run_folder), "--video.frames", "6"]) == 2
    assert files_of(run_folder) == {"notes.txt": b"mine"}


def test_resuming_a_finished_run_changes_nothing(run_folder, capsys):
    run("dance_grpo", run_folder)
    before = files_of(run_folder)
    assert main(["--resume", str(run_folder)]) == 0
    assert "is at step 1 of 1: nothing to do" in capsys.readouterr().out
    assert files_of(run_folder) == before


def test_skipped_lines_of_a_prompt_file_are_said_once(run_folder, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text(
        "a red circle moving left\n\na blue square moving up\na red circle moving left\n"
    )
    run("dance_grpo", run_folder, "--prompts", str(tmp_path / "prompts.txt"))
    said = capsys.readouterr().out
    assert said.count("2 prompts; skipped 1 blank and 1 repeated lines") == 1
