"""The ranks of a run, what each of them holds, and what they tell each other."""

import os
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from unified_trainer.parallel.device import BACKENDS, CONTROL_BACKEND, Device, pick_device

LONGEST_WORD = 128  # bytes that a rank tells the others at a time


@dataclass(frozen=True)
class ParallelConfig:
    replicate: int = 1  # copies of the weights; each is spread over shard x sequence ranks
    shard: int = 0  # ranks with samples of their own that share one copy of the weights; 0 takes the ranks left
    sequence: int = 1  # ranks that share the tokens of the same samples (Ulysses, arXiv:2309.14509)
    reshard_after_forward: bool = (
        True  # free gathered weights between forward and backward pass; False is faster and larger
    )
    reduce_gradients: Literal["last", "every"] = (
        "last"  # backward passes after which the ranks sum their gradients: the last
    )
    # before a move sends least, every one keeps only a rank's share of them in memory
    offload: bool = False  # keep weights and optimizer in CPU memory, copied to the device block by block
    timeout_minutes: float = 30.0  # how long a rank waits for the others before the run fails

    def degrees(self, ranks: int) -> "ParallelConfig":
        """With `shard` filled in; ValueError with the arithmetic when the ranks do not divide so."""
        if min(self.replicate, self.sequence) < 1 or self.shard < 0 or self.timeout_minutes <= 0:
            raise ValueError(
                "parallel.replicate and parallel.sequence must be at least 1, parallel.shard at least 0 and "
                f"parallel.timeout_minutes above 0, not {self.replicate}, {self.sequence}, {self.shard} and "
                f"{self.timeout_minutes:g}"
            )
        rest = self.replicate * self.sequence
        shard = self.shard or ranks // rest
        if rest * shard != ranks or not shard:
            told = self.shard or f"({ranks} // {rest})"
            raise ValueError(
                f"parallel.replicate x shard x sequence must be the {ranks} ranks, but "
                f"{self.replicate} x {told} x {self.sequence} = {rest * shard}"
            )
        if self.offload and ranks == 1:
            raise ValueError("parallel.offload needs more than one rank: a single process keeps its weights in place")
        return replace(self, shard=shard)


@dataclass(frozen=True)
class Mesh:
    """This process among its peers; of a single process, only the device counts.

    Ranks run sequence first, then shard, then replicate: neighbours share tokens.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    config: ParallelConfig = ParallelConfig(shard=1)  # with all degrees filled in
    weights: DeviceMesh | None = None  # replicate x (shard x sequence), or the latter alone
    samples: DeviceMesh | None = None  # data x sequence
    control_group: dist.ProcessGroup | None = None  # of all ranks' CPUs

    def __str__(self) -> str:
        config = self.config
        degrees = f"replicate {config.replicate} x shard {config.shard} x sequence {config.sequence}"
        return f"{self.size} on {self.device.type} = {degrees}"

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def data_size(self) -> int:
        """Among how many the samples of a step divide."""
        return self.size // self.config.sequence

    @property
    def data_rank(self) -> int:
        """Which of them this one holds; the ranks of a sequence group hold the same."""
        return self.rank // self.config.sequence

    @property
    def sequence_rank(self) -> int:
        """Which part of their tokens this rank works on."""
        return self.rank % self.config.sequence

    @property
    def sequence_group(self) -> dist.ProcessGroup:
        return self.samples.get_group("sequence")

    @classmethod
    def join(cls, device: Device, config: ParallelConfig = ParallelConfig()) -> "Mesh":
        """The mesh of the ranks that torchrun started, or of this process alone."""
        size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        config = config.degrees(size)
        picked = pick_device(device, int(os.environ.get("LOCAL_RANK", "0")))
        if size == 1:
            return cls(picked)
        timeout = timedelta(minutes=config.timeout_minutes)
        if not dist.is_initialized():
            dist.init_process_group(BACKENDS[picked.type], timeout=timeout)
        inner, data = config.shard * config.sequence, config.replicate * config.shard
        sharded = (("replicate", config.replicate), ("shard", inner))[config.replicate == 1 :]
        return cls(
            picked,
            rank,
            size,
            config,
            weights=_device_mesh(picked, dict(sharded)),
            samples=_device_mesh(picked, {"data": data, "sequence": config.sequence}),
            control_group=dist.new_group(backend=CONTROL_BACKEND, timeout=timeout),
        )

    def leave(self) -> None:
        """The last word of a run that went well."""
        if self.size > 1:
            dist.destroy_process_group()

    def for_thread(self) -> "Mesh":
        """The same ranks on their CPUs, talking through a group of their own: for a thread beside the training."""
        group = dist.new_group(backend=CONTROL_BACKEND) if self.size > 1 else None
        return Mesh(torch.device("cpu"), self.rank, self.size, control_group=group)

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of every holder of samples, in order of `data_rank`; every one brings as many."""
        if self.data_size == 1:
            return rows
        parts = [torch.empty_like(rows) for _ in range(self.data_size)]
        dist.all_gather(parts, rows.contiguous(), group=self.samples.get_group("data"))
        return torch.cat(parts)

    def all_gather_cpu(self, rows: Tensor) -> Tensor:
        """The rows of every rank, in rank order, on the CPU; every one brings as many."""
        rows = rows.cpu().contiguous()
        if self.size == 1:
            return rows
        parts = [torch.empty_like(rows) for _ in range(self.size)]
        dist.all_gather(parts, rows, group=self.control_group)
        return torch.cat(parts)

    def max(self, value: float) -> float:
        """Over all ranks."""
        return float(self.all_gather_cpu(torch.tensor([value], dtype=torch.float64)).max())

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return bool(self.max(float(flag)))

    def assert_same(self, point: str) -> None:
        """RuntimeError on all ranks, with what each said, unless all are at the same point.

        To be asked before the ranks exchange anything that only ranks at the same point can: else they would hang, or
        mistake one thing for another.
        """
        if self.size == 1:
            return
        mine = torch.tensor([[*point.encode()[:LONGEST_WORD].ljust(LONGEST_WORD)]], dtype=torch.uint8)
        points = [bytes(row).decode(errors="replace").strip() for row in self.all_gather_cpu(mine).tolist()]
        if len(set(points)) > 1:
            told = "; ".join(f"rank {rank}: {point}" for rank, point in enumerate(points))
            raise RuntimeError(f"ranks diverged: {told}")

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.control_group)


def where() -> str:
    """Which rank speaks, for messages; nothing when there is one."""
    return f" on rank {os.environ['RANK']}" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""


def _device_mesh(device: torch.device, degrees: dict[str, int]) -> DeviceMesh:
    return init_device_mesh(device.type, tuple(degrees.values()), mesh_dim_names=tuple(degrees))
