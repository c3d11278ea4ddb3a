"""This stage of build_tiny_world makes the features of the tiny world's own Frechet distance, from its real clips."""

import math
from pathlib import Path

import torch
from torch import Tensor

from unified_trainer.data.tiny_world import SUBJECTS, draw_clip, render
from unified_trainer.data.tiny_world_features import convolved
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.tensor_file import write_tensors
from unified_trainer.run.registry import family_of

FIRST, SECOND, KEPT = (24, 6, 5, 5), (48, 24, 3, 3), 32  # weights of the convolutions; components that are kept
CLIPS, BATCH = 8, 16  # of each subject


def effective_rank(rows: Tensor) -> float:
    """Return (sum of eigenvalues)^2 / sum of their squares of the covariance of rows; their number if all are equal."""
    covariance = torch.cov(rows.double().T)
    return float(covariance.trace() ** 2 / covariance.square().sum())


def random_network(seed: int) -> dict[str, Tensor]:
    """Return the weights of two random convolutions that keep the power of their input (He, arXiv:1502.01852)."""
    generator = torch.Generator().manual_seed(seed)
    network = {}
    for name, shape in (("first", FIRST), ("second", SECOND)):
        scale = math.sqrt(2 / math.prod(shape[1:]))
        network[f"{name}.weight"] = torch.randn(shape, generator=generator) * scale
        network[f"{name}.bias"] = torch.randn(shape[0], generator=generator) * 0.3
    return network


def real_clips(folder: str, count: int, seed: int) -> Tensor:
    """Return `count` clips of every subject, after the VAE of a folder."""
    family, path = family_of("student", folder)
    codec = family.codec(path, torch.device("cpu"), EncoderConfig())
    generator = torch.Generator().manual_seed(seed)
    clips = [draw_clip(subject, generator) for subject in SUBJECTS for _ in range(count)]
    with torch.no_grad():
        return torch.cat([codec.decode(codec.encode(part)) for part in render(clips).split(BATCH)])


def main(out: Path, folder: str, *, seed: int = 0) -> dict[str, float]:
    """Fit the components to clips, save the network, and return its effective rank on other clips."""
    network = random_network(seed)
    rows = torch.cat([convolved(part, network) for part in real_clips(folder, CLIPS, seed).split(BATCH)]).flatten(0, 1)
    network["mean"] = rows.mean(0)
    values, vectors = torch.linalg.eigh(torch.cov(rows.double().T))
    network["whiten"] = (vectors[:, -KEPT:] / values[-KEPT:].sqrt()).float().contiguous()
    write_tensors(out, network)
    others = convolved(real_clips(folder, 2, seed + 10_000), network).flatten(0, 1)
    white = (others - network["mean"]) @ network["whiten"]
    share = float(values[-KEPT:].sum() / values.sum())
    return {"effective_rank": effective_rank(white), "without_whitening": effective_rank(others), "variance": share}
