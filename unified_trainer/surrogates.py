"""Policy objectives, to be maximised: tensors in, tensors out."""

from typing import Literal, get_args

import torch
from torch import Tensor

Mode = Literal["clip"]
LOG_RATIO_LIMIT = 20.0


def surrogate(mode: Mode, log_ratio: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """The objective of each element, with r = exp(log_ratio).

    `clip`: min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv:1707.06347).
    """
    if mode not in get_args(Mode):
        raise ValueError(f"unknown surrogate {mode!r}; have {', '.join(get_args(Mode))}")
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.minimum(ratio * advantage, clipped * advantage)


def outside_clip(log_ratio: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """Where the ratio has left (1 - clip_low, 1 + clip_high)."""
    ratio = log_ratio.exp()
    return (ratio <= 1 - clip_low) | (ratio >= 1 + clip_high)
