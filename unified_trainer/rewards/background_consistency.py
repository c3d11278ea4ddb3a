"""The scorer background_consistency: how alike the frames of a video are to CLIP (VBench, arXiv:2311.17982).

VBench's is of CLIP ViT-B/32, over all frames.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.types import PerSample, Video
from unified_trainer.models.hub import component
from unified_trainer.rewards.base import NetworkScorer, Scorer, ScorerConfig, ScorerKind, check_path
from unified_trainer.rewards.clip import CLIP


def frame_consistency(features: Float[Tensor, "b frames d"]) -> PerSample:
    """Return the mean of max(0, cosine) of each later frame to the frame before it and to the first; of length 1."""
    first, before, later = features[:, :1], features[:, :-1], features[:, 1:]
    alike = [(later * other).sum(-1).clamp(min=0) for other in (before, first)]
    return ((alike[0] + alike[1]) / 2).mean(1)


def load(config: ScorerConfig, device: torch.device) -> Scorer:
    """Return the scorer of videos with the CLIP folder `config.path`."""
    clip = CLIP.load(Path(config.path), device, config.dtype)

    def score(video: Video, prompts: Sequence[str]) -> PerSample:
        frames = video.movedim(2, 1)
        features = torch.cat([clip.features(images) for images in frames.flatten(0, 1).split(config.batch)])
        return frame_consistency(features.unflatten(0, frames.shape[:2]))

    return NetworkScorer(score, (clip.network,))


KIND = ScorerKind("background_consistency", load, check_path, min_frames=2, files=component(""))
