"""A reward as a service: it answers the requests of docs/rewards.md, and scores those that wait together."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.types import PerSample, Video
from unified_trainer.rewards.image_json import prompts_with_images
from unified_trainer.rewards.video_json import from_json
from unified_trainer.tools.serve.batch_queue import Batcher
from unified_trainer.tools.serve.service import Asked, Service, texts

Score = Callable[[Video, Sequence[str]], PerSample]  # every score is finite


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
