"""Sharding a network over the ranks."""

import warnings

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from unified_trainer.parallel.mesh import Mesh


def shard(network: nn.Module, blocks: nn.ModuleList, mesh: Mesh) -> None:
    """FSDP2 in place, block by block and the rest as the root; a single rank keeps the network as it is."""
    if mesh.shards is None:
        return
    # diffusers' networks return a view; FSDP2 warns of in-place operations on it, and there are none.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for block in blocks:
        fully_shard(block, mesh=mesh.shards)
    fully_shard(network, mesh=mesh.shards)


def forget_gathered(network: nn.Module) -> None:
    """Gather anew at the next pass: the shards were changed by hand, and a root stays gathered without a backward."""
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor
