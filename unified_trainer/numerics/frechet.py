"""The Frechet distance between two sets of feature vectors."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor


def frechet_distance(left: Float[Tensor, "n d"], right: Float[Tensor, "m d"]) -> float:
    """Return |mu_l - mu_r|^2 + tr(C_l + C_r - 2 (C_l C_r)^(1/2)), computed in float64 (FID, arXiv:1706.08500).

    mu and C are mean and covariance of the rows of `left` and `right`. The estimate is biased upwards for few rows:
    compare distances only at equal row counts. Raises ValueError if a set has fewer than two rows.
    """
    if min(len(left), len(right)) < 2:
        raise ValueError(f"frechet_distance: {len(left)} and {len(right)} rows, at least 2 are needed")
    left, right = left.cpu().double(), right.cpu().double()
    covariances = [torch.cov(rows.T).reshape(rows.shape[1], rows.shape[1]) for rows in (left, right)]
    root = _square_root(covariances[0])
    crossed = torch.linalg.eigvalsh(root @ covariances[1] @ root).clamp(min=0).sqrt().sum()
    means = (left.mean(0) - right.mean(0)).square().sum()
    return (means + covariances[0].trace() + covariances[1].trace() - 2 * crossed).item()


def frame_features(
    video: Float[Tensor, "b 3 t h w"], features: Callable[[Tensor], Tensor], stride: int, batch: int
) -> Float[Tensor, "b frames d"]:
    """Return the features of every `stride`-th frame of videos, `batch` frames at a time; the first is always one."""
    chosen = video[:, :, ::stride].movedim(2, 1)
    rows = torch.cat([features(part) for part in chosen.flatten(0, 1).split(batch)])
    return rows.unflatten(0, chosen.shape[:2])


def _square_root(covariance: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp(min=0).sqrt() @ vectors.T
