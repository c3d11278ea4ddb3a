"""Samples and scores as NumPy arrays, which Ray shares between the processes of a machine without a copy."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unified_trainer.basics.types import Rollout
from unified_trainer.rewards.reward import Scores

Arrays = dict[str, np.ndarray]


def of_rollout(rollout: Rollout) -> Arrays:
    """Return the fields of a rollout."""
    return {f.name: _array(getattr(rollout, f.name)) for f in fields(Rollout)}


def to_rollout(arrays: Arrays, device: torch.device) -> Rollout:
    """Return the rollout of these fields; other arrays are left out."""
    return Rollout(**to_columns({f.name: arrays[f.name] for f in fields(Rollout)}, device))


def of_scores(scores: Scores) -> dict[str, Any]:
    """Return the fields of scores."""
    statistics = of_columns(scores.statistics)
    return {"parts": _array(scores.parts), "statistics": statistics, "thumbnails": _array(scores.thumbnails)}


def to_scores(arrays: Mapping[str, Any], device: torch.device) -> Scores:
    """Return the scores of these fields."""
    statistics = to_columns(arrays["statistics"], device)
    return Scores(_tensor(arrays["parts"], device), statistics, _tensor(arrays["thumbnails"], device))


def size(*trees: Mapping[str, Any]) -> int:
    """Return the bytes of all arrays in mappings of arrays."""
    return sum(size(array) if isinstance(array, Mapping) else array.nbytes for tree in trees for array in tree.values())


def of_columns(columns: Mapping[str, Tensor]) -> Arrays:
    """Return columns of measurements as arrays."""
    return {name: _array(rows) for name, rows in columns.items()}


def to_columns(columns: Arrays, device: torch.device) -> dict[str, Tensor]:
    """Return the columns of these arrays."""
    return {name: _tensor(rows, device) for name, rows in columns.items()}


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array.copy()).to(device)  # arrays from Ray are read-only
