"""Sharding a network over the ranks with FSDP2, and when its weights are gathered and its gradients reduced."""

import itertools
import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from unified_trainer.parallel.device import can_pin
from unified_trainer.parallel.mesh import Mesh


def shard(network: nn.Module, blocks: Sequence[nn.Module], mesh: Mesh) -> None:
    """Apply FSDP2 to the network in place: each block is a unit, the rest is the root. A single rank changes nothing.

    The gradient of a weight becomes the mean of the gradients of all ranks, including those of a sequence group.
    """
    if mesh.weights is None:
        return
    # The networks of diffusers return a view. FSDP2 warns about in-place operations on it; there are none.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    offload = CPUOffloadPolicy(pin_memory=can_pin(mesh.device)) if mesh.config.offload else OffloadPolicy()
    for module in (*blocks, network):
        fully_shard(module, mesh=mesh.weights, reshard_after_forward=True, offload_policy=offload)
        module.set_force_sum_reduction_for_comms(True)  # FSDP2 then divides itself: not every backend has a mean
    for first, second in itertools.pairwise(blocks):
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])


def exchange_gradients(network: nn.Module, *, last: bool, mesh: Mesh) -> None:
    """Set, before a backward pass, whether FSDP2 reduces gradients after it.

    `last` says that it is the last backward pass before an optimizer step; earlier passes reduce only under
    parallel.reduce_gradients "every".
    """
    if isinstance(network, FSDPModule):
        network.set_requires_gradient_sync(last or mesh.config.reduce_gradients == "every")
        network.set_is_last_backward(last)


def set_reshard_policy(network: nn.Module, mesh: Mesh) -> None:
    """Set, before a forward pass, which weights stay gathered after it.

    Without gradient, none stay: they would be stale after the next optimizer step. With gradient, the root's weights
    stay, because a backward pass that starts from the features and not from the output would not gather them again;
    they also stay after the backward pass, for the backward of another pass through the same network. The blocks'
    weights stay only if parallel.reshard_after_forward is False.
    """
    reshard(network)
    if isinstance(network, FSDPModule):
        network.set_reshard_after_backward(False, recurse=False)
        network.set_reshard_after_forward(not torch.is_grad_enabled(), recurse=not mesh.config.reshard_after_forward)


def reshard(network: nn.Module) -> None:
    """Free gathered weights, so that only this rank's shards remain; call it before the shards change."""
    if isinstance(network, FSDPModule):
        network.reshard()


def storage_device(mesh: Mesh) -> torch.device:
    """Return the device that holds the weights between passes."""
    return torch.device("cpu") if mesh.config.offload else mesh.device


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor; return other tensors unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_part(whole: Tensor, like: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds of `like`, without communication; every rank has the whole."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()


def full(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor on every rank (a collective); return other tensors unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(weights: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """Return the whole weights in CPU memory on the main rank, and nothing on the others (a collective)."""
    whole = {}
    for name, weight in weights.items():  # one after the other: only the main rank keeps them
        one = full(weight.detach())
        if mesh.is_main:
            whole[name] = one.cpu()
    return whole


def cpu_copy(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of this rank's part of the weights in CPU memory."""
    return {name: weight.detach().to("cpu", copy=True) for name, weight in weights.items()}
