"""Recipes: which models they fit, what a run on them must be given, and that every method passes all checks."""

import dataclasses
import json
import re
from collections import ChainMap

import numpy as np
import pytest
import torch
import yaml
from cells import cells
from clip_files import tensors, write_clips
from helpers import ALONE, HPSV3, OF_CLIPS, REPO, flags
from PIL import Image
from real_clips import grays, write_exactly
from recipe_folders import model_folder

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.data.fastvideo import IMAGE_TENSORS
from unified_trainer.data.video_reader import VideoError
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.parallel.mesh import Mesh, ParallelConfig
from unified_trainer.run.plan.plan import check
from unified_trainer.run.registry import METHODS, family_of, method_named
from unified_trainer.run.settings import config as settings
from unified_trainer.run.settings.command_line import parse
from unified_trainer.run.settings.config import ConfigError, with_checksum
from unified_trainer.run.settings.fitting import fits
from unified_trainer.tools.help_pages import of_method

pytestmark = pytest.mark.slow

NEVER_CAUSAL = ("qwen-image", "sd3.5-medium", "hunyuanvideo-1.5", "hunyuanvideo-1.5-i2v", "ltx-video", "ltx-2")
TAKE_IMAGES = ("wan2.1-i2v-14b", "wan2.2-i2v-a14b", "hunyuanvideo-1.5-i2v")
REAL = [recipe for recipe in settings.recipes() if not recipe.startswith(("tiny", "digits", "general"))]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {recipe: model_folder(root / recipe, recipe) for recipe in REAL}


def parsed(*words: object) -> settings.RunConfig:
    return parse([*map(str, words)])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--video.height", "72"],
            "video.height must be a multiple of 16 for this VAE (8) and the transformer's patches",
        ),
        (["--video.height", "72"], "not 72: set 64 or 80"),
        (["--video.height", "64", "--video.width", "8"], "not 8: set 16"),
        (["--video.frames", "48"], "video.frames must be 4k + 1 for this VAE, not 48: set 45 or 49"),
    ],
)
def test_a_size_that_no_patch_divides_is_refused_before_weights_are_read(tmp_path, prompts, flags, message):
    """The folder has no weights; the VAE divides by 8, and the transformer by 2 more."""
    folder = model_folder(tmp_path / "model", "wan2.1-1.3b")
    words = given("wan2.1-1.3b", "dance_grpo", folder, prompts)
    assert check(parsed(*words, "--video.height", "64"), ALONE).latent_shape[2:] == (8, 52)
    with pytest.raises(UserError, match=re.escape(message)):
        check(parsed(*words, *flags), ALONE)


CAUSAL = ("self_forcing", "long_self_forcing", "streaming_tuning")


def given(recipe: str, method: str, folder, prompts) -> list[str]:
    """The flags of a run that has everything it needs."""
    words = ["--recipe", recipe, "--method", method, "--student.path", folder]
    if recipe == "wan2.1-1.3b" and method in CAUSAL:  # its teacher and its critic are on the hub
        words += ["--teacher.path", folder.with_name("wan2.1-14b"), "--critic.path", folder]
    config = method_named(method).config_class
    words += ["--data.path", prompts.parent] if config().needs_clips else ["--prompts", prompts]
    words += ["--data.rejected", prompts.parent] if config.needs_pairs else []
    return [*words, "--reward.path", HPSV3] if method_named(method).uses_reward else words


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("a cat\na dog\n")  # fewer than the prompts of a step, which is said
    return file


IMAGELESS = {
    "flow_dpo": "needs a student without condition images",
    **dict.fromkeys(CAUSAL[1:], "whose first latent frame must be the condition image"),
}
NOT_STORED = dict.fromkeys(
    ("finetune", "consistency", "rcm", "flow_map"), "clips in parquet files hold no first frames"
)


def with_images(run: settings.RunConfig, prompts) -> settings.RunConfig:
    """The run with a table of the prompts, each with an image, for training and validation."""
    Image.new("RGB", (32, 32)).save(prompts.with_name("image.png"))
    rows = [json.dumps({"prompt": line, "image": "image.png"}) for line in prompts.read_text().split("\n") if line]
    table = prompts.with_suffix(".jsonl")
    table.write_text("\n".join(rows))
    validation = dataclasses.replace(run.validation, prompts=str(table))
    return dataclasses.replace(run, prompts=str(table) if run.prompts else "", validation=validation)


# One causal method stands for all where none is possible.
CELLS = [(recipe, method) for recipe in REAL for method in METHODS]
CELLS = [(recipe, method) for recipe, method in CELLS if recipe not in NEVER_CAUSAL or method not in CAUSAL[1:]]


