"""Randomness that depends on (seed, step, sample) and on nothing else, so that no state needs saving."""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor


def generator(*key: int | str) -> np.random.Generator:
    """An independent stream for this key (Philox, 128-bit key)."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


class Streams:
    """The random numbers of one training step."""

    def __init__(self, seed: int, step: int) -> None:
        self._key = (seed, step)
        self.shared = generator(seed, step, "shared")  # for control flow: equal on all ranks and micro-batches

    def noise(self, name: str, keys: Sequence[int], shape: Sequence[int]) -> Float[Tensor, "b ..."]:
        """Standard normal float32, one stream per key: equal keys get equal noise, on any rank and device."""
        drawn = [generator(*self._key, name, key).standard_normal(shape, dtype=np.float32) for key in keys]
        return torch.from_numpy(np.stack(drawn))

    def uniform(self, name: str, keys: Sequence[int]) -> Float[Tensor, " b"]:
        """Uniform float64 in [0, 1), one stream per key."""
        return torch.tensor([generator(*self._key, name, key).random() for key in keys], dtype=torch.float64)
