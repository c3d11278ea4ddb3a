"""Attention with and without a mask by latent frame, and the kernels that compute it.

A mask is FlexAttention's, which skips blocks of tokens, or dense.
"""

import functools
from collections.abc import Callable

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from unified_trainer.parallel.device import GRAPHS, other_attention

Queries = Float[Tensor, "b q heads d"]
Keys = Float[Tensor, "b k heads d"]
Mask = Bool[Tensor, "q k"] | BlockMask  # by token

BLOCK = 128  # tokens of a block that FlexAttention computes or skips


def attend(query: Queries, key: Keys, value: Keys, mask: Mask | None) -> Queries:
    """Compute softmax(query key / sqrt(d)) value over the keys that the mask allows; None allows all."""
    other = other_attention(query.device)
    if other and mask is None and query.dtype == torch.bfloat16 and not torch.is_grad_enabled():
        return dispatch_attention_fn(query, key, value, backend=other)
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    if isinstance(mask, BlockMask):
        return compiled_flex_attention()(query, key, value, block_mask=mask).transpose(1, 2)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)


def token_mask(frame_mask: Bool[Tensor, "t t"], tokens: int, *, flex: bool) -> Mask:
    """Expand a mask by frame to one by token, `tokens` per frame: a FlexAttention BlockMask, or a dense mask."""
    if flex:
        return _block_mask(frame_mask, tokens)
    return frame_mask.repeat_interleave(tokens, 0).repeat_interleave(tokens, 1)


def _block_mask(frame_mask: Bool[Tensor, "t t"], tokens: int) -> BlockMask:
    """Build what `create_block_mask` builds, from the frames of each block: the n x n mask is never in memory."""
    frames, device = len(frame_mask), frame_mask.device
    n = frames * tokens
    first = torch.arange(0, n, BLOCK, device=device)[:, None]
    frame = torch.arange(frames, device=device)
    touches = (first // tokens <= frame) & (frame <= (first + BLOCK - 1).clamp(max=n - 1) // tokens)
    touches, sees = touches.float(), frame_mask.float()
    inside = first + BLOCK <= n
    full = (touches @ (1 - sees) @ touches.T == 0) & inside & inside.T
    partial = (touches @ sees @ touches.T > 0) & ~full

    return BlockMask.from_kv_blocks(
        *listed(partial[None, None]),
        *listed(full[None, None]),
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda _sample, _head, query, key: frame_mask[query // tokens, key // tokens],
        seq_lengths=(n, n),
    )


def listed(blocks: Bool[Tensor, "b heads q k"]) -> tuple[Tensor, Tensor]:
    """Count the key blocks of each query block, and list them first."""
    order = (~blocks).int().argsort(dim=-1, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.int()


@functools.cache
def compiled_flex_attention() -> Callable[..., Tensor]:
    limit = torch._dynamo.config.recompile_limit  # beyond it, it would run uncompiled: whole products in memory
    torch._dynamo.config.recompile_limit = max(limit, GRAPHS)
    return torch.compile(flex_attention, dynamic=False)
