"""The command evaluate: it compares checkpoints on the same prompts and noise, and counts votes of people."""

import dataclasses
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import check_file
from unified_trainer.basics.plugins import agree_to_scorer
from unified_trainer.basics.ranges import Count, Fraction, NonNegative, Seed, at_least
from unified_trainer.basics.requests import Request
from unified_trainer.basics.terminal import say
from unified_trainer.data.tiny_world import is_tiny_world
from unified_trainer.data.tiny_world_features import world_features
from unified_trainer.models.base import Codec
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.parallel.device import Device, fitting
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.rewards.base import RewardConfig, ScorerConfig
from unified_trainer.rewards.reward import VideoReward
from unified_trainer.rewards.scorers import check_of_videos, check_prompts, check_reward, load_scorers, scorer_kind
from unified_trainer.run.settings.command_line import read_reward
from unified_trainer.run.settings.flags import split
from unified_trainer.run.settings.settings import RunFlags
from unified_trainer.run.validation.distances import WORLD_FRECHET, check_real, video_features
from unified_trainer.tools.evaluate import files, pages, vote_count
from unified_trainer.tools.evaluate.checkpoints import Checkpoint, read_checkpoints
from unified_trainer.tools.evaluate.measures import BootstrapConfig, print_summary, summarise
from unified_trainer.tools.evaluate.plan import NOISE_STEP, Plan
from unified_trainer.tools.evaluate.samples import Measured, folder_of, measure, read_measured
from unified_trainer.tools.progress import ItemProgress
from unified_trainer.tools.report.page import MEGABYTE, VIDEO_MEGABYTES
from unified_trainer.tools.sample.sample import check_images, of_prompts, read_lines


def evaluate(
    checkpoints: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    output: Path = Path("evaluation"),
    prompts: tuple[str, ...] = (),
    samples: Count = 1,
    seeds: tuple[Annotated[int, at_least(0, 4000)], ...] = (0,),
    batch: Count = 8,
    reward: Path | None = None,
    held_out: tuple[str, ...] = (),
    frechet_to: str = "",
    frechet_stride: Count = 4,
    real_clips: str = "",
    i3d: str = "",
    resamples: Count = 10_000,
    bootstrap_seed: Seed = 0,
    confidence: Fraction = 0.95,
    num_videos: Count = 1,
    prompt_names: bool = False,
    video_megabytes: NonNegative = VIDEO_MEGABYTES,
    vote_seed: Seed = 0,
    votes: tuple[Path, ...] = (),
    recipe: str = "",
    device: Device = "auto",
    *,
    settings: RunFlags = (),
) -> None:
    """Compare checkpoints on the same prompts and noise: scores, differences with intervals, pages to look at and vote.

    Flags with a dot, such as --sampler.num-steps or --reward.scorers.clip.path, change settings of all checkpoints and
    come after CHECKPOINTS. Called again, it uses samples of finished checkpoints that fit.

    Args:
        checkpoints: RUN[@STEP], RUN@best or RUN@latest, with :ema for the EMA weights; or a model folder or tiny. A
            checkpoint may have settings of the sampler: RUN,num_steps=8,solver=ode. Differences are to the first one.
        output: Folder to write: evaluation.html, votes.html, evaluation.json, samples.csv, measures.csv,
            differences.csv and the videos; it must be empty, absent or written by this command.
        prompts: Prompts, or files with one prompt per line, or tables, whose column image students of images read.
        samples: Samples of each prompt and seed; two or more measure the diversity within a prompt.
        seeds: Seeds of the noise, which is that of rollout with 1000000 times the seed.
        batch: Samples generated at a time.
        reward: YAML file with a section reward, as in a recipe; by default the reward of the first run that has one.
        held_out: Further scorers by kind, which are measured and not in the reward; flags such as
            --reward.scorers.clip.path have their settings.
        frechet_to: Checkpoint of the list to whose samples the Frechet distances are measured, such as the teacher; by
            default to real clips.
        frechet_stride: Frames between two that enter the Frechet distance of image features.
        real_clips: Folder of real videos, at least as many as the samples of a seed; without it the distances to real
            clips are measured in the tiny world only.
        i3d: TorchScript file of I3D, such as StyleGAN-V's i3d_torchscript.pt, which measures FVD.
        resamples: Resamples of the prompts for the intervals.
        bootstrap_seed: Seed of the resampling.
        confidence: Confidence of the intervals.
        num_videos: Samples of each prompt and seed that are also written as videos.
        prompt_names: Write all samples, as videos/PROMPT-INDEX.mp4 in the folder of each checkpoint below
            OUTPUT/samples: VBench's program runs on it, made with --samples 5 for its prompts.
        video_megabytes: Megabytes of videos in each page; later samples do not fit.
        vote_seed: Seed of the order of videos in votes.html.
        votes: Files of votes that votes.html saved: count them instead, for the evaluation in the output folder.
        recipe: Recipe with sampler and video size of model folders; by default they have those of the first run.
        settings: Flags with a dot and their values, one word each.
    """
    if votes:
        vote_count.count(output, votes, confidence)
        return
    if any(name.startswith("--reward.") for name, _ in split(settings)) and reward is not None:
        raise UserError("--reward FILE has all settings of the reward: leave the flags --reward.... out")
    chosen = read_checkpoints(checkpoints, settings, recipe)
    if not seeds or len({*seeds}) < len(seeds):
        raise UserError(f"--seeds {' '.join(map(str, seeds))}: name one or more seeds, each once")
    lines = _distinct(prompts, images=max(one.run.video.fps * bool(one.images[1]) for one in chosen))
    written = samples if prompt_names else min(num_videos, samples)
    plan = Plan(lines, samples, seeds, batch, written, frechet_stride, i3d, real_clips, prompt_names)
    rewards = common_reward(chosen, reward, held_out)
    _check(chosen, plan, rewards)
    reference = _reference(chosen, checkpoints, frechet_to, plan, rewards)
    config = BootstrapConfig(resamples, bootstrap_seed, confidence)
    if not 0 < confidence < 1:
        raise UserError(f"--confidence must be above 0 and below 1, not {confidence:g}")
    mesh = Mesh.join(device)
    files.begin(output)
    with fitting(f"a batch of {min(batch, plan.size)} samples", "lower --batch"):
        rows = _measured(output, chosen, plan, rewards, mesh)
    others = [row.real if reference is None else rows[reference].features for row in rows]
    summary = summarise(rows, plan, config, others)
    to = "" if not others[0] else "real clips" if reference is None else chosen[reference].name
    about = files.write(output, chosen, rows, plan, config, summary, to)
    shown = pages.write(output, about, rows, plan.prompts, int(video_megabytes * MEGABYTE), vote_seed)
    print_summary(summary, [checkpoint.name for checkpoint in chosen])
    say(f"{output}: {plan.size * len(plan.seeds)} samples of each of {len(chosen)} checkpoints; {shown}")


