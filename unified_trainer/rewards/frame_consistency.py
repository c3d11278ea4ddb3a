"""How alike the frames of a video are to a network: VBench's measure of features (arXiv:2311.17982)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.types import PerSample, Video
from unified_trainer.rewards.base import Features, Scorer


def frame_consistency(features: Float[Tensor, "b frames d"]) -> PerSample:
    """Return the mean of max(0, cosine) of each later frame to the frame before it and to the first; of length 1."""
    first, before, later = features[:, :1], features[:, :-1], features[:, 1:]
    alike = [(later * other).sum(-1).clamp(min=0) for other in (before, first)]
    return ((alike[0] + alike[1]) / 2).mean(1)


def of_features(features: Features, batch: int) -> Scorer:
    """Return the scorer of videos whose frames have these features, of length 1; `batch` images at a time."""

    def score(video: Video, prompts: Sequence[str]) -> PerSample:
        frames = video.movedim(2, 1)
        seen = torch.cat([features(images) for images in frames.flatten(0, 1).split(batch)])
        return frame_consistency(seen.unflatten(0, frames.shape[:2]))

    return score
