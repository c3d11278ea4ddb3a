"""Sharding a network over the ranks, and when its ranks exchange weights and gradients."""

import itertools
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from unified_trainer.parallel.device import can_pin
from unified_trainer.parallel.mesh import Mesh


def shard(network: nn.Module, blocks: Sequence[nn.Module], mesh: Mesh) -> None:
    """FSDP2 in place, block by block and the rest as the root; a single rank keeps the network as it is.

    The gradient of a weight becomes the mean of all ranks' gradients, those of a sequence group included.
    """
    if mesh.weights is None:
        return
    # diffusers' networks return a view; FSDP2 warns of in-place operations on it, and there are none.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    offload = CPUOffloadPolicy(pin_memory=can_pin(mesh.device)) if mesh.config.offload else OffloadPolicy()
    for module in (*blocks, network):
        fully_shard(module, mesh=mesh.weights, reshard_after_forward=True, offload_policy=offload)
        module.set_force_sum_reduction_for_comms(True)  # and divides after: not every backend has a mean
    for first, second in itertools.pairwise(blocks):
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])


def exchange_gradients(network: nn.Module, *, last: bool, mesh: Mesh) -> None:
    """Say before a backward pass whether it is the last before the weights move."""
    if isinstance(network, FSDPModule):
        network.set_requires_gradient_sync(last or mesh.config.reduce_gradients == "every")
        network.set_is_last_backward(last)


def set_reshard_policy(network: nn.Module, mesh: Mesh) -> None:
    """Say before a pass whether weights stay gathered after it: for its backward pass, or not at all.

    What a pass without gradient kept would be stale once the role has moved. For a backward pass the root's few
    weights are always kept: one that starts from the features, not from the output, would not gather them again. They
    are kept after it too, for the backward of another pass through the same network, until the next pass begins or
    the weights move.
    """
    reshard(network)
    if isinstance(network, FSDPModule):
        network.set_reshard_after_backward(False, recurse=False)
        network.set_reshard_after_forward(not torch.is_grad_enabled(), recurse=not mesh.config.reshard_after_forward)


def reshard(network: nn.Module) -> None:
    """Back to this rank's shards alone: what is still gathered would be stale once they change."""
    if isinstance(network, FSDPModule):
        network.reshard()


def storage_device(mesh: Mesh) -> torch.device:
    """Where weights are kept between passes."""
    return torch.device("cpu") if mesh.config.offload else mesh.device


def to_local(tensor: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
