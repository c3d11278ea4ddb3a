"""The ranks of a run: parallel degrees, device meshes, and collectives."""

import math
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Count, CountOrZero, Minutes
from unified_trainer.basics.types import of_kind
from unified_trainer.parallel.device import (
    BACKENDS,
    CONTROL_BACKEND,
    TF32,
    Attention,
    Device,
    pick_device,
    use_attention,
    use_tf32,
)
from unified_trainer.parallel.torchrun import check_started, environment_number, size_and_rank

POINT_BYTES = 128  # longest description that `Mesh.assert_same` compares


class RanksDivergedError(UserError, RuntimeError):
    """Ranks are at different points of the program, because of different settings, data or code."""


@dataclass(frozen=True)
class ParallelConfig:
    replicate: CountOrZero = 1
    """Copies of the weights; each copy is sharded over shard x sequence ranks. 0 takes all remaining ranks."""
    shard: CountOrZero = 0
    """Ranks with samples of their own that share one copy of the weights; 0 takes all remaining ranks. With both 0
    there is one copy."""
    sequence: Count = 1
    """Ranks that share the tokens of the same samples (Ulysses, arXiv:2309.14509)."""
    reshard_after_forward: bool = True
    """Free gathered weights after forward; keeping them is faster and uses more memory."""
    reduce_gradients: Literal["last", "every"] = "last"
    """Reduce after the last backward (fast) or all (less memory)."""
    offload_weights: bool = False
    """Keep weights and gradients in CPU memory; the weights are copied to the device block by block. Without
    offload_optimizer the device updates them, a part at a time, and with it the CPU does."""
    offload_optimizer: bool = False
    """Keep AdamW's moments in CPU memory. Without offload_weights a part at a time comes to the device in each
    update."""
    attention: Attention = "auto"
    """Kernel of unmasked attention that is tried first; `auto` is torch's own choice. flash_3, flash_4 and sage are
    FlashAttention 3 and 4 and SageAttention, which the package kernels fetches from the hub, and compute passes in bf16
    without gradient; sage
    is refused for methods that train on rewards of their samples."""
    tf32: TF32 = "convolutions"
    """Float32 operations that round their inputs to TF32 (10 bits of mantissa) on a GPU, which is faster: none;
    convolutions, such as those of a VAE in fp32, which is torch's default; or all, with matrix products."""
    compare_passes: bool = True
    """Compare before each pass of a network whether all ranks run the same, by a collective of CPUs. Without it ranks
    that run different passes wait until timeout_minutes are over."""
    timeout_minutes: Minutes = 30.0
    """Minutes that a rank waits for the others before the run fails."""

    def degrees(self, ranks: int) -> "ParallelConfig":
        """Return the config with both numbers filled in; UserError if replicate x shard x sequence is not `ranks`."""
        replicate = self.replicate or max(1, ranks // (self.shard * self.sequence or ranks))
        rest = replicate * self.sequence
        shard = self.shard or ranks // rest
        if rest * shard != ranks or not shard:
            factor = self.shard or f"({ranks} // {rest})"
            raise UserError(
                f"parallel.replicate x shard x sequence must be the {ranks} ranks, but "
                f"{replicate} x {factor} x {self.sequence} = {rest * shard}"
            )
        if self.offload_weights and ranks == 1:
            raise UserError(
                "parallel.offload_weights needs more than one rank: a single process keeps its weights in place; "
                "parallel.offload_optimizer does not"
            )
        return replace(self, replicate=replicate, shard=shard)


@dataclass(frozen=True)
class Mesh:
    """The rank of this process, its device, and its groups; a single process needs only the device.

    The sequence axis varies fastest over ranks, then shard, then replicate: neighboring ranks share tokens.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    config: ParallelConfig = ParallelConfig(shard=1)  # with all degrees filled in
    weights: DeviceMesh | None = None  # for FSDP2: replicate x (shard x sequence), or only the latter
    samples: DeviceMesh | None = None  # data (replicate x shard) x sequence
    control_group: dist.ProcessGroup | None = None  # all ranks, on their CPUs
    first_on_node: bool = True  # whether this rank does what is done once per node

    def __str__(self) -> str:
        config = self.config
        degrees = f"replicate {config.replicate} x shard {config.shard} x sequence {config.sequence}"
        return f"{self.size} on {self.device.type} = {degrees}"

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and messages."""
        return self.rank == 0

    @property
    def data_size(self) -> int:
        """Number of parts into which the samples of a step are divided: replicate x shard."""
        return self.size // self.config.sequence

    @property
    def data_rank(self) -> int:
        """Index of the part that this rank holds; the ranks of a sequence group hold the same part."""
        return self.rank // self.config.sequence

    @property
    def sequence_rank(self) -> int:
        """Index of the part of the tokens that this rank computes."""
        return self.rank % self.config.sequence

    @property
    def sequence_group(self) -> dist.ProcessGroup:
        """The ranks that share the tokens of this rank's samples."""
        return self._group("sequence")

    def _group(self, axis: str) -> dist.ProcessGroup:
        """Return the ranks along an axis of `samples`, which several ranks have."""
        return of_kind(DeviceMesh, self.samples).get_group(axis)

    @classmethod
    def join(cls, device: Device, config: ParallelConfig = ParallelConfig(), store: dist.Store | None = None) -> "Mesh":
        """Return the mesh of the ranks that torchrun started, or of this process alone.

        `store` is that of `meeting`, where the ranks have met; without one they meet here.
        Raises UserError if the degrees do not fit the ranks, the device or its attention kernel is missing, or an
        environment variable of torchrun is not an integer.
        """
        size, rank = size_and_rank()
        config = config.degrees(size)
        local = environment_number("LOCAL_RANK", 0)
        picked = pick_device(device, local)
        use_attention(config.attention, picked)
        use_tf32(config.tf32)
        if size == 1:
            return cls(picked, config=config)
        timeout = timedelta(minutes=config.timeout_minutes)
        if not dist.is_initialized():
            check_started(size)
            if store is None:
                dist.init_process_group(BACKENDS[picked.type], timeout=timeout)
            else:
                store.set_timeout(timeout)
                group = {"store": dist.PrefixStore("default_pg", store), "rank": rank, "world_size": size}
                dist.init_process_group(BACKENDS[picked.type], timeout=timeout, **group)
        inner, data = config.shard * config.sequence, config.replicate * config.shard
        sharded = (("replicate", config.replicate), ("shard", inner))[config.replicate == 1 :]
        return cls(
            picked,
            rank,
            size,
            config,
            weights=_device_mesh(picked, dict(sharded), timeout),
            samples=_device_mesh(picked, {"data": data, "sequence": config.sequence}, timeout),
            control_group=dist.new_group(backend=CONTROL_BACKEND, timeout=timeout),
            first_on_node=local == 0,
        )

    @classmethod
    def alone(cls, device: Device) -> "Mesh":
        """Return the mesh of this process alone, on the device of its local rank if torchrun started it."""
        picked = pick_device(device, environment_number("LOCAL_RANK", 0))
        use_attention("auto", picked)
        use_tf32("convolutions")
        return cls(picked)

    def leave(self) -> None:
        """Destroy the process groups; call it at the end of a run without errors."""
        if self.size > 1:
            dist.destroy_process_group()

    def for_thread(self) -> "Mesh":
        """Return a mesh of the same ranks on their CPUs with its own control group, for use in another thread."""
        timeout = timedelta(minutes=self.config.timeout_minutes)
        group = dist.new_group(backend=CONTROL_BACKEND, timeout=timeout) if self.size > 1 else None
        return Mesh(torch.device("cpu"), self.rank, self.size, control_group=group)

    def gather(self, rows: Tensor) -> Tensor:
        """Concatenate the rows of all data ranks in order of `data_rank`; the result is on the device of `rows`.

        A collective; every rank must bring the same number of rows.
        """
        if self.data_size == 1:
            return rows
        rows = rows.contiguous()  # so are the parts, as NCCL wants them
        parts = [torch.empty_like(rows) for _ in range(self.data_size)]
        dist.all_gather(parts, rows, group=self._group("data"))
        return torch.cat(parts)

    def all_gather_cpu(self, rows: Tensor) -> Tensor:
        """Concatenate the rows of all ranks in rank order, on the CPU.

        A collective of the control group; every rank must bring the same number of rows.
        """
        rows = rows.cpu().contiguous()
        if self.size == 1:
            return rows
        parts = [torch.empty_like(rows) for _ in range(self.size)]
        dist.all_gather(parts, rows, group=self.control_group)
        return torch.cat(parts)

    def max(self, value: float) -> float:
        """Return the maximum of a float over all ranks (a CPU collective)."""
        return float(self.all_gather_cpu(torch.tensor([value], dtype=torch.float64)).max())

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank (a CPU collective)."""
        return bool(self.max(float(flag)))

    def assert_same(self, point: str) -> None:
        """Raise RanksDivergedError on all ranks, with the point of each, unless `point` is equal on all.

        Call it before a collective that only ranks at the same point of the program may enter: other ranks would hang,
        or exchange the wrong tensors. Only the first POINT_BYTES bytes are compared.
        """
        if self.size == 1:
            return
        own = torch.tensor([[*point.encode()[:POINT_BYTES].ljust(POINT_BYTES)]], dtype=torch.uint8)
        points = [bytes(row).decode(errors="replace").strip() for row in self.all_gather_cpu(own).tolist()]
        if len(set(points)) > 1:
            by_rank = "; ".join(f"rank {rank}: {point}" for rank, point in enumerate(points))
            raise RanksDivergedError(f"ranks diverged: {by_rank}")

    def assert_same_pass(self, point: str) -> None:
        """Do as `assert_same` before a pass of a network, unless `parallel.compare_passes` is off."""
        if self.config.compare_passes:
            self.assert_same(point)

    def broadcast(self, text: str) -> str:
        """Return the main rank's text on every rank (a CPU collective)."""
        return self.all_gather_text(text if self.is_main else "")[0]

    def all_gather_text(self, text: str) -> list[str]:
        """Return the texts of all ranks in rank order, without spaces at their ends (a CPU collective)."""
        own = text.encode()
        own = own.ljust(int(self.max(len(own))))
        rows = self.all_gather_cpu(torch.tensor([[*own]], dtype=torch.uint8))
        return [bytes(row).decode().rstrip() for row in rows.tolist()]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier(group=self.control_group)


def peer_lost(error: Exception) -> bool:
    """Return whether a collective failed because another rank has ended."""
    lost = ("Connection closed by peer", "Connection reset by peer", "remote process exited", "Broken pipe")
    return isinstance(error, dist.DistError) or any(words in str(error) for words in lost)


def waited_in_vain(error: RuntimeError) -> bool:
    """Return whether a collective was given up after its timeout."""
    return "Timed out waiting" in str(error)


def _device_mesh(device: torch.device, degrees: dict[str, int], timeout: timedelta) -> DeviceMesh:
    """Return a mesh whose groups all have the timeout, which `init_device_mesh` would leave at that of the backend."""
    ranks = torch.arange(math.prod(degrees.values())).view(*degrees.values())
    groups = []
    for axis, degree in enumerate(degrees.values()):
        rows = ranks.movedim(axis, -1).reshape(-1, degree).tolist()
        own = dist.group.WORLD if len(rows) == 1 else dist.new_subgroups_by_enumeration(rows, timeout=timeout)[0]
        groups.append(own)
    joined = groups if len(groups) > 1 else groups[0]
    return DeviceMesh.from_group(joined, device.type, ranks, mesh_dim_names=tuple(degrees))
