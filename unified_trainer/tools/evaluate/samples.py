"""The samples of one checkpoint: generated, scored and measured, and kept in a folder that is used again if it fits.

CHECKPOINT-KEY/measured.json         what the samples depend on (its hash is KEY), their scores, the speed
CHECKPOINT-KEY/features.safetensors  thumbnails, and features of frames of the samples and of real clips
CHECKPOINT-KEY/SEED-PROMPT-SAMPLE.mp4 or .png, or videos/PROMPT-INDEX.mp4 with --prompt-names
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from unified_trainer.basics.errors import writing
from unified_trainer.basics.input_files import read_json
from unified_trainer.basics.requests import Request, identity_of
from unified_trainer.basics.types import Video
from unified_trainer.data.tiny_world import is_tiny_world, real_clip, render
from unified_trainer.data.tiny_world_measures import exact_measures
from unified_trainer.data.video_files import file_name, to_uint8, write_clip
from unified_trainer.models.base import Codec
from unified_trainer.models.tensor_file import write_tensors
from unified_trainer.rewards.base import RewardConfig
from unified_trainer.rewards.pixels import statistics, thumbnail
from unified_trainer.rewards.reward import VideoReward
from unified_trainer.run.settings.config import plain
from unified_trainer.run.validation.distances import FEATURES, REAL, VideoFeatures, read_real, with_prefix
from unified_trainer.sampling.solver import SamplerConfig
from unified_trainer.tools.evaluate.checkpoints import Checkpoint
from unified_trainer.tools.evaluate.plan import Plan, noise_number
from unified_trainer.tools.load_run import LoadedRole
from unified_trainer.tools.output_folder import write_text
from unified_trainer.tools.sample.latents import draw_latents

VERSION = 4
FILE, TENSORS = "measured.json", "features.safetensors"


@dataclass(frozen=True)
class Measured:
    """The samples of one checkpoint with their scores, seed by seed and prompt by prompt."""

    folder: Path
    # of every sample: seed, prompt, sample, noise, reward, scores, pixels, accuracy, drawn, world, video
    rows: list[dict[str, Any]]
    seconds: list[float]  # generation of one sample, for each batch
    calls: int  # network calls of a sample
    tensors: dict[str, Tensor] = field(repr=False)  # thumbnails; features of samples and of real clips, by distance

    @property
    def features(self) -> dict[str, Tensor]:
        """The features of the samples, [seeds x samples, k, d], by the name of the distance."""
        return with_prefix(self.tensors, FEATURES)

    @property
    def real(self) -> dict[str, Tensor]:
        """The features of as many real clips."""
        return with_prefix(self.tensors, REAL)


def folder_of(root: Path, checkpoint: Checkpoint, plan: Plan, reward: RewardConfig, device: str) -> Path:
    """Return the folder of a checkpoint's samples, whose name holds a hash of all that they depend on."""
    key = hashlib.blake2b(json.dumps(_key(checkpoint, plan, reward, device), sort_keys=True).encode(), digest_size=4)
    return root / f"{re.sub(r'[^A-Za-z0-9.=@_-]+', '_', checkpoint.name)}-{key.hexdigest()}"


def read_measured(folder: Path) -> Measured | None:
    """Return what was measured, if the folder is complete: its file is written last."""
    if not (folder / FILE).is_file():
        return None
    held = read_json(folder / FILE)
    tensors = load_file(folder / TENSORS)
    return Measured(folder, held["rows"], held["seconds"], held["calls"], tensors)


