"""The weights of one version as they travel to workers: a few flat buffers, each with a checksum.

They pass through Ray's object store, or a worker reads them from the memory of the main rank by Ray's direct transport.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import ray
import torch
from ray import ObjectRef
from ray.experimental import set_target_for_ref
from torch import Tensor

from unified_trainer.parallel.device import synchronize
from unified_trainer.parallel.fsdp import gather_into
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.run.settings.workers import Transport

BUCKET = 2**26  # bytes of a buffer at most, unless one tensor has more; 2**28 is slower on CPUs
START = 16  # a tensor begins at a multiple of it, so that it can be viewed in its dtype
PIECE = 2**16  # words with a sum of their own: at most 2**62, which int64 holds

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


def checksum(buffer: Tensor) -> list[int]:
    """Return, for every piece of a buffer, the sum of its 32-bit words times their numbers: exact, on any device.

    `buffer` is uint8 [bytes], a multiple of 4. A changed word changes the sum of its piece, and so do two words that
    change places, within a piece or between two.
    """
    numbers = torch.arange(1, PIECE + 1, device=buffer.device)
    pieces = buffer.view(torch.int32).split(PIECE)
    return torch.stack([(words * numbers[: len(words)]).sum() for words in pieces]).tolist()


@dataclass
class Bucket:
    """Tensors that travel in one buffer."""

    places: dict[str, tuple[int, torch.dtype, tuple[int, ...]]]  # where each one begins, its dtype and its shape
    size: int = 0  # bytes of the buffer

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return the tensors that a buffer holds, without a copy."""
        return {
            name: buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for name, (start, dtype, shape) in self.places.items()
        }


def buckets_of(weights: Mapping[str, Tensor], *, half: bool = False) -> list[Bucket]:
    """Divide whole weights, in order, into buckets of at most BUCKET bytes; with `half`, float32 becomes bfloat16."""
    buckets = [Bucket({})]
    for name, weight in weights.items():
        dtype = torch.bfloat16 if half and weight.dtype == torch.float32 else weight.dtype
        size = -(-math.prod(weight.shape) * dtype.itemsize // START) * START
        if buckets[-1].size and buckets[-1].size + size > BUCKET:
            buckets.append(Bucket({}))
        buckets[-1].places[name] = (buckets[-1].size, dtype, tuple(weight.shape))
        buckets[-1].size += size
    return buckets


@dataclass(frozen=True)
class Weights:
    """The weights that a worker gets: the buffers themselves, as NumPy arrays, or references by which it reads them."""

    version: int
    signature: Signature
    buckets: list[Bucket]
    buffers: Sequence[np.ndarray | ObjectRef]
    checksums: list[list[int]]

    @torch.no_grad()
    def copy_to(self, weights: Mapping[str, Tensor]) -> None:
        """Copy into tensors of the same names, dtypes and shapes; RuntimeError for others, or for changed bytes.

        No buffer with changed bytes is used, but those before it are.
        """
        check_equal(self.signature, signature(weights))
        direct = any(isinstance(buffer, ObjectRef) for buffer in self.buffers)
        device = next(iter(weights.values())).device if direct else torch.device("cpu")
        memory = torch.empty(max(bucket.size for bucket in self.buckets), dtype=torch.uint8, device=device)
        for bucket, buffer, expected in zip(self.buckets, self.buffers, self.checksums, strict=True):
            synchronize(device)  # the transport writes at once, also where the copies of the last buffer are due
            arrived = memory[: bucket.size]
            if isinstance(buffer, ObjectRef):
                set_target_for_ref(buffer, [arrived])
                ray.get(buffer)
            else:
                np.copyto(arrived.numpy(), buffer)
            if checksum(arrived) != expected:
                raise RuntimeError(f"weights of version {self.version} were damaged on their way: a checksum is wrong")
            for name, tensor in bucket.views(arrived).items():
                weights[name].copy_(tensor)
        synchronize(device)


class WeightSender:
    """Gathers trained weights into buffers and gives them to workers, from the main rank."""

    def __init__(self, mesh: Mesh, transport: Transport = "object_store", *, half: bool = False) -> None:
        """With `half`, float32 weights travel as bfloat16."""
        self._mesh, self._transport, self._half = mesh, transport, half
        self.size = 0  # bytes of the last version
        # Buffers on the training device that workers may be reading, with Ray's references to them, by version.
        self._shared: dict[int, list[tuple[Tensor, ObjectRef]]] = {}

    def send(self, version: int, weights: Mapping[str, Tensor], oldest: int) -> ObjectRef | None:
        """Return a reference to the weights of a version, on the main rank (a collective).

        Nobody may need versions before `oldest` any more: their buffers are written again. Nothing waits for a worker.
        """
        packed = self.pack(version, weights, oldest)
        return None if packed is None else ray.put(packed)

    def pack(self, version: int, weights: Mapping[str, Tensor], oldest: int) -> Weights | None:
        """Return what `send` sends."""
        buckets = buckets_of(weights, half=self._half)
        self.size = sum(bucket.size for bucket in buckets)
        buffers: list[Tensor] = []
        if self._mesh.is_main and self._transport == "nixl":
            buffers = [buffer for buffer, _ in self._buffers(version, buckets, oldest)]
        elif self._mesh.is_main:
            buffers = [torch.empty(bucket.size, dtype=torch.uint8) for bucket in buckets]
        places: dict[str, Tensor] = {}
        for bucket, buffer in zip(buckets, buffers, strict=False):  # other ranks have none
            places |= bucket.views(buffer)
        gather_into(weights, places, self._mesh)
        if not self._mesh.is_main:
            return None
        sums = [checksum(buffer) for buffer in buffers]  # which waits for the copies
        shared = self._shared.get(version)
        sent = [reference for _, reference in shared] if shared else [buffer.numpy() for buffer in buffers]
        return Weights(version, signature(weights), buckets, sent, sums)

    def _buffers(self, version: int, buckets: list[Bucket], oldest: int) -> list[tuple[Tensor, ObjectRef]]:
        """Return buffers that Ray knows: those of a version before `oldest`, or new ones.

        The same ones are used again because Ray does not free what an actor has put while the actor works, which a
        training process always does.
        """
        done = [self._shared.pop(old) for old in list(self._shared) if old < oldest]
        if done:
            self._shared[version] = done[0]
        else:
            new = [torch.empty(bucket.size, dtype=torch.uint8, device=self._mesh.device) for bucket in buckets]
            self._shared[version] = [(buffer, ray.put(buffer, _tensor_transport="nixl")) for buffer in new]
        return self._shared[version]