def is_of_suite(recipe: str, method: str) -> bool:
    """All but most methods of HunyuanVideo, whose check takes seconds."""
    return not recipe.startswith("hunyuan") or method in ("dance_grpo", "finetune", "self_forcing")


@pytest.mark.parametrize(("recipe", "method"), cells(CELLS, always=is_of_suite))
def test_every_method_of_every_recipe_passes_all_checks(models, prompts, recipe, method):
    """It saves and validates as often as its length wants, and a rollout is learnt from in one update."""
    run = parsed(*given(recipe, method, models[recipe], prompts))
    if run.algorithm.needs_clips:
        family, folder = family_of("student", run.roles["student"].path)
        shape = family.latent_shape(folder, run.video.frames, run.video.height, run.video.width)
        images = family.image_tensors(folder, shape).items()
        columns = [tensors(IMAGE_TENSORS[name], [torch.zeros(size)]) for name, size in images]
        write_clips(prompts.with_suffix(".parquet"), torch.zeros(1, *shape), **dict(ChainMap(*columns)))
    if recipe in TAKE_IMAGES:
        run = with_images(run, prompts)
    imageless = IMAGELESS | (NOT_STORED if recipe in NEVER_CAUSAL else {"flow_map": "reads an image as channels"})
    if recipe in TAKE_IMAGES and method in imageless:
        with pytest.raises(ConfigError, match=imageless[method]):
            check(run, ALONE)
        return
    refused = {**dict.fromkeys(CAUSAL, "has no causal form"), "flow_map": "is of a family without flow maps"}
    if recipe == "ltx-2":
        refused |= dict.fromkeys(OF_CLIPS, "learns from clips, whose sound is not read")
    if recipe in NEVER_CAUSAL and method in refused:
        with pytest.raises(ConfigError, match=refused[method]):
            check(run, ALONE)
        return
    for ranks in (8, 42, 64, 320):
        plan = check(run, Mesh(ALONE.device, size=ranks, config=run.parallel.degrees(ranks)))
        notes = [note for note in plan.notes if "repeat within a training step" not in note]
        fitted = [note for note in notes if not note.startswith(f"recipe {recipe}: algorithm.")]
        assert fitted == [] and plan.counts["samples per rank"] * ranks == plan.counts["samples"]
        assert ranks > 8 or (notes == [] and plan.counts["micro-batch"] == getattr(run.algorithm, "update_batch", 1))
        assert [request.text for request in plan.requests] == ([] if method in OF_CLIPS else ["a cat", "a dog"])
    assert 4 <= run.steps / run.checkpoint_every <= 20
    assert 10 <= run.steps / run.validate_every <= 40
    negative = {"qwen-image": " ", "ltx-video": "wors", "ltx-2": "wors"}.get(
        recipe, "色调艳丽"[: 4 * (recipe not in NEVER_CAUSAL)]
    )
    assert run.sampler.negative_prompt[:4] == negative
    if method in ("dance_grpo", "dance_ppo", "diffusion_nft", "awm", "crd", "online_dpo"):
        assert run.algorithm.plan().table(8)["optimizer updates"] == 1
        assert run.algorithm.rollout_batch == run.algorithm.update_batch


@pytest.mark.parametrize("recipe", REAL)
def test_a_real_recipe_names_no_prompts(recipe):
    assert not [name for name, section in settings.load_recipe(recipe).items() if "prompts" in section]


@pytest.mark.parametrize(
    ("method", "ranks", "batch"),
    [
        ("dmd2", 42, {"batch_size": 84}),
        ("dmd2", 320, {"batch_size": 320}),
        ("dance_grpo", 42, {"num_prompts": 63, "prompts_per_update": 63}),
        ("online_dpo", 64, {"num_prompts": 64, "prompts_per_update": 64}),
    ],
)
def test_a_batch_of_the_recipe_gives_way_to_the_ranks_and_a_batch_of_the_user_does_not(
    models, prompts, method, ranks, batch
):
    """The run holds the new batch, which config.yaml then has; a note names both."""
    words = given("wan2.1-1.3b", method, models["wan2.1-1.3b"], prompts)
    run, mesh = parsed(*words), Mesh(ALONE.device, size=ranks, config=ParallelConfig(shard=ranks))
    plan = check(run, mesh)
    assert {name: getattr(plan.run.algorithm, name) for name in batch} == batch
    old, new = (getattr(one.algorithm, next(iter(batch))) for one in (run, plan.run))
    assert plan.notes[0].startswith(f"recipe wan2.1-1.3b: algorithm.{next(iter(batch))} {new} in place of {old}")
    assert plan.notes[0].endswith(f", which {ranks} ranks do not divide")
    own = flags({f"algorithm.{name}": old + 1 for name in batch})
    for refused in (parsed(*words, *own), dataclasses.replace(run, resume=prompts.parent)):
        with pytest.raises(UserError, match=rf"must be divisible by the number of ranks \({ranks}\)"):
            check(refused, mesh)


