"""Ulysses: the ranks of a sequence group share the tokens of a sample, and in attention its heads (arXiv:2309.14509).

What a group's ranks share is the work, not the result: outside the network each holds the whole of everything. A loss
is computed on each, so its gradient arrives k times, and a rank's weights get the gradient of its own tokens alone.
`gather_tokens` therefore hands back k times a rank's share: then the mean over the ranks, which FSDP2 takes over
samples anyhow, is the gradient of the sample, and weights beyond the gathering need nothing special.
"""

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from unified_trainer.parallel.mesh import Mesh

Heads = Float[Tensor, "b n heads d"]


def split_tokens(x: Tensor, mesh: Mesh) -> Tensor:
    """This rank's part of dimension 1, which zeros make divisible."""
    ranks = mesh.config.sequence
    share = -(-x.shape[1] // ranks)
    part = x[:, mesh.sequence_rank * share :][:, :share]
    return pad(part, (0, 0) * (x.ndim - 2) + (0, share - part.shape[1]))


def gather_tokens(x: Tensor, tokens: int, mesh: Mesh) -> Tensor:
    """The first `tokens` of what the ranks hold of dimension 1, on every rank."""
    return _Gather.apply(x, mesh)[:, :tokens]


def whole_gradient(x: Tensor, mesh: Mesh) -> Tensor:
    """`x` itself; its gradient becomes the sample's, where each rank has that of its own tokens."""
    return _Mean.apply(x, mesh) if x.requires_grad else x


def tokens_to_heads(x: Heads, tokens: int, mesh: Mesh) -> Heads:
    """From a rank's tokens with all heads to the sample's `tokens` with a rank's heads."""
    ranks = mesh.config.sequence
    by_rank = x.unflatten(2, (ranks, -1)).movedim(2, 0)
    return _Exchange.apply(by_rank, mesh).movedim(0, 1).flatten(1, 2)[:, :tokens]


def heads_to_tokens(x: Heads, mesh: Mesh) -> Heads:
    """Back again; the zeros that were added to divide the tokens are added anew."""
    ranks = mesh.config.sequence
    padded = pad(x, (0, 0, 0, 0, 0, -x.shape[1] % ranks))
    by_rank = padded.unflatten(1, (ranks, -1)).movedim(1, 0)
    return _Exchange.apply(by_rank, mesh).movedim(0, 2).flatten(2, 3)


class _Exchange(torch.autograd.Function):
    """Row i goes to rank i, and row j comes from rank j."""

    @staticmethod
    def forward(context: Any, x: Tensor, mesh: Mesh) -> Tensor:
        context.mesh = mesh
        x = x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=mesh.sequence_group)
        return received

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(gradient, context.mesh), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, mesh: Mesh) -> Tensor:
        context.mesh = mesh
        parts = [torch.empty_like(x) for _ in range(mesh.config.sequence)]
        dist.all_gather(parts, x.contiguous(), group=mesh.sequence_group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        mesh = context.mesh
        return gradient.chunk(mesh.config.sequence, 1)[mesh.sequence_rank] * mesh.config.sequence, None


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, mesh: Mesh) -> Tensor:
        context.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=context.mesh.sequence_group)
        return gradient / context.mesh.config.sequence, None
