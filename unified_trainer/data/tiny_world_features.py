"""Features of videos for a Frechet distance of the tiny world that sees color, place, shape and motion at once."""

from functools import cache
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, conv2d, relu

from unified_trainer.basics.types import Video

FILE = Path(__file__).parents[1] / "assets" / "tiny" / "features.safetensors"
STRIDE = 4  # frames between two that are compared
CELLS = 4  # places along each side over which features are averaged


def convolved(video: Video, network: dict[str, Tensor]) -> Float[Tensor, "b k d"]:
    """Return averages over 4 x 4 places of two random convolutions of every fourth frame and of its change."""
    frames = video[:, :, ::STRIDE].cpu().float()
    pairs = torch.cat([frames[:, :, 1:], frames.diff(dim=2)], 1).movedim(2, 1)
    x = pairs.flatten(0, 1)
    for layer in ("first", "second"):
        weight = network[f"{layer}.weight"]
        x = relu(conv2d(x, weight, network[f"{layer}.bias"], stride=2, padding=weight.shape[-1] // 2))
    return adaptive_avg_pool2d(x, CELLS).flatten(1).unflatten(0, pairs.shape[:2])


def world_features(video: Video) -> Float[Tensor, "b k d"]:
    """Return k = 4 rows of each video of the tiny world: 32 features that are white over its real clips.

    They are the leading principal components of `convolved`, of unit variance over clips that went through the VAE.
    `scripts/build_tiny_world.py` makes the file.
    """
    network = _network()
    return (convolved(video, network) - network["mean"]) @ network["whiten"]


@cache
def _network() -> dict[str, Tensor]:
    return load_file(FILE)
