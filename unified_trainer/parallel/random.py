"""Randomness as a function of (seed, step, name, sample).

No result depends on ranks, micro-batches or restarts, and a resumed run needs no generator state.
"""

import copy
import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor


def generator(*key: int | str) -> np.random.Generator:
    """Return a generator that depends on the key alone; different keys give independent streams (Philox)."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


class Streams:
    """The random numbers of one training step, by name and sample."""

    def __init__(self, seed: int, step: int) -> None:
        self._step_key = (seed, step)
        self._key: tuple[int | str, ...] = self._step_key
        self.shared = generator(seed, step, "shared")  # for decisions that must be equal on all ranks and micro-batches

    def restarted(self) -> "Streams":
        """Return the streams of the same step with nothing drawn yet from `shared`."""
        streams = copy.copy(self)
        streams.shared = generator(*self._step_key, "shared")
        return streams

    def repeated(self) -> "Streams":
        """Return streams that draw from `shared` what these will draw next, and leave these as they are."""
        streams = copy.copy(self)
        streams.shared = copy.deepcopy(self.shared)
        return streams

    def numbered(self, number: int) -> "Streams":
        """Return the streams of one of several equal draws in a step: other numbers by name, the same `shared`.

        Number 0 is these streams, so that a draw that is made once has the same numbers with and without it.
        """
        if number == 0:
            return self
        streams = copy.copy(self)
        streams._key = (*self._key, f"number {number}")
        return streams

    def noise(self, name: str, keys: Sequence[int], shape: Sequence[int]) -> Float[Tensor, "b ..."]:
        """Return standard normal noise [len(keys), *shape], float32 on the CPU; equal keys give equal noise."""
        drawn = [generator(*self._key, name, key).standard_normal(shape, dtype=np.float32) for key in keys]
        return torch.from_numpy(np.stack(drawn))

    def uniform(self, name: str, keys: Sequence[int]) -> Float[Tensor, " b"]:
        """Return one uniform float64 number in [0, 1) per key, on the CPU; equal keys give equal numbers."""
        return torch.tensor([generator(*self._key, name, key).random() for key in keys], dtype=torch.float64)