@torch.no_grad()
def measure(
    folder: Path,
    checkpoint: Checkpoint,
    loaded: LoadedRole,
    codec: Codec,
    plan: Plan,
    reward: VideoReward,
    features: Mapping[str, VideoFeatures],
    done: Callable[[], None],
) -> Measured:
    """Generate, score and write the samples of a checkpoint; `done` is called after each batch.

    The latents are those of rollout with this batch. `features` are what Frechet distances compare, by the name of the
    distance.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)

    def tensors_of(video: Video, prompts: list[str], seed: int, numbers: list[int]) -> dict[str, Tensor]:
        """Return thumbnails, and features of the videos and of real clips where there are some."""
        columns, real = {"thumbnails": thumbnail(video)}, None
        if features and plan.real_clips:
            real = read_real(plan.real_clips, "--real-clips", checkpoint.run.video, numbers).to(video.device)
        elif features and is_tiny_world(video.shape[2:], plan.prompts):
            clips = render([real_clip(prompt, seed, i) for prompt, i in zip(prompts, numbers, strict=True)])
            real = codec.decode(codec.encode(clips.to(video.device)))
        columns |= {f"{FEATURES}{name}": of(video) for name, of in features.items()}
        return columns if real is None else columns | {f"{REAL}{name}": of(real) for name, of in features.items()}

    rows: list[dict[str, Any]] = []
    seconds: list[float] = []  # of generating one sample, for each batch
    tensors: dict[str, list[Tensor]] = {}
    for seed, numbers in plan.parts():
        prompts, began = plan.prompts_of(numbers), time.perf_counter()
        latents = draw_latents(loaded, codec, Request.of(prompts), [noise_number(seed, i) for i in numbers])
        latents = latents.float().cpu()
        seconds.append((time.perf_counter() - began) / len(numbers))
        video, new = codec.decode(latents.to(loaded.role.device)), []
        for number, columns in zip(numbers, _scores(video, prompts, plan, reward), strict=True):
            prompt, sample = divmod(number, plan.samples)
            noise = noise_number(seed, number)
            new.append({"seed": seed, "prompt": prompt, "sample": sample, "noise": noise} | columns)
        _write_videos(folder, video, new, plan, checkpoint.run.video.fps)
        rows += new
        for name, value in tensors_of(video, prompts, seed, numbers).items():
            tensors.setdefault(name, []).append(value.float().cpu())
        done()
    joined = {name: torch.cat(parts).contiguous() for name, parts in tensors.items()}
    calls = network_calls(checkpoint.run.sampler, checkpoint.check()[1])
    key = _key(checkpoint, plan, reward.config, loaded.role.device.type)
    with writing(folder):
        write_tensors(folder / TENSORS, joined)
    held = {"key": key, "calls": calls, "seconds": seconds, "rows": rows}
    write_text(folder / FILE, json.dumps(held, indent=1, ensure_ascii=False) + "\n")
    return Measured(folder, rows, seconds, calls, joined)


def network_calls(sampler: SamplerConfig, latent_frames: int) -> int:
    """Return how often a network runs for one sample: guidance runs it twice, a causal student once more per chunk."""
    guided = 1 if sampler.guidance_scale == 1 else 2
    if not sampler.chunks.causal:
        return guided * sampler.num_steps
    chunks = len(sampler.chunks.ranges(latent_frames))
    return guided * (chunks * sampler.num_steps + chunks - 1)  # every chunk but the last goes into the KV cache


def _key(checkpoint: Checkpoint, plan: Plan, reward: RewardConfig, device: str) -> dict[str, Any]:
    """Return all that the samples and their scores depend on."""
    run, encoders = plain(checkpoint.run), checkpoint.run.encoders.on(device)
    scoring = {key: value for key, value in asdict(reward).items() if key not in ("retries", "timeout")}
    about = {"version": VERSION, "spec": checkpoint.spec, "weights": checkpoint.digest, "device": device}
    about |= {name: run[name] for name in ("sampler", "video")} | {"reward": scoring}
    about |= {"base": run["student"]["path"], "precision": run["student"]["precision"]}
    about |= {name: getattr(encoders, name) for name in ("text_precision", "vae_precision")}
    images = [[image.sha256 for image in identity_of(prompt)[1]] for prompt in plan.prompts]
    about |= {"images": images} if any(images) else {}
    return json.loads(json.dumps(about | asdict(plan)))


def _scores(video: Video, prompts: list[str], plan: Plan, reward: VideoReward) -> list[dict[str, Any]]:
    """Return reward, scores, pixel statistics and, in the tiny world, accuracies and attributes of each video."""
    names = (*reward.weights, *reward.held_out)
    columns: dict[str, list[float]] = {}
    if names:
        parts = reward.parts(video, tuple(prompts), names).double()
        columns |= {"reward": reward.total(parts[:, : len(reward.weights)]).tolist()} if reward.weights else {}
        columns |= {f"reward/{name}": column.tolist() for name, column in zip(names, parts.unbind(1), strict=True)}
    columns |= {f"pixels/{name}": values.double().tolist() for name, values in statistics(video).items()}
    if is_tiny_world(video.shape[2:], plan.prompts):
        exact = exact_measures(video, prompts).items()
        columns |= {name.removesuffix("/all"): rows.double().tolist() for name, rows in exact}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _write_videos(folder: Path, video: Video, rows: Sequence[dict[str, Any]], plan: Plan, fps: float) -> None:
    for row, frames in zip(rows, to_uint8(video), strict=True):
        row["video"] = None
        if row["sample"] < plan.videos:
            row["video"] = file_name(plan.stem(row["seed"], row["prompt"], row["sample"]), len(frames))
            with writing(folder):
                (folder / row["video"]).parent.mkdir(exist_ok=True)
                write_clip(frames, folder / row["video"], fps)
