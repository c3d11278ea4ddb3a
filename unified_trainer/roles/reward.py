"""The reward role: decodes what the student made and scores some of its frames."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.models.base import Codec
from unified_trainer.types import Latents, PerSample, Video


@dataclass(frozen=True)
class RewardConfig:
    path: str = "tiny"  # HPSv3 folder, as import-hpsv3 makes it; "tiny" is the embedded one
    precision: Literal["fp32", "bf16"] = "fp32"  # of the scorer's backbone
    frames: Literal["first", "every", "all"] = "first"  # which frames are scored; a sample's reward is their mean
    frame_stride: int = 8  # with frames = every: every so many frames, the first included
    scale: float = 1.0  # the reward is the mean score times this
    batch: int = 64  # images scored at a time


class Scorer(Protocol):
    def score(self, images: Float[Tensor, "b 3 h w"], prompts: list[str]) -> Float[Tensor, "b 2"]:
        """(mean, raw uncertainty) of each image in [0, 1] for its prompt; raises rather than guess."""
        ...


class Reward:
    """scale x the mean score over the chosen frames, one number per sample."""

    def __init__(self, scorer: Scorer, codec: Codec, config: RewardConfig) -> None:
        if config.frame_stride < 1 or config.batch < 1:
            raise ValueError("reward.frame_stride and reward.batch must be at least 1")
        self._scorer = scorer
        self._codec = codec
        self.config = config

    def score(self, x0: Latents, prompts: tuple[str, ...]) -> PerSample:
        """Reward of clean latents. The first frame is the first latent frame alone: the codec is causal."""
        return self.score_video(self._codec.decode(x0[:, :, :1] if self.config.frames == "first" else x0), prompts)

    @torch.no_grad()
    def score_video(self, video: Video, prompts: tuple[str, ...]) -> PerSample:
        """Reward of decoded video; raises ValueError on a count that does not match or a score that is not finite."""
        if len(video) != len(prompts):
            raise ValueError(f"reward: {len(video)} videos but {len(prompts)} prompts")
        stride = {"first": video.shape[2], "every": self.config.frame_stride, "all": 1}[self.config.frames]
        frames = video[:, :, ::stride].movedim(2, 1)
        images, captions = frames.flatten(0, 1), [p for p in prompts for _ in range(frames.shape[1])]
        size = self.config.batch
        scores = [
            self._scorer.score(images[i : i + size], captions[i : i + size])[:, 0] for i in range(0, len(images), size)
        ]
        scored = torch.cat(scores)
        if len(scored) != len(images):
            raise ValueError(f"reward: the scorer gave {len(scored)} scores for {len(images)} images")
        reward = self.config.scale * scored.float().unflatten(0, frames.shape[:2]).mean(1)
        if not bool(reward.isfinite().all()):
            bad = int((~reward.isfinite()).nonzero()[0, 0])
            raise ValueError(f"reward: the score of sample {bad} ({prompts[bad]!r}) is not finite")
        return reward
