"""Ulysses sequence parallelism (arXiv:2309.14509).

The k ranks of a sequence group split the tokens of a sample; inside attention they split its heads instead. Outside the
network every rank holds the whole sample and computes the whole loss. The weights of a rank therefore get the gradient
of its own tokens only. The backward of `gather_tokens` multiplies a rank's part by k, so that FSDP2's mean over ranks
is the gradient of the sample; weights applied after `gather_tokens` need no correction.
"""

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from unified_trainer.basics.errors import UserError
from unified_trainer.parallel.mesh import Mesh

Heads = Float[Tensor, "b n heads d"]


def check_heads(heads: int, mesh: Mesh) -> None:
    """Raise UserError unless the ranks of a sequence group can divide the attention heads."""
    if heads % mesh.config.sequence:
        raise UserError(f"parallel.sequence must divide the {heads} attention heads, but is {mesh.config.sequence}")


def split_tokens(x: Tensor, mesh: Mesh) -> Tensor:
    """Return this rank's part of x [b, tokens, ...] along dimension 1, padded with zeros to one length on all ranks."""
    ranks = mesh.config.sequence
    length = -(-x.shape[1] // ranks)
    part = x[:, mesh.sequence_rank * length :][:, :length]
    return pad(part, (0, 0) * (x.ndim - 2) + (0, length - part.shape[1]))


def gather_tokens(x: Tensor, tokens: int, mesh: Mesh) -> Tensor:
    """Concatenate the parts of all ranks along dimension 1 and return the first `tokens`, on every rank.

    The gradient of a part is k times what the loss of this rank gives, k the number of ranks (see the module).
    """
    return _Gather.apply(x, mesh)[:, :tokens]


def whole_gradient(x: Tensor, mesh: Mesh) -> Tensor:
    """Return `x`; its gradient becomes the mean over the sequence group, which is the gradient of the sample."""
    return _Mean.apply(x, mesh) if x.requires_grad else x


def tokens_to_heads(x: Heads, tokens: int, mesh: Mesh) -> Heads:
    """Exchange [b, tokens of this rank, all heads, d] for [b, all `tokens`, heads of this rank, d]."""
    ranks = mesh.config.sequence
    by_rank = x.unflatten(2, (ranks, -1)).movedim(2, 0)
    return _Exchange.apply(by_rank, mesh).movedim(0, 1).flatten(1, 2)[:, :tokens]


def heads_to_tokens(x: Heads, mesh: Mesh) -> Heads:
    """Exchange [b, all tokens, heads of this rank, d] for [b, tokens of this rank, all heads, d].

    Tokens are padded with zeros to one length on all ranks, as in `split_tokens`.
    """
    ranks = mesh.config.sequence
    padded = pad(x, (0, 0, 0, 0, 0, -x.shape[1] % ranks))
    by_rank = padded.unflatten(1, (ranks, -1)).movedim(1, 0)
    return _Exchange.apply(by_rank, mesh).movedim(0, 2).flatten(2, 3)


class _Exchange(torch.autograd.Function):
    """All-to-all over dimension 0: row i goes to rank i, row j comes from rank j."""

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
