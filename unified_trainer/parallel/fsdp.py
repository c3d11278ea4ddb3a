"""Sharding a network over the ranks with FSDP2, and when its weights are gathered and its gradients reduced.

torch.distributed.fsdp and .tensor are imported where they are used: that takes half a second, also for a wrong flag.
"""

import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unified_trainer.parallel.device import can_pin
from unified_trainer.parallel.mesh import Mesh

ROUNDED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # layers whose weights autocast rounds in every pass


def shard(network: nn.Module, blocks: Sequence[nn.Module], mesh: Mesh, *, half: bool = False) -> None:
    """Apply FSDP2 to the network in place: each block is a unit, the rest is the root. A single rank changes nothing.

    The gradient of a weight becomes the mean of the gradients of all ranks, including those of a sequence group.

    `half` is for networks that only run under bf16 autocast. The weights that autocast rounds are rounded before they
    are gathered, which gives the same bits of the output for half of the bytes; their gradients are reduced in float32.
    The other weights (norms, modulation tables) take part in float32 operations: every rank keeps them whole, and
    `average_gradients` takes the mean of their gradients. With parallel.offload_weights all are gathered in float32.
    """
    if mesh.weights is None:
        return
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    # The networks of diffusers return a view. FSDP2 warns about in-place operations on it; there are none.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    offload = CPUOffloadPolicy(pin_memory=can_pin(mesh.device)) if mesh.config.offload_weights else OffloadPolicy()
    policy, whole = MixedPrecisionPolicy(), set[nn.Parameter]()
    if half and not mesh.config.offload_weights:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        whole = set(network.parameters()) - rounded_weights(network)
    for module in (*blocks, network):
        fully_shard(
            module,
            mesh=mesh.weights,
            reshard_after_forward=True,
            mp_policy=policy,
            offload_policy=offload,
            ignored_params=whole,
        )
        module.set_force_sum_reduction_for_comms(True)  # FSDP2 then divides itself: not every backend has a mean
    for first, second in itertools.pairwise(blocks):
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])


@contextmanager
def without_forward_prefetch(block: nn.Module, following: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, a pass that ends with this block does not gather the weights of the one block that follows, if any."""
    if is_unit(block):
        block.set_modules_to_forward_prefetch([])
    try:
        yield
    finally:
        if is_unit(block):
            block.set_modules_to_forward_prefetch([*following])


def is_unit(module: nn.Module) -> bool:
    """Whether FSDP2 gathers the module's weights."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def rounded_weights(network: nn.Module) -> set[nn.Parameter]:
    """Return the weights that autocast rounds in every pass."""
    return {p for module in network.modules() if isinstance(module, ROUNDED) for p in module.parameters(False)}


def average_gradients(weights: Sequence[nn.Parameter], mesh: Mesh) -> None:
    """Set the gradients of weights that every rank keeps whole to their mean over all ranks, in one collective.

    A weight without a gradient keeps none. RanksDivergedError if the ranks do not have gradients of the same weights.
    Averages that were taken before stay, so that it may be called after every backward pass.
    """
    if not weights or mesh.size == 1:
        return
    having = [number for number, p in enumerate(weights) if p.grad is not None]
    mesh.assert_same(f"gradients of {len(having)} weights that are not sharded, {crc32(repr(having).encode()):08x}")
    if having:
        gradients = [weights[number].grad for number in having]
        mean = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(mean)
        parts = mean.div_(mesh.size).split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [part.view_as(one) for part, one in zip(parts, gradients, strict=True)])


def exchange_gradients(network: nn.Module, *, last: bool, mesh: Mesh) -> None:
    """Set, before a backward pass, whether FSDP2 reduces gradients after it.

    `last` says that it is the last backward pass before an optimizer step; earlier passes reduce only under
    parallel.reduce_gradients "every".
    """
    if is_unit(network):
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
    if is_unit(network):
        network.set_reshard_after_backward(False, recurse=False)
        network.set_reshard_after_forward(not torch.is_grad_enabled(), recurse=not mesh.config.reshard_after_forward)


def reshard(network: nn.Module) -> None:
    """Free gathered weights, so that only this rank's shards remain; call it before the shards change."""
    if is_unit(network):
        network.reshard()


@contextmanager
def half_shards(network: nn.Module) -> Iterator[list[Tensor]]:
    """Inside, FSDP2 gathers bf16 copies of the float32 shards that it rounds otherwise: passes have the same bits.

    Yield these shards; nothing reads them inside, where passes have no gradient. None of a network that is not sharded
    or is gathered in float32. torch has no public way to it: the names that begin with an underscore are FSDP2's own.
    """
    states: list[Any] = [module._get_fsdp_state() for module in network.modules() if is_unit(module)]
    if is_unit(network):
        network._get_fsdp_state()._lazy_init()  # which would go back to the float32 shards before the first pass
        reshard(network)
    groups = [state._fsdp_param_group for state in states if state._fsdp_param_group]
    halved = [weight for group in groups for weight in group.fsdp_params if weight.param_dtype == torch.bfloat16]
    rounded = [weight for weight in halved if weight._sharded_param_data.dtype == torch.float32]
    shards = [weight._sharded_param_data for weight in rounded]
    for weight, shard in zip(rounded, shards, strict=True):
        weight._sharded_param_data = shard.bfloat16()
    try:
        yield shards
    finally:
        reshard(network)
        for weight, shard in zip(rounded, shards, strict=True):
            weight._sharded_param_data = shard