def _distinct(prompts: Sequence[str], *, images: float) -> tuple[str, ...]:
    if not prompts:
        raise UserError("evaluate needs --prompts: texts, or a file with one prompt per line")
    lines = read_lines(prompts, images=images)
    if any(line.actions for line in lines):
        raise UserError("evaluate reads no actions: write samples with the command sample, which takes them")
    distinct = tuple(dict.fromkeys(lines))
    if repeated := len(lines) - len(distinct):
        say(f"prompts that occur again are left out: {repeated} of {len(lines)}; --samples makes more of each")
    return tuple(request.prompt for request in distinct)


def _check(chosen: Sequence[Checkpoint], plan: Plan, rewards: RewardConfig) -> None:
    """Raise UserError for what cannot be compared or scored; no weight is read."""
    if len(plan.seeds) > 1 and plan.size > NOISE_STEP:
        raise UserError(
            f"{len(plan.prompts)} prompts x --samples {plan.samples} are {plan.size} samples of a seed, and --seeds "
            f"share noise from {NOISE_STEP} samples on: lower --samples, or take one seed"
        )
    if plan.prompt_names:
        of_prompts([line for line in Request.of(plan.prompts) for _ in range(plan.samples)], plan.samples)
    videos = [checkpoint.run.video for checkpoint in chosen]
    shapes = [(one.check(), video.frames, video.height, video.width) for one, video in zip(chosen, videos, strict=True)]
    for checkpoint in chosen:
        way_out = "give a table of prompts with a column image" if checkpoint.images[0] else "evaluate it without them"
        check_images(checkpoint.name, checkpoint.images, Request.of(plan.prompts), way_out)
    for checkpoint, shape in zip(chosen, shapes, strict=True):
        if shape != shapes[0]:
            sizes = [f"{frames} x {height} x {width}" for _, frames, height, width in (shapes[0], shape)]
            raise UserError(
                f"{checkpoint.name} makes videos of {sizes[1]} (frames, height, width) and latents {shape[0]}, "
                f"{chosen[0].name} of {sizes[0]} and {shapes[0][0]}: the noise of both cannot be the same"
            )
    check_reward(rewards, videos[0].frames)
    check_of_videos(rewards)
    for note in check_prompts(rewards, (plan.prompts, lambda number: f"--prompts: prompt {number + 1}")):
        say(note)


