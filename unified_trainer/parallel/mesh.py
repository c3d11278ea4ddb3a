"""The ranks of a run and what they tell each other."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from unified_trainer.parallel.device import BACKENDS, Device, pick_device


@dataclass(frozen=True)
class Mesh:
    """This process among its peers; `shards` is None for a single process."""

    device: torch.device
    rank: int = 0
    size: int = 1
    shards: DeviceMesh | None = None
    group: dist.ProcessGroup | None = None  # through which the ranks talk; None is the one they all joined

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @classmethod
    def join(cls, device: Device) -> "Mesh":
        """The mesh of the ranks that torchrun started, or of this process alone."""
        size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        picked = pick_device(device, int(os.environ.get("LOCAL_RANK", "0")))
        if size == 1:
            return cls(picked)
        if not dist.is_initialized():
            dist.init_process_group(BACKENDS[picked.type])
        return cls(picked, rank, size, init_device_mesh(picked.type, (size,), mesh_dim_names=("shard",)))

    def aside(self) -> "Mesh":
        """The same ranks on their CPUs, talking through a group of their own: for a thread beside the training."""
        group = dist.new_group(backend="gloo") if self.size > 1 else None
        return Mesh(torch.device("cpu"), self.rank, self.size, group=group)

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of every rank, in rank order; every rank brings as many."""
        if self.size == 1:
            return rows
        parts = [torch.empty_like(rows) for _ in range(self.size)]
        dist.all_gather(parts, rows.contiguous(), group=self.group)
        return torch.cat(parts)

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return bool(self.gather(torch.tensor([int(flag)], device=self.device)).any())

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.group)