def storage_device(mesh: Mesh) -> torch.device:
    """Return the device that holds the weights between passes."""
    return torch.device("cpu") if mesh.config.offload_weights else mesh.device


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this rank may hold only a part of the tensor."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor; return other tensors unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def zero_rows(shape: Sequence[int], dtype: torch.dtype, mesh: Mesh) -> Tensor:
    """Return zeros in CPU memory whose rows are divided evenly over the data ranks, in order of `data_rank`.

    The number of rows must be divisible by that of the data ranks. A checkpoint of it loads on another number of ranks.
    """
    if mesh.samples is None:
        return torch.zeros(*shape, dtype=dtype)
    from torch.distributed.tensor import DTensor, Replicate, Shard

    own = torch.empty(shape[0] // mesh.data_size, *shape[1:], dtype=dtype, device="meta")
    return torch.zeros_like(DTensor.from_local(own, mesh.samples, [Shard(0), Replicate()]), device="cpu")


def first_row(tensor: Tensor) -> int:
    """Return how many rows of a sharded tensor come before this rank's shard; 0 of other tensors."""
    if not is_sharded(tensor) or not tensor.to_local().numel():
        return 0
    (first, *_) = tensor.__create_chunk_list__()[0].offsets
    return first


def offset_of(tensor: Tensor) -> int:
    """Return how many elements of a sharded tensor come before this rank's shard; 0 of other tensors."""
    return first_row(tensor) * math.prod(tensor.shape[1:])


@torch.no_grad()
def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm over all elements of all tensors, sharded ones and others (a collective if one is sharded).

    As in torch.nn.utils.get_total_norm it is the norm of the tensors' norms, but one collective serves all tensors.
    """
    sharded = [tensor for tensor in tensors if is_sharded(tensor)]
    whole = [tensor for tensor in tensors if not is_sharded(tensor)]
    norms = [*torch._foreach_norm(whole)] if whole else []
    if sharded:
        squares = torch.stack(torch._foreach_norm([tensor.to_local() for tensor in sharded])) ** 2
        for dimension, placement in enumerate(sharded[0].placements):
            if placement.is_shard():
                dist.all_reduce(squares, group=sharded[0].device_mesh.get_group(dimension))
        norms += [*(squares**0.5)]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


@torch.no_grad()
def clip(tensors: Sequence[Tensor], largest: float, norm: float) -> None:
    """Scale tensors of this total norm in place to the norm `largest`, if theirs is larger.

    The factor is that of torch.nn.utils.clip_grads_with_norm_, computed in float32 on the CPU: no device is asked.
    """
    factor = float(largest / (torch.tensor(norm, dtype=torch.float32) + 1e-6))
    if factor < 1:
        torch._foreach_mul_([to_local(tensor) for tensor in tensors], factor)


def local_part(whole: Tensor, like: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds of `like`, without communication; every rank has the whole."""
    if not is_sharded(like):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()


def full(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor on every rank (a collective); return other tensors unchanged."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def own_rows(weights: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """Return the rows of weights that this rank alone hands on: together the ranks hand on each row once.

    Of a sharded weight they are those of its shard, in the first of several copies; of others all, on the main rank.
    """
    return {name: to_local(weight.detach()) for name, weight in weights.items() if _hands_on(weight, mesh)}


def _hands_on(weight: Tensor, mesh: Mesh) -> bool:
    if not is_sharded(weight):
        return mesh.is_main
    where = zip(weight.placements, weight.device_mesh.get_coordinate(), strict=True)
    return weight.to_local().numel() > 0 and not any(number for axis, number in where if axis.is_replicate())


def held_rows(weight: Tensor, first: int, count: int) -> range:
    """Return which of `count` rows of a weight this rank holds, as numbers in the whole weight; `first` come before.

    A scalar is one row.
    """
    own, held = first_row(weight), [*to_local(weight).shape, 1][0]
    begin = max(first, own)
    return range(begin, max(begin, min(first + count, own + held)))


def copy_rows(rows: Tensor, first: int, weight: Tensor) -> int:
    """Copy rows of a weight, `first` of which come before, where this rank holds them; return how many elements."""
    own = to_local(weight)
    if own.dim():
        held, before = held_rows(weight, first, len(rows)), first_row(weight)
        own, rows = own[held.start - before : held.stop - before], rows[held.start - first : held.stop - first]
    own.copy_(rows)
    return rows.numel()


def cpu_copy(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of this rank's part of the weights in CPU memory."""
    return {name: weight.detach().to("cpu", copy=True) for name, weight in weights.items()}
