"""The commands rollout and score: samples of a run without training, and their scores by one reward or more."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import tyro

from unified_trainer.basics.errors import UserError, writing
from unified_trainer.basics.ranges import Count, CountOrZero, Seed
from unified_trainer.basics.terminal import say
from unified_trainer.basics.types import Video
from unified_trainer.data.video_files import file_name, to_uint8, write_clip
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.parallel.device import Device, fitting
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.rewards.latents import reward_of
from unified_trainer.rewards.scorers import check_prompts, check_reward, load_scorers
from unified_trainer.run.registry import add_families, family_of
from unified_trainer.run.settings import config as settings
from unified_trainer.run.settings.command_line import read_reward
from unified_trainer.tools.load_run import load_role
from unified_trainer.tools.sample.latents import draw_latents
from unified_trainer.tools.sample.rollout_folder import RolloutFolder
from unified_trainer.tools.sample.sample import check_actions, read_lines, with_images


def rollout(
    run: Annotated[str, tyro.conf.Positional],
    prompts: tuple[str, ...],
    output: Path,
    num_samples: Count = 1,
    seed: Seed = 0,
    batch: Count = 8,
    num_videos: CountOrZero = 0,
    name: str = "run",
    reward: Path | None = None,
    device: Device = "auto",
    base: Path | None = None,
    families: tuple[str, ...] = (),
) -> None:
    """Write samples of the student, generated with the run's sampler, and their rewards; called again, it continues.

    Args:
        prompts: Prompts, or files with one prompt per line.
        output: Folder to write: rollout.json, latents/N.safetensors, scores/NAME.jsonl; it must be empty, absent or
            written by this command.
        num_samples: Samples of each prompt.
        seed: Seed of the first sample's noise; sample i has seed + i.
        batch: Samples generated at a time, and in one file.
        num_videos: Number of samples that are also written as videos/N.mp4, or N.png of images.
        name: Name of these scores; the command score adds more under other names.
        reward: YAML file with a section reward, as in a recipe; by default the reward of the run.
    """
    requests = read_lines(prompts)
    loaded = load_role(run, "student", base, Mesh.join(device), causal=True, families=families)
    requests = with_images(loaded, prompts, requests)
    check_actions(loaded.name, loaded.actions, loaded.run.video.frames, requests)
    lines = [request.text for request in requests]
    rewards = read_reward(reward) if reward else loaded.run.reward
    if not rewards.named():
        raise UserError(f"{run} was trained without a reward: give one with --reward FILE")
    check_reward(rewards, loaded.run.video.frames)
    for note in check_prompts(rewards, (lines, lambda number: f"--prompts: prompt {number + 1}")):
        say(note)
    plain = settings.plain(loaded.run)
    size = {key: plain["video"][key] for key in ("frames", "height", "width")}
    about = {"run": run, "step": loaded.metadata["step"], "method": loaded.metadata["method"], "base": str(loaded.base)}
    about |= {"families": list(loaded.run.families)} if loaded.run.families else {}
    about |= {"sampler": plain["sampler"], "video": size, "seed": seed, "num_samples": num_samples}
    if any(request.negative for request in requests):
        about |= {"negative_prompts": [request.negative for request in requests]}
    if any(request.images for request in requests):
        about |= {"images": [[image.sha256 for image in request.images] for request in requests]}
        files = [request.files.get("images", []) for request in requests]
        about |= {"image_files": [[str(Path(file).resolve()) for file in names] for names in files]}
    if loaded.actions:
        about |= {"actions": [request.actions.sha256 for request in requests]}
    folder = RolloutFolder.begin(output, about | {"batch": batch, "prompts": lines})
    codec = loaded.codec()
    samples = [request for request in requests for _ in range(num_samples)]
    drawn = 0
    with fitting(f"a batch of {len(folder.parts[0])} samples", "lower --batch, with another --output"):
        for part, numbers in enumerate(folder.parts):
            if not folder.file(part).is_file():
                part_of = [samples[i] for i in numbers]
                folder.write(part, draw_latents(loaded, codec, part_of, [seed + i for i in numbers]))
                drawn += len(numbers)
        scorers, _ = load_scorers(rewards, loaded.role.device)
        on_video = _videos(output, num_videos, loaded.run.video.fps)
        mean = folder.score(name, reward_of(scorers, codec, rewards), codec, loaded.role.device, on_video)
    say(f"{len(samples)} samples in {output}, {drawn} of them new, mean reward {mean:.4g}: {loaded.said}")


def _videos(output: Path, count: int, fps: float) -> Callable[[range, Video], None]:
    """Return a function that writes the first `count` of the videos it is given."""

    def write(numbers: range, video: Video) -> None:
        for number, frames in zip(numbers, to_uint8(video), strict=True):
            if number < count:
                with writing(output / "videos"):
                    (output / "videos").mkdir(exist_ok=True)
                    write_clip(frames, output / "videos" / file_name(number, len(frames)), fps)

    return write


def score(
    folder: Annotated[Path, tyro.conf.Positional],
    reward: Path,
    name: str,
    device: Device = "auto",
    base: Path | None = None,
) -> None:
    """Add the scores of another reward to a folder that the command rollout wrote; called again, it continues.

    Only such a folder: it holds latents and their prompts. Videos in mp4 files are not scored.

    Args:
        folder: Folder that the command rollout wrote.
        reward: YAML file with a section reward, as in a recipe.
        name: Name of the scores in scores/NAME.jsonl, which must be absent or of this reward.
        base: Pipeline folder whose VAE decodes the latents, if it is no longer where the rollouts found it.
    """
    rollouts, rewards = RolloutFolder.read(folder), read_reward(reward)
    check_reward(rewards, rollouts.about["video"]["frames"])
    mesh = Mesh.join(device)
    add_families(rollouts.about.get("families", ()))
    family, path = family_of("--base", str(base or rollouts.about["base"]))
    codec = family.codec(path, mesh.device, EncoderConfig())
    scorers, _ = load_scorers(rewards, mesh.device)
    with fitting(f"a batch of {len(rollouts.parts[0])} samples", "call rollout with a lower --batch"):
        mean = rollouts.score(name, reward_of(scorers, codec, rewards), codec, mesh.device)
    say(f"{len(rollouts.samples)} samples in {folder / 'scores' / name}.jsonl, mean reward {mean:.4g}")
