"""The scorer background_consistency: how alike the frames of a video are to CLIP (VBench, arXiv:2311.17982).

VBench's is of CLIP ViT-B/32, over all frames.
"""

from pathlib import Path

import torch

from unified_trainer.models.hub import component
from unified_trainer.rewards.base import NetworkScorer, Scorer, ScorerConfig, ScorerKind, check_path
from unified_trainer.rewards.clip import CLIP
from unified_trainer.rewards.frame_consistency import of_features


def load(config: ScorerConfig, device: torch.device) -> Scorer:
    """Return the scorer of videos with the CLIP folder `config.path`."""
    clip = CLIP.load(Path(config.path), device, config.dtype)
    return NetworkScorer(of_features(clip.features, config.batch), (clip.network,))


KIND = ScorerKind("background_consistency", load, check_path, min_frames=2, files=component(""))