@pytest.mark.parametrize("recipe", REAL)
def test_a_recipe_fits_the_model_it_was_made_for_and_no_other(models, recipe):
    assert [name for name in models if fits(recipe, "student", str(models[name]))] == [recipe]
    assert not fits("tiny", "student", str(models[recipe])) and fits("tiny", "student", "tiny")


# What is missing is named, and nothing of the tiny world stands in for it.


@pytest.mark.parametrize(
    ("method", "missing"),
    [
        ("dance_grpo", ["--student.path", "--reward.path", "--prompts"]),
        ("diffusion_nft", ["--student.path", "--reward.path", "--prompts"]),
        ("dmd2", ["--student.path", "--prompts"]),
        ("finetune", ["--student.path", "--data.path"]),
    ],
)
def test_a_real_recipe_names_everything_that_is_missing(method, missing):
    with pytest.raises(ConfigError, match=f"--method {method} with recipe wan2.1-1.3b needs ") as caught:
        check(parsed("--recipe", "wan2.1-1.3b", "--method", method), ALONE)
    assert re.findall(r"--[\w.]+(?= \()", str(caught.value)) == missing


@pytest.mark.parametrize("flag", ["--student.path", "--reward.path", "--prompts"])
def test_one_thing_that_is_missing_is_named_alone(models, prompts, flag):
    words = given("wan2.1-1.3b", "dance_grpo", models["wan2.1-1.3b"], prompts)
    at = words.index(flag)
    with pytest.raises(ConfigError, match=rf"wan2\.1-1\.3b needs {flag} \([^,]*\)$"):
        check(parsed(*words[:at], *words[at + 2 :]), ALONE)


