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

    def place_of(self, *weights: Weights) -> list[tuple[str, int, int]]:
        """Return, of each buffer, the device, inode and offset of the shared memory that it is read from."""
        return [_memory_at(buffer.ctypes.data) for part in weights for buffer in part.buffers]

    def pid(self) -> int:
        return os.getpid()

    def take(self, *weights: Weights) -> dict[str, Tensor]:
        copy_parts(weights, self._weights)
        return self._weights


def _memory_at(address: int) -> tuple[str, int, int]:
    with open("/proc/self/maps", encoding="ascii") as maps:
        for line in maps:
            span, _, offset, device, inode, *_ = line.split()
            first, end = (int(number, 16) for number in span.split("-"))
            if first <= address < end:
                return device, int(inode), int(offset, 16) + address - first
    raise AssertionError(f"nothing is mapped at {address}")