def _reference(
    chosen: Sequence[Checkpoint], texts: Sequence[str], wanted: str, plan: Plan, rewards: RewardConfig
) -> int | None:
    """Return the position of the checkpoint that --frechet-to names; UserError if nothing measures the distance."""
    video = chosen[0].run.video
    if plan.i3d:
        check_file(Path(plan.i3d), "--i3d")
        if not (wanted or plan.real_clips or is_tiny_world((video.frames, video.height, video.width), plan.prompts)):
            raise UserError(f"--i3d {plan.i3d}: compare with --real-clips DIR, or with a checkpoint by --frechet-to")
    if plan.real_clips:
        if wanted:
            raise UserError(f"--frechet-to {wanted} and --real-clips {plan.real_clips}: leave one of them out")
        check_real(plan.real_clips, "--real-clips", video, plan.size, "a seed")
    if not wanted:
        return None
    matches = [i for i, checkpoint in enumerate(chosen) if wanted in (texts[i], checkpoint.name)]
    if not matches:
        raise UserError(f"--frechet-to {wanted} is none of the checkpoints; have {', '.join(texts)}")
    named = rewards.named().items()
    if not plan.i3d and not any(scorer_kind(part, rewards.key(name), rewards.timeout).features for name, part in named):
        raise UserError(
            f"--frechet-to {wanted} needs a scorer with image features: add --held-out clip with its "
            "--reward.scorers.clip.path, or --i3d"
        )
    return matches[0]


def _measured(
    output: Path, chosen: Sequence[Checkpoint], plan: Plan, rewards: RewardConfig, mesh: Mesh
) -> list[Measured]:
    """Measure every checkpoint, one model in memory at a time; samples that are there already are used."""
    places = [folder_of(output / files.SAMPLES, checkpoint, plan, rewards, mesh.device.type) for checkpoint in chosen]
    rows = [read_measured(place) for place in places]
    missing = [i for i, row in enumerate(rows) if row is None]
    scorers, of_images = load_scorers(rewards, mesh.device) if missing else ({}, None)
    i3d, video = plan.i3d if missing else "", chosen[0].run.video
    features = video_features(of_images, plan.frechet_stride, i3d, "--i3d", video, plan.batch, mesh.device)
    if is_tiny_world((video.frames, video.height, video.width), plan.prompts):
        features[WORLD_FRECHET] = world_features
    last: dict[tuple[Path, EncoderConfig], Codec] = {}

    def measured(checkpoint: Checkpoint, place: Path) -> Measured:
        """Measure one checkpoint; the last codec is kept, because checkpoints of one base share its prompts."""
        loaded = checkpoint.load(mesh)
        key = loaded.base, loaded.run.encoders
        if key not in last:
            last.clear()  # one at a time in memory
            last[key] = loaded.codec()
        return measure(
            place, checkpoint, loaded, last[key], plan, VideoReward(scorers, rewards), features, progress.advance
        )

    with ItemProgress("batches", len(missing) * len(list(plan.parts()))) as progress:
        for i in missing:
            progress.note(chosen[i].name)
            rows[i] = measured(chosen[i], places[i])
            gc.collect()
    return [row for row in rows if row is not None]


def common_reward(checkpoints: Sequence[Checkpoint], file: Path | None, held_out: Sequence[str]) -> RewardConfig:
    """Return the reward of the file, or of the first checkpoint that has one, and the scorers that are held out.

    Scorers that only other checkpoints have are held out too. Raise UserError if two of one name differ in more than
    their weight, or for a scorer of `held_out` that is the reward's only one.
    """
    if file is not None:
        reward = read_reward(file)
    else:
        configs = [checkpoint.run.reward for checkpoint in checkpoints]
        reward = next((checkpoint for checkpoint in configs if checkpoint.named()), configs[0])
        for checkpoint in checkpoints:
            for name, part in checkpoint.run.reward.named().items():
                have, held = reward.named().get(name), dataclasses.replace(part, weight=0.0)
                if have is None:
                    reward = dataclasses.replace(reward, scorers=reward.scorers | {name: held})
                elif dataclasses.replace(have, weight=0.0) != held:
                    raise UserError(
                        f"{checkpoint.name} has other settings of the scorer {name} than a checkpoint before it: give "
                        "those of all with --reward FILE, a YAML file with a section reward"
                    )
    for kind in held_out:
        name = kind.rpartition(":")[2]
        agree_to_scorer(kind, f"reward.scorers.{name}.kind")
        if name == reward.first:
            raise UserError(f"--held-out {kind}: it is the first scorer of the reward, reward.kind; leave it out")
        part = reward.scorers.get(name) or ScorerConfig(kind=kind)
        if name not in reward.scorers and scorer_kind(part, f"--held-out {kind}", reward.timeout).min_frames > 1:
            part = dataclasses.replace(part, frames="all")  # one frame is too few for it
        part = dataclasses.replace(part, kind=part.kind or kind, weight=0.0)
        reward = dataclasses.replace(reward, scorers=reward.scorers | {name: part})
    reward.check()
    return reward
