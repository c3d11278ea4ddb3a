"""Video sparse attention (VSA, arXiv:2505.13389): settings, tiles of tokens, and the attention in plain torch.

The tokens of a video form tiles. A coarse branch attends from the mean of each tile to the means of all tiles. Its
scores choose the tiles that the fine branch attends to, token by token. A gate for each channel, zero at the start,
adds the coarse branch to the fine one.
"""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Count, Decay, PeriodOrZero
from unified_trainer.basics.versions import install
from unified_trainer.parallel.device import has_flex_attention, has_sparse_kernels

Tokens = Float[Tensor, "b n heads d"]
Order = Int[Tensor, "b heads tiles tiles"]  # the tiles of keys of each tile of queries, of highest score first
KERNEL = "fastvideo_kernel"  # package
KERNEL_TILE, KERNEL_HEADS = (4, 4, 4), (64, 128)  # the tile and the head sizes that its kernels take
KERNELS = tuple(f"{KERNEL}::block_sparse_attn_{kind}" for kind in ("sm90", "triton"))  # their operations
INSTALL = f"{install('fastvideo')}; it is built for torch 2.12 and Python 3.12"
FLEX = 64  # tokens that a block of FlexAttention is a multiple of
FLEX_OPTIONS = {name: FLEX for name in ("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2")}


@dataclass(frozen=True)
class SparseAttentionConfig:
    """The settings of a role's sparse attention."""

    share: Decay = 0.0
    """Share of the tiles of keys that self-attention leaves out (VSA, arXiv:2505.13389); 0 is dense. At least one tile
    is kept."""
    warmup_updates: PeriodOrZero = 0
    """Updates of the role over which the share rises linearly from 0."""
    tile: tuple[Count, Count, Count] = (4, 4, 4)
    """Tokens of a tile along time, height and width."""

    def check(self, key: str) -> None:
        """Raise UserError, naming the key, for settings that contradict each other."""
        if not self.share and self != SparseAttentionConfig():
            raise UserError(f"{key} has settings and no share of tiles to leave out: set {key}.share")

    def lacks_kernel(self, device: str, head_size: int) -> str:
        """Return what keeps bf16 passes from the kernels of fastvideo-kernel; empty where they run on them."""
        if not has_sparse_kernels(device):
            return f"the device is {device}"
        if importlib.util.find_spec(KERNEL) is None:
            return f"the package is not installed ({INSTALL})"
        if self.tile != KERNEL_TILE:
            return f"sparse_attention.tile is {' '.join(map(str, self.tile))}, and they take 4 4 4"
        if head_size not in KERNEL_HEADS:
            return f"the heads have {head_size} channels, and they take 64 or 128"
        return ""

    def share_at(self, updates: int) -> float:
        """Return the share of tiles that is left out after so many updates of the role."""
        return self.share * min(1.0, updates / self.warmup_updates) if self.warmup_updates else self.share

    def kept(self, tiles: int, share: float) -> int:
        """Return how many of so many tiles of keys a tile of queries attends to."""
        return max(1, math.ceil((1 - share) * tiles))

    def grid(self, tokens: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the number of tiles along each axis of a video of so many tokens, the last ones cut."""
        time, height, width = (-(-size // tile) for size, tile in zip(tokens, self.tile, strict=True))
        return time, height, width

    def pairs(self, tokens: tuple[int, int, int], share: float) -> int:
        """Return the pairs of query and key of both branches, by tiles of equal size."""
        tiles, count = math.prod(self.grid(tokens)), math.prod(tokens)
        return count * count * self.kept(tiles, share) // tiles + tiles * tiles


DENSE = SparseAttentionConfig()


@dataclass(frozen=True)
class Tiles:
    """The tiles of one pass's tokens, which are in the order of time, height and width."""

    of_token: Int[Tensor, " n"]  # tile of each token
    slot: Int[Tensor, " n"]  # its place among the tiles in a row, each padded to the size of a whole one
    sizes: Int[Tensor, " tiles"]  # tokens of each tile
    kept: Int[Tensor, ""]  # tiles of keys that a tile of queries attends to
    whole: int  # slots of a tile

    @classmethod
    def of(cls, config: SparseAttentionConfig, tokens: tuple[int, int, int], share: float) -> "Tiles":
        """Return the tiles of a video of so many tokens along time, height and width, on the CPU."""
        grid = config.grid(tokens)
        at = torch.meshgrid(*(torch.arange(size) for size in tokens), indexing="ij")
        tile = [i // size for i, size in zip(at, config.tile, strict=True)]
        inside = [i % size for i, size in zip(at, config.tile, strict=True)]
        extent = [
            (length - index * size).clamp(max=size)
            for length, index, size in zip(tokens, tile, config.tile, strict=True)
        ]
        number = (tile[0] * grid[1] + tile[1]) * grid[2] + tile[2]
        within = (inside[0] * extent[1] + inside[1]) * extent[2] + inside[2]
        number, whole = number.flatten(), math.prod(config.tile)
        sizes = torch.bincount(number, minlength=math.prod(grid))
        kept = torch.tensor(config.kept(len(sizes), share), dtype=torch.int32)
        return cls(number, number * whole + within.flatten(), sizes.int(), kept, whole)

    def to(self, device: torch.device) -> "Tiles":
        """Return the tiles on a device, without waiting for it."""
        of_token, slot, sizes, kept = (
            part.to(device, non_blocking=True) for part in (self.of_token, self.slot, self.sizes, self.kept)
        )
        return Tiles(of_token, slot, sizes, kept, self.whole)

    def padded(self, x: Tokens) -> Float[Tensor, "b heads slots d"]:
        """Put the tokens tile after tile, with zeros at the end of tiles that are cut."""
        slots = x.new_zeros(x.shape[0], len(self.sizes) * self.whole, *x.shape[2:])
        return slots.index_copy(1, self.slot, x).transpose(1, 2).contiguous()

    def means(self, x: Tokens) -> Float[Tensor, "b heads tiles d"]:
        """Return the mean of each tile, summed in float32 and rounded to the precision of `x`."""
        sums = self.padded(x).unflatten(2, (-1, self.whole)).sum(3, dtype=torch.float32)
        return (sums / self.sizes[:, None]).to(x)

    def chosen(self, order: Order) -> Bool[Tensor, "b heads tiles tiles"]:
        """Return whether a tile of queries attends to a tile of keys: to the first kept tiles of its row."""
        places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
        return torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, places < self.kept)


Fine = Callable[[Tokens, Tokens, Tokens, Order, Tiles], Tokens]


def attend_sparsely(query: Tokens, key: Tokens, value: Tokens, gate: Tokens, tiles: Tiles, fine: Fine) -> Tokens:
    """Return gate * coarse + fine; no gradient goes through the choice of tiles.

    Equal scores choose the tile that comes first, on every device.
    """
    queries, keys, values = (tiles.means(part) for part in (query, key, value))
    scores = (queries @ keys.transpose(2, 3)).float() / math.sqrt(query.shape[3])
    coarse = scores.softmax(-1).to(values) @ values
    order = (-scores.detach()).argsort(dim=-1, stable=True)
    out = fine(query, key, value, order, tiles)
    return out + gate * coarse.transpose(1, 2).index_select(1, tiles.of_token)


def masked_fine(query: Tokens, key: Tokens, value: Tokens, order: Order, tiles: Tiles) -> Tokens:
    """Attend to the tokens of the first kept tiles of each row of `order`: all pairs are computed, and masked."""
    mask = tiles.chosen(order).index_select(2, tiles.of_token).index_select(3, tiles.of_token)
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)


