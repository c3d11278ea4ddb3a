"""The command preprocess: it encodes videos with captions, or prompts, to FastVideo's parquet files."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from torch import Tensor

from unified_trainer.basics.actions import ACTIONS
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import read_yaml
from unified_trainer.basics.ranges import Count, NonNegative, Seed
from unified_trainer.basics.requests import Image
from unified_trainer.basics.terminal import say
from unified_trainer.data import fastvideo
from unified_trainer.data.buckets import sizes_of
from unified_trainer.data.captioned import CaptionedVideo, find_videos, left_out
from unified_trainer.data.clips import VideoConfig
from unified_trainer.data.fastvideo import I2V, T2V, TEXT_ONLY, image_columns, t2v_row, text_of, with_text
from unified_trainer.data.media import DamagedError, Facts, VideoError, summary
from unified_trainer.data.negative_prompt import use_negative_prompt, write_negative_prompt
from unified_trainer.data.prompts import PromptFile, read_prompts
from unified_trainer.data.video_reader import read_clips, to_video
from unified_trainer.models.base import Codec, ImageEncoder
from unified_trainer.models.hub import is_hub_id
from unified_trainer.models.prompt_lengths import cut_in_words
from unified_trainer.parallel.device import Device
from unified_trainer.parallel.mesh import Mesh, ParallelConfig
from unified_trainer.run.checkpoint.run_lock import claimed
from unified_trainer.run.plan.data import check_sound, check_video
from unified_trainer.run.plan.downloads import fetch_pipeline
from unified_trainer.run.plan.plan import bucket_shapes
from unified_trainer.run.registry import family_of
from unified_trainer.run.settings.command_line import parse
from unified_trainer.run.settings.config import ConfigError, RunConfig
from unified_trainer.run.settings.fitting import recipe_to_add
from unified_trainer.run.settings.settings import RunFlags
from unified_trainer.tools.output_folder import begin_output, check_output
from unified_trainer.tools.prepare.clip_folder import ABOUT, SKIPPED, WHAT, ClipFolder, add_row, is_empty, summarise
from unified_trainer.tools.prepare.sample_pairs import write_pairs
from unified_trainer.tools.prepare.teacher_trajectories import write_trajectories
from unified_trainer.tools.progress import ItemProgress

VERSION = 1
TEXTS = 64  # captions that are encoded at a time


def preprocess(
    source: Annotated[Path, tyro.conf.Positional],
    out: Annotated[Path, tyro.conf.Positional],
    captions: Path | None = None,
    recipe: str = "",
    config: Path | None = None,
    method: str = "",
    model: str = "",
    families: tuple[str, ...] = (),
    rows_per_file: Count = 64,
    workers: Count = 4,
    strict: bool = False,
    trajectories: bool = False,
    every_state: bool = False,
    seed: Seed = 0,
    pairs: str = "",
    least_difference: NonNegative = 0.0,
    device: Device = "auto",
    *,
    settings: RunFlags = (),
) -> None:
    """Encode videos with captions, or prompts, to parquet files to train on; called again, it continues.

    Flags with a dot, such as --video.frames or --teacher.path, are settings of the run and come after SOURCE and OUT.

    Args:
        source: Folder of videos with x.txt beside x.mp4; or a .json, .jsonl, .csv or .parquet file with columns path
            and caption; or a .txt file with one prompt per line, which makes files of text embeddings; or, with
            --pairs, a folder of the command rollout.
        out: Folder to write; it must be empty, absent or written by this command with equal settings.
        captions: Table with the captions of the folder's videos, instead of text files; its paths are below the folder.
        recipe: Recipe whose video size, precisions and negative prompt are used; by default tiny, without a model.
        config: Saved config.yaml, or one with a few settings, that changes those of the recipe.
        method: Method whose section of the recipe is used, unless the config names one; by default finetune, or
            ode_init with --trajectories.
        model: Pipeline folder or hub id whose text encoder and VAE are used.
        families: Model families of your own, each path/to/file.py:NAME or package.module:NAME.
        rows_per_file: Clips or prompts in one parquet file.
        workers: Videos decoded at a time.
        strict: End at the first video that cannot be used, instead of listing and skipping it.
        trajectories: Write the states of the teacher's ODE from SOURCE, a file of prompts, that ode_init trains on.
            The teacher is --teacher.path or --model; settings such as --sampler.num-steps,
            --algorithm.guidance-scale, --algorithm.teacher-steps and --algorithm.teacher-shift are those of the run.
        every_state: With --trajectories, write the states of all steps of the teacher, for students of other levels.
        seed: Seed of the noise that trajectories start from.
        pairs: Name of scores in SOURCE, a folder of the command rollout: write the best and the worst sample of each
            prompt to OUT/preferred and OUT/rejected, which flow_dpo trains on.
        least_difference: With --pairs, leave out prompts whose best and worst rewards differ by less.
        device: Device to run on.
        settings: Flags with a dot and their values, one word each.
    """
    if captions and not source.is_dir():
        raise UserError(f"--captions is for a folder of videos, but SOURCE {source} is none: leave it out")
    if (every_state or seed) and not trajectories:
        raise UserError("--every-state and --seed are for trajectories of a teacher: add --trajectories")
    if pairs and (captions or trajectories):
        raise UserError("--pairs is for samples of the command rollout: leave --captions and --trajectories out")
    if least_difference and not pairs:
        raise UserError("--least-difference is for pairs of samples: add --pairs NAME")
    method = method or ("ode_init" if trajectories else "finetune")
    own = ("--families", *families) if families else ()
    run = _settings(recipe, config, method, model, [*own, *settings])
    if run.data.buckets and (trajectories or pairs or source.suffix == ".txt"):
        raise UserError("--data.buckets is for videos alone: leave it out")
    mesh = _one_process(device, run.parallel)
    if trajectories:
        run = replace(run, seed=seed)
        write_trajectories(run, source, out, mesh, every_state=every_state, rows_per_file=rows_per_file)
        return
    path = run.roles["student"].path
    family, folder = family_of("--model", fetch_pipeline(path, "--model") if is_hub_id(path) else path)
    check_video(run, family)
    run.encoders.check(mesh.device.type)
    if pairs:
        check_sound(run, family, folder)
        codec = family.codec(folder, mesh.device, run.encoders)
        write_pairs(source, pairs, least_difference, out, codec, rows_per_file)
        return
    shape = next(iter(bucket_shapes(run, family, folder).values()))
    kind, schema = ("i2v", I2V) if family.image_tensors(folder, shape) else ("t2v", T2V)
    file = read_prompts(source, "SOURCE") if source.suffix == ".txt" else PromptFile(())
    videos = () if file.requests else find_videos(source, "SOURCE", captions, run.data.columns)
    if kind == "i2v" and any(video.conditions for video in videos):
        raise UserError(f"SOURCE {source}: encoded clips hold their first frames: leave the column condition out")
    texts = [*zip(file.places, file.prompts, strict=True), *(row for video in videos for row in video.rows)]
    check_output(out, ABOUT, WHAT)
    with claimed(out, mesh) as note:
        if note:
            say(note)
        codec = family.codec(folder, mesh.device, run.encoders)
        negative = run.sampler.negative_prompt
        about = {"version": VERSION, "kind": kind if videos else "text_only", "negative_prompt": negative}
        about["text_encoder"] = codec.text_fingerprint
        if videos:
            about["vae"] = codec.video_fingerprint
            about |= {f"video.{name}": value for name, value in vars(run.video).items()}
            about |= {"data.buckets": [*run.data.buckets]} if run.data.buckets else {}
        acted = {bool(video.actions) for video in videos if not video.fault}
        if len(acted) > 1:
            raise UserError(f"SOURCE {source}: some videos have {ACTIONS} and others none: give all of them, or none")
        schema = fastvideo.with_actions(schema) if True in acted else schema
        begin_output(out, ABOUT, about, WHAT, empty=is_empty(out))
        written = ClipFolder(out, with_text(schema if videos else TEXT_ONLY, codec), rows_per_file)
        if not use_negative_prompt(out, negative, codec):
            write_negative_prompt(out, negative, codec)
        cut = cut_in_words(codec.cut, [text for _, text in texts], lambda i: texts[i][0], "the text encoder")
        for note in filter(None, (left_out(source), cut)):
            say(note)
        if videos:
            _write_videos(videos, written, codec, run, workers, strict, out, images=kind == "i2v")
        else:
            _write_prompts(file.prompts, written, codec, out)


def _one_process(device: Device, parallel: ParallelConfig) -> Mesh:
    mesh = Mesh.join(device, ParallelConfig(attention=parallel.attention, tf32=parallel.tf32))
    if mesh.size > 1:
        raise UserError("preprocess is one process: give each of several a source of its own and a folder in OUT")
    return mesh


def _settings(recipe: str, config: Path | None, method: str, model: str, settings: Sequence[str]) -> RunConfig:
    """Return the run whose clips are encoded; ConfigError for a model without a recipe."""
    given = {"--recipe": recipe, "--config": str(config or ""), "--student.path": model}
    named = config is not None and config.is_file() and "method" in read_yaml(config)
    words = [word for flag, value in given.items() if value for word in (flag, value)]
    run = parse([*words, *([] if named else ["--method", method]), *settings])
    path = run.roles["student"].path
    if not run.recipe and path and not is_hub_id(path) and (fitting := recipe_to_add("--model", path)):
        raise ConfigError(f"preprocess --model {path} needs a recipe: {fitting}")
    if not run.recipe or not path:
        raise ConfigError("preprocess needs --model, a diffusers pipeline folder, with a --recipe made for it")
    return run


def _write_videos(
    videos: Sequence[CaptionedVideo],
    written: ClipFolder,
    codec: Codec,
    run: RunConfig,
    workers: int,
    strict: bool,
    out: Path,
    *,
    images: bool,
) -> None:
    done = written.captions()
    for name, caption in (row for video in videos for row in video.rows):
        if done.get(name, caption) != caption:
            raise UserError(f"{out} holds {name} with another caption: choose another folder, or remove it")
    left = [video for video in videos if not video.rows or any(name not in done for name, _ in video.rows)]
    new, skipped, facts, damaged = 0, dict[str, str](), list[Facts](), 0
    sizes, fps = sizes_of(run.data, run.video), run.video.fps
    size = " or ".join(f"{size.frames} frames of {size.height} x {size.width}" for size in sizes)
    with ItemProgress("videos", sum(len(video.rows) or 1 for video in left)) as progress:
        progress.say(
            f"{len(left)} videos to encode, {len(videos) - len(left)} done before: {size} at {fps:g} per second"
        )
        try:
            for number, (video, clip) in enumerate(read_clips(left, sizes, workers)):
                if number % TEXTS == 0:
                    captions = [caption for one in left[number : number + TEXTS] for caption in one.captions]
                    prompts = dict(zip(captions, codec.prompts(captions), strict=True))
                if isinstance(clip, VideoError):
                    if strict:
                        raise clip
                    skipped[video.name] = str(clip).removeprefix(f"{video.file}: ")
                    damaged += isinstance(clip, DamagedError)
                    progress.advance()
                    progress.note(f"skipped {clip}")
                    continue
                facts.append(clip.facts)
                raw = codec.encode_raw(to_video(clip.frames))[0]
                frames, height, width, _ = clip.frames.shape
                made = VideoConfig(frames, height, width, fps)
                for name, caption in video.rows:
                    if name not in done:
                        row = t2v_row(name, caption, raw, made) | text_of(prompts[caption], codec)
                        row |= fastvideo.action_columns(video.actions) if video.actions else {}
                        add_row(written, row | (_image(clip.frames, raw, codec) if images else {}), progress)
                        new += 1
        finally:
            written.finish()
            written.write_skipped(skipped)
        if not done and not new:
            raise UserError(f"none of the {len(videos)} videos could be used: {out / SKIPPED} says why")
        counted = summary(facts, damaged, len(skipped) - damaged) + (f" ({SKIPPED})" if skipped else "")
        summarise(progress, len(done) + new, "clip", out, new, f"{counted}; ")


def _image(clip: np.ndarray, raw: Tensor, codec: Codec) -> dict[str, object]:
    """Return the columns of the first frame of a clip, a condition image."""
    assert isinstance(codec, ImageEncoder)  # of a family with `image_tensors`
    return image_columns(codec.encode_images([(Image.of(clip[0].copy()),)], tuple(raw.shape)))


def _write_prompts(prompts: Sequence[str], written: ClipFolder, codec: Codec, out: Path) -> None:
    done = set(written.captions().values())
    left = [prompt for prompt in prompts if prompt not in done]
    with ItemProgress("prompts", len(left)) as progress:
        try:
            for prompt in left:
                row = {"id": f"text_{hashlib.sha256(prompt.encode()).hexdigest()[:16]}", "caption": prompt}
                add_row(written, row | text_of(codec.prompts([prompt])[0], codec, padded=True), progress)
        finally:
            written.finish()
        summarise(progress, len(done) + len(left), "prompt", out, len(left))