def test_everything_that_a_run_lacks_is_named_at_once(models, tmp_path, capsys):
    """What was not given, paths that do not exist, and settings that contradict each other: a line each, once."""
    wrong = {"teacher.path": tmp_path / "teacher", "prompts": tmp_path / "prompts.txt", "sampler.num-steps": 3}
    wrong |= {"validation.prompts": tmp_path / "held.txt", "reward.path": tmp_path / "hpsv3"}
    words = [*flags({"method": "dmd2", "recipe": "wan2.1-1.3b"} | wrong), "--sampler.step-sigmas", "1", "0.5"]
    assert main([*words, "--output", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "error: 6 faults:"
    expected = [
        "--method dmd2 with recipe wan2.1-1.3b needs --student.path (a diffusers pipeline folder)",
        f"teacher.path {tmp_path / 'teacher'} is not there: it must be a diffusers pipeline folder",
        f"{tmp_path / 'hpsv3'}",
        f"--prompts {tmp_path / 'prompts.txt'}: no such file",
        f"--validation.prompts {tmp_path / 'held.txt'}: no such file",
        "sampler.step_sigmas has 2 levels, but sampler.num_steps is 3",
    ]
    for line, start in zip(said[1:], expected, strict=True):
        assert line.startswith(f"- {start}")
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError) as caught:  # the student's folder is given, the rest is as wrong
        check(parsed(*words, "--student.path", models["wan2.1-1.3b"]), ALONE)
    assert str(caught.value).splitlines()[0] == "5 faults:" and len(str(caught.value).splitlines()) == 6


def test_videos_that_cannot_be_used_are_named_with_what_else_a_run_lacks(models, tmp_path):
    """One has no caption, one has fewer frames than a clip; the folder of the student is not there either."""
    videos = tmp_path / "videos"
    videos.mkdir()
    for name, frames in (("whole", 5), ("short", 3), ("mute", 5)):
        write_exactly(videos / f"{name}.mkv", grays(frames), 8)
    for name in ("whole", "short"):
        (videos / f"{name}.txt").write_text("a gray square")
    size = flags({"video.frames": 5, "video.height": 32, "video.width": 32, "video.fps": 8})
    words = ["--method", "finetune", "--recipe", "wan2.1-1.3b", "--data.path", str(videos), *size]
    with pytest.raises(UserError) as caught:
        check(parsed(*words, "--student.path", tmp_path / "model"), ALONE)
    faults = str(caught.value).splitlines()
    assert faults[0] == "2 faults:" and "it must be a diffusers pipeline folder" in faults[1]
    assert "mute.mkv: no caption" in faults[2] and "short.mkv: too short" in faults[2] and "whole" not in faults[2]
    with pytest.raises(VideoError, match=r"mute\.mkv: no caption.*short\.mkv: too short"):  # alone it is one line
        check(parsed(*words, "--student.path", models["wan2.1-1.3b"]), ALONE)


@pytest.mark.parametrize("method", OF_CLIPS)
def test_prompts_are_refused_where_the_captions_of_clips_are_taken(method, prompts):
    with pytest.raises(ConfigError, match=f"--prompts .*: {method} trains on clips and takes their captions"):
        check(parsed("--method", method, "--prompts", prompts), ALONE)
    check(parsed("--method", method, "--validation.prompts", prompts), ALONE)


@pytest.mark.parametrize("method", ["dance_grpo", "dmd2"])
def test_clips_are_refused_where_prompts_are_trained_on(method, tmp_path):
    with pytest.raises(ConfigError, match=f"trains on prompts and would not read it; .* give --prompts {tmp_path} "):
        check(parsed("--method", method, "--data.path", tmp_path), ALONE)


@pytest.mark.parametrize("method", METHODS)
def test_help_lists_what_the_method_reads_alone(method):
    """finetune reads no prompts, dance_grpo no clips, and neither has a guard of distillation."""
    run = parsed("--method", method)
    page = of_method(method_named(method), run, 100, everything=True)
    read = {"--prompts ": method not in OF_CLIPS}
    read |= {"--data.path ": method in (*OF_CLIPS, "dmd2", "self_forcing", "ode_init", "distill_rl")}
    assert {flag: f"\n  {flag}" in page for flag in read} == read


def test_a_best_checkpoint_by_reward_needs_a_reward(models, prompts):
    words = given("wan2.1-1.3b", "dmd2", models["wan2.1-1.3b"], prompts)
    with pytest.raises(ConfigError, match=r"best_metric reward is not measured without a scorer: give --reward\.path"):
        check(parsed(*words, "--keep-best", "1"), ALONE)


def test_a_distillation_without_reward_measures_none(run_folder, prompts, capsys):
    """The tiny model as one's own: its validation has the first training prompts and no reward."""
    words = ["--method", "dmd2", "--recipe", "tiny", "--reward.path", "", "--validation.prompts", ""]
    words += ["--prompts", str(prompts), "--steps", "1", "--algorithm.batch-size", "2", "--output", str(run_folder)]
    assert main([*words, "--validation.num-samples", "2", "--validate-every", "1"]) == 0
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    measured = {name for row in rows for name in row if name.startswith("validation/")}
    assert "validation/pixels/saturation" in measured
    assert "step 1: validation: no reward is measured" in capsys.readouterr().out
    assert not [name for name in measured if "reward" in name or "accuracy" in name]
    assert len(list((run_folder / "validation" / "step_1").glob("*.mp4"))) == 2


def test_nothing_of_the_tiny_world_is_a_default_of_the_code():
    for name in METHODS:
        method = method_named(name)
        run = settings.run_class(method)()
        assert "tiny" not in json.dumps(settings.plain(run)), name
        assert run.reward.named() == {}, name


def test_the_tiny_recipe_is_the_default_without_a_path():
    assert parsed("--method", "dmd2").recipe == parsed("--method", "dmd2", "--teacher.path", "tiny").recipe == "tiny"


@pytest.mark.parametrize("form", ["--{}.path {}", "--{}.path={}"])
@pytest.mark.parametrize("role", ["student", "teacher", "critic"])
def test_a_path_needs_a_recipe_and_is_told_which_fit(models, role, form):
    folder = models["wan2.1-14b"]
    run = parsed("--method", "dmd2", *form.format(role, folder).split())
    with pytest.raises(ConfigError, match=rf"--{role}\.path {folder} needs a recipe: add --recipe wan2\.1-14b, made"):
        check(run, ALONE)


@pytest.mark.parametrize(
    "words", [("preprocess", "clips.txt", "out", "--model"), ("evaluate", "--prompts", "a", "--output", "out")]
)
def test_commands_say_which_recipe_a_model_folder_needs(models, capsys, words):
    folder = str(models["wan2.1-1.3b"])
    assert main([*words[:1], folder, *words[1:]] if words[0] == "evaluate" else [*words, folder]) == 2
    said = capsys.readouterr().err
    assert folder in said and "add --recipe wan2.1-1.3b, made for this model" in said


def test_a_path_in_a_config_file_needs_a_recipe_too(models, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"student: {{path: {models['wan2.1-1.3b']}}}\n")
    with pytest.raises(ConfigError, match=r"add --recipe wan2\.1-1\.3b, made"):
        check(parsed("--config", file, "--method", "dmd2"), ALONE)


def test_a_model_that_no_recipe_fits_is_told_all(tmp_path):
    folder = model_folder(tmp_path / "odd", "wan2.1-1.3b", num_layers=7)
    with pytest.raises(
        ConfigError,
        match=r"Write your own and give --recipe my_recipe\.yaml .* have digits, general-images, .*wan2\.2-ti2v-5b$",
    ):
        check(parsed("--method", "dmd2", "--student.path", folder), ALONE)


def test_a_recipe_for_another_model_is_a_warning(models, prompts):
    words = given("wan2.1-14b", "dmd2", models["wan2.1-1.3b"], prompts)
    note, repeated = check(parsed(*words), ALONE).notes
    assert repeated == "warning: prompts repeat within a training step: it takes 64, and the data have 2"
    assert note.startswith(f"warning: recipe wan2.1-14b was made for another model than {models['wan2.1-1.3b']}")


def test_a_resumed_run_takes_nothing_from_its_recipe_of_today(tmp_path):
    """A setting that is newer than the run has the code's default; --config starts a new run, with the recipe's."""
    saved = settings.plain(parsed("--recipe", "wan2.1-1.3b", "--method", "dmd2"))
    assert saved.pop("encoders")["text_precision"] == "bf16"
    (tmp_path / "config.yaml").write_text(with_checksum(yaml.safe_dump(saved)))
    assert parsed("--resume", tmp_path).encoders == EncoderConfig()
    assert parsed("--config", tmp_path / "config.yaml").encoders.text_precision == "bf16"
    run = parsed("--resume", tmp_path)
    assert settings.check_resumable(run, tmp_path / "config.yaml") == []


def test_a_recipe_inherits_from_its_base():
    base, own = (settings.load_recipe(name) for name in ("wan2.1-1.3b", "wan2.1-14b"))
    assert own["dmd2"]["student"] == base["dmd2"]["student"] | {"learning_rate": 1e-5}
    assert own["common"]["video"] == base["common"]["video"] and own["fits"] != base["fits"]


def test_the_recipe_with_a_window_differs_in_the_window_alone():
    """All 16 places of the window are visited in the recipe's 300 steps."""
    full, window = (
        parsed("--recipe", name, "--method", "dance_grpo")
        for name in ("wan2.1-1.3b", REPO / "examples" / "dance_grpo_window.yaml")
    )
    assert (window.algorithm.window.size, window.algorithm.window.every) == (4, 19)
    assert dataclasses.replace(window.algorithm, window=full.algorithm.window) == full.algorithm
    draw = np.random.default_rng(0)
    places = {window.algorithm.window_at(step, window.sampler, draw).start for step in range(window.steps)}
    assert places == {*range(16)}


def test_the_recipe_of_causvid_has_its_published_values():
    """Of configs/wan_causal_ode.yaml and wan_causal_dmd.yaml; their guidance is cond + s (cond - uncond), s = 3.5."""
    first, second = (
        parsed("--recipe", REPO / "examples" / "causvid.yaml", "--method", name, "--student.path", "x")
        for name in ("ode_init", "dmd2")
    )
    for run in (first, second):
        torch.testing.assert_close(run.sampler.sigmas(), torch.tensor([1.0, 0.757, 0.522, 0.0], dtype=torch.float64))
        assert run.sampler.chunks.chunk_frames == 3 and run.sampler.solver == "sde"
        assert (run.student.learning_rate, run.student.betas, run.student.max_grad_norm) == (2e-6, (0.9, 0.999), 10)
    assert first.steps * 3 == 3000 and first.algorithm.batch_size == 2 * 64
    assert (first.algorithm.guidance_scale, first.algorithm.teacher_steps, first.algorithm.teacher_shift) == (6, 50, 8)
    assert (second.algorithm.guidance_scale, second.algorithm.tau_shift, second.algorithm.student_every) == (4.5, 8, 5)
    assert second.algorithm.rollout == "data" and second.critic.learning_rate == 2e-6


@pytest.mark.parametrize("recipe", [*TAKE_IMAGES, "ltx-video", "ltx-2"])
def test_a_gradient_of_a_reward_sees_the_first_the_middle_and_the_last_frame(recipe):
    run = parsed("--recipe", recipe, "--method", "reward_gradient")
    frames = run.video.frames
    assert [*range(0, frames, run.reward.stride(frames))] == [0, frames // 2, frames - 1]
