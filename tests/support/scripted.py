"""A network with the interface of I3D's TorchScript file."""

from pathlib import Path

import torch
from torch import Tensor, nn


class Means(nn.Module):
    """The means of the scaled pixels of the first three frames; it needs three frames, as I3D needs about ten."""

    def forward(self, video: Tensor, rescale: bool, resize: bool, return_features: bool) -> Tensor:
        assert rescale and resize and return_features
        assert video.shape[2] >= 3
        return (video / 127.5 - 1).mean((1, 3, 4))[:, :3]


def scripted_means(file: Path) -> Path:
    """Write the network to a file, and return it."""
    torch.jit.script(Means()).save(file)
    return file
