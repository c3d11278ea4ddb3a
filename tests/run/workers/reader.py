"""A worker that only takes weights, for tests of their transport."""

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from unified_trainer.run.workers.weights import Weights, copy_parts


class Reader:
    """Holds tensors of the trained weights' names, shapes and dtypes."""

    def __init__(self, held: Mapping[str, Tensor]) -> None:
        self._weights = {name: torch.zeros_like(weight) for name, weight in held.items()}

    def pid(self) -> int:
        return os.getpid()

    def take(self, *weights: Weights) -> dict[str, Tensor]:
        copy_parts(weights, self._weights)
        return self._weights
