"""Video sparse attention (VSA, arXiv:2505.13389): settings, tiles of tokens, and the attention in plain torch.

The tokens of a video form tiles. A coarse branch attends from the mean of each tile to the means of all tiles. Its
scores choose the tiles that the fine branch attends to, token by token. A gate for each channel, zero at the start,
adds the coarse branch to the fine one. Of a video in chunks each chunk has tiles of its own, and both branches attend
to the tiles of the chunks that a chunk sees: whether these are masked in one pass or come from a KV cache is equal.
"""

import importlib.util
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Count, Decay, PeriodOrZero
from unified_trainer.basics.versions import install
from unified_trainer.parallel.device import has_flex_attention, has_sparse_kernels

Tokens = Float[Tensor, "b _ heads d"]  # queries and keys may differ in number
Order = Int[Tensor, "b heads rows tiles"]  # the tiles of keys of each tile of queries, of highest score first
Grid = tuple[int, int, int]  # tokens or tiles along time, height and width
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

    def grid(self, tokens: Grid) -> Grid:
        """Return the number of tiles along each axis of a video of so many tokens, the last ones cut."""
        time, height, width = (-(-size // tile) for size, tile in zip(tokens, self.tile, strict=True))
        return time, height, width

    def pairs(self, own: Grid, seen: Sequence[Grid], share: float) -> int:
        """Return the pairs of query and key of both branches of a chunk that sees chunks, by tiles of equal size."""
        tiles, keys = (sum(map(math.prod, grids)) for grids in (map(self.grid, seen), seen))
        return math.prod(own) * keys * self.kept(tiles, share) // tiles + math.prod(self.grid(own)) * tiles


DENSE = SparseAttentionConfig()


@dataclass(frozen=True)
class Tiles:
    """The tiles of tokens, chunk after chunk, and of each in the order of time, height and width."""

    of_token: Int[Tensor, " n"]  # tile of each token
    slot: Int[Tensor, " n"]  # its place among the tiles in a row, each padded to the size of a whole one
    sizes: Int[Tensor, " tiles"]  # tokens of each tile
    whole: int  # slots of a tile

    @classmethod
    def of(cls, config: SparseAttentionConfig, tokens: Grid) -> "Tiles":
        """Return the tiles of a chunk of so many tokens along time, height and width, on the CPU."""
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
        return cls(number, number * whole + within.flatten(), sizes.int(), whole)

    @classmethod
    def joined(cls, chunks: Sequence["Tiles"]) -> "Tiles":
        """Return the tiles of chunks one after the other."""
        starts = itertools.accumulate((len(one.sizes) for one in chunks), initial=0)
        parts = [
            (one.of_token + i, one.slot + i * one.whole, one.sizes) for i, one in zip(starts, chunks, strict=False)
        ]
        of_token, slot, sizes = map(torch.cat, zip(*parts, strict=True))
        return cls(of_token, slot, sizes, chunks[0].whole)

    def to(self, device: torch.device) -> "Tiles":
        """Return the tiles on a device, without waiting for it."""
        of_token, slot, sizes = (x.to(device, non_blocking=True) for x in (self.of_token, self.slot, self.sizes))
        return Tiles(of_token, slot, sizes, self.whole)

    def padded_to(self, slots: int) -> "Tiles":
        """Return the tiles with so many slots each."""
        return replace(self, slot=self.slot // self.whole * slots + self.slot % self.whole, whole=slots)

    def padded(self, x: Tokens) -> Float[Tensor, "b heads slots d"]:
        """Put the tokens tile after tile, with zeros at the end of tiles that are cut."""
        slots = x.new_zeros(x.shape[0], len(self.sizes) * self.whole, *x.shape[2:])
        return slots.index_copy(1, self.slot, x).transpose(1, 2).contiguous()

    def means(self, x: Tokens) -> Float[Tensor, "b heads tiles d"]:
        """Return the mean of each tile, summed in float32 and rounded to the precision of `x`."""
        sums = self.padded(x).unflatten(2, (-1, self.whole)).sum(3, dtype=torch.float32)
        return (sums / self.sizes[:, None]).to(x)


@dataclass(frozen=True)
class ChunkTiles:
    """The tiles of a pass's queries and keys: the queries are those of the last chunks of keys."""

    queries: Tiles
    keys: Tiles
    kept: Int[Tensor, " rows"]  # tiles of keys that each tile of queries attends to
    seen: Bool[Tensor, "rows tiles"] | None  # those that it chooses them from; None: all

    @classmethod
    def of(
        cls, config: SparseAttentionConfig, chunks: Sequence[Grid], sees: Bool[Tensor, "own chunks"], share: float
    ) -> "ChunkTiles":
        """Return the tiles of chunks of so many tokens, on the CPU; `sees` has a row for each chunk of queries.

        The share is one of the tiles that a chunk sees: as many are kept in one masked pass as from a KV cache.
        """
        tiles = [Tiles.of(config, tokens) for tokens in chunks]
        counts = torch.tensor([len(one.sizes) for one in tiles])
        seen = sees.repeat_interleave(counts, 1).repeat_interleave(counts[-len(sees) :], 0)
        kept = torch.tensor([config.kept(count, share) for count in seen.sum(1).tolist()], dtype=torch.int32)
        own = Tiles.joined(tiles[-len(sees) :])
        return cls(own, Tiles.joined(tiles), kept, None if bool(seen.all()) else seen)

    def to(self, device: torch.device) -> "ChunkTiles":
        """Return the tiles on a device, without waiting for it."""
        seen = None if self.seen is None else self.seen.to(device, non_blocking=True)
        return ChunkTiles(self.queries.to(device), self.keys.to(device), self.kept.to(device, non_blocking=True), seen)

    def chosen(self, order: Order) -> Bool[Tensor, "b heads rows tiles"]:
        """Return whether a tile of queries attends to a tile of keys: to the first kept tiles of its row."""
        places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
        return torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, places < self.kept[:, None])


Fine = Callable[[Tokens, Tokens, Tokens, Order, ChunkTiles], Tokens]


def attend_sparsely(query: Tokens, key: Tokens, value: Tokens, gate: Tokens, tiles: ChunkTiles, fine: Fine) -> Tokens:
    """Return gate * coarse + fine; no gradient goes through the choice of tiles.

    Equal scores choose the tile that comes first, on every device.
    """
    queries, keys, values = tiles.queries.means(query), tiles.keys.means(key), tiles.keys.means(value)
    scores = (queries @ keys.transpose(2, 3)).float() / math.sqrt(query.shape[3])
    if tiles.seen is not None:
        scores = scores.masked_fill(~tiles.seen, -math.inf)
    coarse = scores.softmax(-1).to(values) @ values
    order = (-scores.detach()).argsort(dim=-1, stable=True)
    out = fine(query, key, value, order, tiles)
    return out + gate * coarse.transpose(1, 2).index_select(1, tiles.queries.of_token)


def masked_fine(query: Tokens, key: Tokens, value: Tokens, order: Order, tiles: ChunkTiles) -> Tokens:
    """Attend to the tokens of the first kept tiles of each row of `order`: all pairs are computed, and masked."""
    chosen = tiles.chosen(order)
    mask = chosen.index_select(2, tiles.queries.of_token).index_select(3, tiles.keys.of_token)
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)


def flex_fine(query: Tokens, key: Tokens, value: Tokens, order: Order, tiles: ChunkTiles) -> Tokens:
    """Attend as `masked_fine` by FlexAttention, which computes the kept tiles alone: each is a block of its mask."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    from unified_trainer.models.masked_attention import compiled_flex_attention, listed  # imports diffusers

    block = -(-tiles.keys.whole // FLEX) * FLEX
    queries, keys = tiles.queries.padded_to(block), tiles.keys.padded_to(block)
    sizes, chosen = keys.sizes, tiles.chosen(order)
    full = sizes == block
    mask = BlockMask.from_kv_blocks(
        *listed(chosen & ~full),
        *listed(chosen & full),
        BLOCK_SIZE=block,
        mask_mod=lambda b, head, q, k: chosen[b, head, q // block, k // block] & (k % block < sizes[k // block]),
        seq_lengths=(len(queries.sizes) * block, len(sizes) * block),
    )
    parts = queries.padded(query), keys.padded(key), keys.padded(value)
    run = flex_attention if query.device.type == "cpu" else compiled_flex_attention()
    out = run(*parts, block_mask=mask, kernel_options=FLEX_OPTIONS)
    return out.transpose(1, 2).index_select(1, queries.slot)


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


def where_equal(kernel: Fine, other: Fine) -> Fine:
    """Return `kernel` for passes with as many queries as keys, and `other` for those that read a KV cache."""

    def fine(query: Tokens, key: Tokens, value: Tokens, order: Order, tiles: ChunkTiles) -> Tokens:
        own = kernel if query.shape == key.shape else other
        return own(query, key, value, order, tiles)

    return fine


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

    def fine(query: Tokens, key: Tokens, value: Tokens, order: Order, tiles: ChunkTiles) -> Tokens:
        parts = tiles.queries.padded(query), tiles.keys.padded(key), tiles.keys.padded(value)
        kept = tiles.kept.expand(order.shape[:3]).contiguous()
        out, _ = operation(*parts, order.int(), kept, tiles.keys.sizes)
        return out.transpose(1, 2).index_select(1, tiles.queries.slot)

    return fine
