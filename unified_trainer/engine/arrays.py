"""Samples, scores and weights as NumPy arrays, which Ray shares between the processes of a machine without a copy."""

import zlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unified_trainer.roles.reward import Scores
from unified_trainer.types import Rollout

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
    return sum(size(one) if isinstance(one, Mapping) else one.nbytes for tree in trees for one in tree.values())


def of_columns(columns: Mapping[str, Tensor]) -> Arrays:
    """Return columns of measurements as arrays."""
    return {name: _array(rows) for name, rows in columns.items()}


def to_columns(columns: Arrays, device: torch.device) -> dict[str, Tensor]:
    """Return the columns of these arrays."""
    return {name: _tensor(rows, device) for name, rows in columns.items()}


class Weights:
    """The weights of one version as they travel: bytes of every tensor, with its dtype and shape, and a checksum."""

    def __init__(self, version: int, weights: Mapping[str, Tensor], *, half: bool = False) -> None:
        """With `half`, float32 weights travel as bfloat16."""
        self.version = version
        self.signature = signature(weights)
        sent = {name: weight.bfloat16() if half and _is_single(weight) else weight for name, weight in weights.items()}
        self._dtypes = {name: weight.dtype for name, weight in sent.items()}
        self._bytes = {name: _bytes(weight) for name, weight in sent.items()}
        self._checksum = checksum(self._bytes)

    @torch.no_grad()
    def copy_to(self, weights: Mapping[str, Tensor]) -> None:
        """Copy into tensors of the same names, dtypes and shapes; RuntimeError for others, or for changed bytes."""
        check_equal(self.signature, signature(weights))
        if checksum(self._bytes) != self._checksum:
            raise RuntimeError(f"weights of version {self.version} were damaged on their way: their checksum is wrong")
        for name, weight in weights.items():
            array = torch.from_numpy(self._bytes[name].copy()).view(self._dtypes[name]).view(weight.shape)
            weight.copy_(array)


Signature = tuple[tuple[str, tuple[int, ...], str], ...]


def signature(weights: Mapping[str, Tensor]) -> Signature:
    """Return name, shape and dtype of every tensor, in order."""
    return tuple((name, tuple(weight.shape), str(weight.dtype)) for name, weight in weights.items())


def check_equal(trained: Signature, held: Signature) -> None:
    """Raise RuntimeError that names the first tensor in which the weights of a worker differ from the trained ones."""
    if trained == held:
        return
    pairs = ((mine, other) for mine, other in zip(trained, held, strict=False) if mine != other)
    mine, other = next(pairs, (len(trained), len(held)))
    raise RuntimeError(f"a worker holds other weights than are trained: {other} there, {mine} here")


def checksum(arrays: Mapping[str, np.ndarray]) -> int:
    """Return the CRC-32 of all bytes, in order."""
    total = 0
    for array in arrays.values():
        total = zlib.crc32(array.data, total)
    return total


def _is_single(weight: Tensor) -> bool:
    return weight.dtype == torch.float32


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array.copy()).to(device)  # arrays from Ray are read-only
