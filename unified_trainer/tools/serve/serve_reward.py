"""The command serve-reward: scorers as a service, which answers requests for scores as docs/rewards.md says."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.plugins import agree_to_scorer
from unified_trainer.basics.ranges import Count, Port, at_least
from unified_trainer.basics.types import PerSample, Video
from unified_trainer.parallel.device import Device, pick_device
from unified_trainer.rewards.base import Scorer
from unified_trainer.rewards.image_json import prompts_with_images
from unified_trainer.rewards.reward import RewardConfig, VideoReward
from unified_trainer.rewards.scorers import check_of_videos, check_reward, least_frames, load_scorers
from unified_trainer.rewards.time_limit import watched
from unified_trainer.rewards.video_json import from_json
from unified_trainer.run.settings.command_line import read_reward
from unified_trainer.tools.serve.batch_queue import Batcher
from unified_trainer.tools.serve.guard import Door
from unified_trainer.tools.serve.service import Asked, Service, texts
from unified_trainer.tools.serve.web_server import serve_until_stopped

Score = Callable[[Video, Sequence[str]], PerSample]  # every score is finite


def serve_reward(
    reward: str,
    path: str = "",
    port: Port = 8000,
    host: str = "127.0.0.1",
    token_variable: str = "",
    most_gib: Annotated[float, at_least(0.001, 1024)] = 8.0,
    batch: Count = 64,
    wait: Annotated[float, at_least(0, 60)] = 0.01,
    device: Device = "auto",
) -> None:
    """Serve a scorer or a whole reward to runs with reward.scorers.NAME.kind http, until SIGTERM or Ctrl-C.

    A scorer that gives no answer within reward.timeout ends the server with exit code 2.

    Args:
        reward: YAML file with a section reward, as in a recipe, whose weighted sum is served; or a kind of scorer.
        path: Folder of the weights, if --reward is a kind that has some.
        most_gib: Largest request that is read, in GiB; a larger one is refused.
        batch: Most videos that are scored together; requests that wait are joined up to it.
    """
    name, config = _served(reward, path)
    frames = least_frames(config)
    check_reward(config, frames)
    check_of_videos(config)

    def load() -> Service:
        def late(error: TimeoutError) -> None:
            service.batcher.give_up(TimeoutError(f"{name}: {error}; the call cannot be ended, so the server ends"))

        def limit(scorer: Scorer, seconds: float, key: str) -> Scorer:
            return watched(scorer, seconds, key, late)

        picked = pick_device(device, 0)
        scorer = VideoReward(load_scorers(config, picked, limit)[0], config)
        score = lambda video, prompts: scorer.total(scorer.parts(video, tuple(prompts), scorer.weights))  # noqa: E731
        service = reward_service(name, frames, score, picked, batch, wait, int(most_gib * 2**30))
        return service

    flags = "--reward.scorers.NAME.kind http --reward.scorers.NAME.settings.url"
    door = Door(host, port, token_variable)
    serve_until_stopped(door, load, lambda address: f"{name} at {address}: {flags} {address}")


def _served(reward: str, path: str) -> tuple[str, RewardConfig]:
    """Return the name and the settings of what is served; a single scorer reads every frame that it gets."""
    if not reward.endswith((".yaml", ".yml")):
        agree_to_scorer(reward, "reward.kind")
        config = RewardConfig(kind=reward, path=path, frames="all")
        return config.first, config
    if path:
        raise UserError(f"--path {path}: {reward} names the weights of its scorers; leave --path out")
    return Path(reward).stem, read_reward(Path(reward))


@dataclass(frozen=True)
class Clips(Asked):
    """The videos of one request, with their prompts."""

    videos: Video

    @property
    def kind(self) -> Hashable:
        return (super().kind, *self.videos.shape[1:])


def reward_service(
    name: str, min_frames: int, score: Score, device: torch.device, batch: int, wait: float, most_bytes: int = 2**33
) -> Service[Clips, list[float]]:
    """Return a service that scores `batch` videos at a time; the first request waits `wait` seconds for others.

    A request of more than `most_bytes` is refused.
    """

    def read(asked: dict[str, Any]) -> Clips:
        videos, prompts = from_json(asked.get("videos")), texts(asked, "prompts")
        if len(prompts) != len(videos):
            raise UserError(f"{len(videos)} videos but {len(prompts)} prompts, expected one prompt for each")
        if videos.shape[2] < min_frames:
            raise UserError(f"{name} needs at least {min_frames} frames of a video, not {videos.shape[2]}")
        return Clips(prompts_with_images(prompts, asked.get("images")), videos)

    @torch.no_grad()
    def together(requests: Sequence[Clips]) -> list[list[float]]:
        videos = torch.cat([request.videos for request in requests]).to(device)
        scores = score(videos, tuple(prompt for request in requests for prompt in request.prompts))
        return [part.tolist() for part in scores.float().split([request.size for request in requests])]

    about = {"name": name, "min_frames": min_frames, "images": True}
    batcher = Batcher(together, batch, wait)
    return Service(about, "/score", read, lambda _, scores: {"scores": scores}, batcher, most_bytes)