def flex_fine(query: Tokens, key: Tokens, value: Tokens, order: Order, tiles: Tiles) -> Tokens:
    """Attend as `masked_fine` by FlexAttention, which computes the kept tiles alone: each is a block of its mask."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    from unified_trainer.models.masked_attention import compiled_flex_attention, listed  # imports diffusers

    block = -(-tiles.whole // FLEX) * FLEX
    slot = tiles.slot // tiles.whole * block + tiles.slot % tiles.whole
    wide, sizes = replace(tiles, slot=slot, whole=block), tiles.sizes
    chosen, full = tiles.chosen(order), sizes == block
    mask = BlockMask.from_kv_blocks(
        *listed(chosen & ~full),
        *listed(chosen & full),
        BLOCK_SIZE=block,
        mask_mod=lambda b, head, q, k: chosen[b, head, q // block, k // block] & (k % block < sizes[k // block]),
        seq_lengths=(len(sizes) * block,) * 2,
    )
    parts = (wide.padded(part) for part in (query, key, value))
    run = flex_attention if query.device.type == "cpu" else compiled_flex_attention()
    out = run(*parts, block_mask=mask, kernel_options=FLEX_OPTIONS)
    return out.transpose(1, 2).index_select(1, slot)


def plain_fine(device: torch.device) -> Fine:
    """Return the fine branch without kernels of another package; UserError for an accelerator without FlexAttention."""
    if device.type == "cpu":
        return masked_fine
    if has_flex_attention(device):
        return flex_fine
    raise UserError(
        f"sparse_attention.share: {device.type} has neither FlexAttention nor the kernels of {KERNEL}, and the mask of "
        "all pairs of tokens takes too much memory: leave it out"
    )


def kernel_fine() -> Fine:
    """Return the fine branch by fastvideo-kernel's block-sparse attention, which computes the kept tiles alone.

    Its operations are opaque to torch.compile, with a backward pass of their own; that for Hopper is taken where it is
    built.
    """
    from fastvideo_kernel.block_sparse_attn import (
        _get_sm90_ops,
        _is_sm90,
        block_sparse_attn_sm90,
        block_sparse_attn_triton,
    )

    operation = block_sparse_attn_sm90 if _is_sm90() and all(_get_sm90_ops()) else block_sparse_attn_triton

    def fine(query: Tokens, key: Tokens, value: Tokens, order: Order, tiles: Tiles) -> Tokens:
        parts = (tiles.padded(part) for part in (query, key, value))
        kept = tiles.kept.expand(order.shape[:3]).contiguous()
        out, _ = operation(*parts, order.int(), kept, tiles.sizes)
        return out.transpose(1, 2).index_select(1, tiles.slot)

    return fine
