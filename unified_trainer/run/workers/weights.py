"""The weights of one version as they travel to workers: a part from each training rank, in flat buffers with checksums.

No rank gathers the others' shards. The parts pass through Ray's object store, or a worker reads them from the memory of
the ranks by Ray's direct transport.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import ray
import torch
from ray import ObjectRef
from ray.experimental import set_target_for_ref
from torch import Tensor

from unified_trainer.parallel.device import synchronize
from unified_trainer.parallel.fsdp import copy_rows, first_row, held_rows, own_rows, to_local
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.run.settings.workers import Transport

BUCKET = 2**26  # bytes of a buffer at most, unless one tensor has more; 2**28 is slower on CPUs
START = 16  # a tensor begins at a multiple of it, so that it can be viewed in its dtype
PIECE = 2**16  # words with a sum of their own: at most 2**62, which int64 holds

Signature = tuple[tuple[str, tuple[int, ...], str], ...]


def signature(weights: Mapping[str, Tensor], rounded: Collection[str] = ()) -> Signature:
    """Return name, shape and dtype of every tensor, in order; those in `rounded` travel as bfloat16."""
    return tuple((key, tuple(weight.shape), str(_dtype(key, weight, rounded))) for key, weight in weights.items())


def _dtype(name: str, weight: Tensor, rounded: Collection[str]) -> torch.dtype:
    return torch.bfloat16 if name in rounded else weight.dtype


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


def buckets_of(weights: Mapping[str, Tensor], rounded: Collection[str] = ()) -> list[Bucket]:
    """Divide weights, in order, into buckets of at most BUCKET bytes; those in `rounded` travel as bfloat16."""
    buckets = [Bucket({})]
    for name, weight in weights.items():
        dtype = _dtype(name, weight, rounded)
        size = -(-math.prod(weight.shape) * dtype.itemsize // START) * START
        if buckets[-1].size and buckets[-1].size + size > BUCKET:
            buckets.append(Bucket({}))
        buckets[-1].places[name] = (buckets[-1].size, dtype, tuple(weight.shape))
        buckets[-1].size += size
    return buckets


@dataclass(frozen=True)
class Weights:
    """The rows of weights that one rank sends: the buffers, as NumPy arrays, or references by which they are read."""

    version: int
    signature: Signature  # of the whole weights
    first_rows: Mapping[str, int]  # of each weight of which this rank sends rows
    buckets: list[Bucket]
    buffers: Sequence[np.ndarray | ObjectRef]
    checksums: list[list[int]]

    def needed_by(self, weights: Mapping[str, Tensor]) -> "Weights":
        """Return these weights without the buffers of which this rank holds no row of `weights`."""
        needed = [
            (bucket, buffer, sums)
            for bucket, buffer, sums in zip(self.buckets, self.buffers, self.checksums, strict=True)
            if any(
                held_rows(weights[name], self.first_rows[name], (*shape, 1)[0])
                for name, (_, _, shape) in bucket.places.items()
            )
        ]
        buckets, buffers, checksums = map(list, zip(*needed, strict=True)) if needed else ([], [], [])
        return replace(self, buckets=buckets, buffers=buffers, checksums=checksums)

    def copy_to(self, weights: Mapping[str, Tensor]) -> int:
        """Copy into tensors of the same names, dtypes and shapes, and return how many elements were written.

        Raises RuntimeError for other tensors, or for changed bytes: no buffer with changed bytes is used, but those
        before it are. Of sharded tensors this rank's rows are written.
        """
        check_equal(self.signature, signature(weights))
        direct = any(isinstance(buffer, ObjectRef) for buffer in self.buffers)
        device = next(iter(weights.values())).device if direct else torch.device("cpu")
        size = max((bucket.size for bucket in self.buckets), default=0)
        memory, written = torch.empty(size, dtype=torch.uint8, device=device), 0
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
            for name, rows in bucket.views(arrived).items():
                written += copy_rows(rows, self.first_rows[name], weights[name])
        synchronize(device)
        return written


@torch.no_grad()
def copy_parts(parts: Sequence[Weights], weights: Mapping[str, Tensor]) -> None:
    """Copy the parts of all ranks into tensors; RuntimeError if they do not fit, are damaged or lack rows."""
    written, size = sum(part.copy_to(weights) for part in parts), sum(to_local(w).numel() for w in weights.values())
    if written != size:
        raise RuntimeError(f"weights of version {parts[0].version} arrived with {written} of {size} numbers")


class WeightSender:
    """Packs this rank's part of trained weights into buffers and gives them to workers."""

    def __init__(self, mesh: Mesh, transport: Transport = "object_store", rounded: Collection[str] = ()) -> None:
        """Weights in `rounded` travel as bfloat16."""
        self._mesh, self._transport, self._rounded = mesh, transport, rounded
        self.size = 0  # bytes of the last version, of all ranks
        # Buffers on the training device that workers may be reading, with Ray's references to them, by version.
        self._shared: dict[int, list[tuple[Tensor, ObjectRef]]] = {}

    def send(self, version: int, weights: Mapping[str, Tensor], oldest: int) -> ObjectRef:
        """Return a reference to this rank's part of the weights of a version.

        Nobody may need versions before `oldest` any more: their buffers are written again. Nothing waits for a worker
        or for another rank.
        """
        return ray.put(self.pack(version, weights, oldest))

    @torch.no_grad()
    def pack(self, version: int, weights: Mapping[str, Tensor], oldest: int) -> Weights:
        """Return what `send` sends."""
        own = own_rows(weights, self._mesh)
        buckets = [bucket for bucket in buckets_of(own, self._rounded) if bucket.size]
        self.size = sum(bucket.size for bucket in buckets_of(weights, self._rounded))
        sent: Sequence[np.ndarray | ObjectRef]
        if self._transport == "nixl":
            buffers, sent = zip(*self._buffers(version, buckets, oldest), strict=True) if buckets else ((), ())
        else:
            buffers = tuple(torch.empty(bucket.size, dtype=torch.uint8) for bucket in buckets)
            sent = [buffer.numpy() for buffer in buffers]
        for bucket, buffer in zip(buckets, buffers, strict=True):
            for name, place in bucket.views(buffer).items():
                place.copy_(own[name])
        first_rows = {name: first_row(weights[name]) for name in own}
        sums = [checksum(buffer) for buffer in buffers]  # which waits for the copies
        return Weights(version, signature(weights, self._rounded), first_rows, buckets, sent, sums)

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
