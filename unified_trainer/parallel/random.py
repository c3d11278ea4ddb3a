"""Randomness as a function of (seed, step, name, sample).

No result depends on ranks, micro-batches or restarts, and a resumed run needs no generator state. Noise is drawn on the
device that reads it, by Philox4x32-10 (`unified_trainer/numerics/philox.py`). Decisions on the CPU, such as the order
of the data, are drawn by numpy.
"""

import copy
import hashlib
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from unified_trainer.basics.types import widest
from unified_trainer.numerics import philox

CPU = torch.device("cpu")


def generator(*key: int | str) -> np.random.Generator:
    """Return numpy's generator for decisions on the CPU; different keys give independent streams (Philox4x64-10)."""
    return np.random.Generator(np.random.Philox(key=int.from_bytes(_digest(*key), "little")))


def _digest(*key: int | str) -> bytes:
    return hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=16).digest()


class Streams:
    """The random numbers of one training step, by name and sample."""

    def __init__(self, seed: int, step: int, device: torch.device = CPU) -> None:
        """`device` is where the noise is drawn; uniform numbers and `shared` are on the CPU."""
        self._step_key, self._device = (seed, step), device
        self._key: tuple[int | str, ...] = self._step_key
        self.shared = generator(seed, step, "shared")  # for decisions that must be equal on all ranks and micro-batches

    @property
    def step(self) -> int:
        """The training step, from 0."""
        return self._step_key[1]

    def restarted(self) -> "Streams":
        """Return the streams of the same step with nothing drawn yet from `shared`."""
        streams = copy.copy(self)
        streams.shared = generator(*self._step_key, "shared")
        return streams

    def of_step(self, step: int) -> "Streams":
        """Return the streams of another training step of the run."""
        seed, _ = self._step_key
        return Streams(seed, step, self._device)

    def of_steps(self, steps: Mapping[int, int]) -> "Streams":
        """Return these streams with the noise of the given keys as it was in their training steps."""
        return _PastStreams(self, steps) if steps else self

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
        """Return standard normal noise [len(keys), *shape], float32 on the device of the streams.

        Equal keys give equal noise. It is computed in float64 and rounded once: two devices whose logarithms or cosines
        differ in the last place of float64 differ by at most one in that of float32, and rarely. On a device without
        float64 the noise is within 1e-6.
        """
        streams = self._streams(name, keys).to(self._device, non_blocking=True)
        drawn = philox.normal(streams, math.prod(shape), float64=widest(self._device) == torch.float64)
        return drawn.reshape(len(keys), *shape)

    def uniform(self, name: str, keys: Sequence[int]) -> Float[Tensor, " b"]:
        """Return one uniform float64 number in [0, 1) per key, on the CPU; equal keys give equal numbers."""
        return philox.uniform(self._streams(name, keys))

    def _streams(self, name: str, keys: Sequence[int]) -> Int[Tensor, "b 4"]:
        """Return Philox's key and the upper half of its counter for each key."""
        digests = b"".join(_digest(*self._key, name, key) for key in keys)
        return torch.from_numpy(np.frombuffer(digests, "<u4").astype(np.int64).reshape(len(keys), 4))


class _PastStreams(Streams):
    """The random numbers of a training step, in which some keys have the noise of other steps."""

    def __init__(self, rng: Streams, steps: Mapping[int, int]) -> None:
        vars(self).update(vars(rng))
        self._rng, self._steps = rng, steps

    def noise(self, name: str, keys: Sequence[int], shape: Sequence[int]) -> Float[Tensor, "b ..."]:
        streams = [self._rng.of_step(self._steps[key]) if key in self._steps else self._rng for key in keys]
        return torch.cat([rng.noise(name, [key], shape) for rng, key in zip(streams, keys, strict=True)])
