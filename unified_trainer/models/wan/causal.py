"""Wan as a causal model with a KV cache: the same weights, chunk by chunk (Self-Forcing, arXiv:2506.08009).

The mask and the cached keys and values are passed to the blocks with the rotary embedding, which is computed at
absolute latent frames.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from jaxtyping import Bool, Float
from torch import Tensor, nn

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.types import Condition, Latents, PerFrame, PerSample, of_kind
from unified_trainer.models.base import Cache
from unified_trainer.models.masked_attention import Mask, token_mask
from unified_trainer.models.wan.attention import Finished, KeysValues, LayerLists, Pass, PastKeys, rotate, set_attention
from unified_trainer.models.wan.model import WanModel, network_time
from unified_trainer.numerics.chunks import ChunkConfig, block_causal_mask, teacher_forcing_mask
from unified_trainer.parallel.device import has_flex_attention


@dataclass
class WanCache:
    """The KV cache of one rollout, without gradient; only `append` writes to it, and it never changes a tensor."""

    chunks: ChunkConfig
    seen: int = 0  # latent frames finished so far: the place of the next chunk in the video
    past: tuple[Finished, ...] = ()
    text: LayerLists = field(default_factory=list)  # of the cross-attention, filled by the first pass without gradient

    @property
    def resident(self) -> list[int]:
        """The latent frames in the cache."""
        return [frame for chunk in self.past for frame in chunk.frames]

    def start_prompt(self) -> None:
        self.text = []

    def attended(self) -> tuple[Finished, ...]:
        """Return what the next chunk attends to."""
        return self.past


@dataclass
class RollingSink(WanCache):
    """A cache whose sink is turned along with the window, as Reward Forcing (arXiv:2512.04678) numbers cached frames.

    A rotary embedding is a rotation: the sink's keys at frame s, turned by n frames, are those at s + n up to rounding.
    """

    positions: "_Positions" = field(kw_only=True)

    def attended(self) -> tuple[Finished, ...]:
        by = self.seen - self.chunks.window_frames
        return self.past if by <= 0 else tuple(self._moved(chunk, by) for chunk in self.past)

    def _moved(self, chunk: Finished, by: int) -> Finished:
        turns = [by if frame < self.chunks.sink_frames else 0 for frame in chunk.frames]
        if not any(turns):
            return chunk
        return replace(chunk, own=[(self.positions.turned(key, turns), value) for key, value in chunk.own])


class Cached(NamedTuple):
    """The keys and values that a pass reads or records besides its own: fields of `Pass` behind the mask, in order."""

    past: tuple[Finished, ...] = ()
    text: LayerLists | None = None
    recorded: LayerLists | None = None


NOTHING_CACHED = Cached()
PLAIN: tuple[list[int], Mask | None, Cached] = [], None, NOTHING_CACHED  # all frames of a video, without a mask


class CausalWanModel(WanModel):
    """A causal Wan transformer with a KV cache; `velocity` is that of the bidirectional model."""

    def __init__(self, network: WanTransformer3DModel, folder: Path | None = None) -> None:
        super().__init__(network, folder)
        if network.config.patch_size[0] != 1:
            raise UserError(f"a causal Wan cannot patch over time, but patch_size is {network.config.patch_size}")
        self._positions = network.rope = _Positions(network.rope)
        set_attention(network.blocks)

    def velocity_masked(
        self,
        x_t: Latents,
        sigma: PerSample | PerFrame,
        cond: Condition,
        chunks: ChunkConfig,
        clean: Latents | None = None,
    ) -> Latents:
        frames = x_t.shape[2]
        positions = list(range(frames))
        if clean is None:
            return self._pass(x_t, sigma, cond, positions, block_causal_mask(chunks, frames))
        sigma = _by_frame(sigma, frames)
        levels = torch.cat([torch.full_like(sigma, chunks.context_noise), sigma], 1)
        both = torch.cat([clean.to(x_t), x_t], 2)
        return self._pass(both, levels, cond, positions * 2, teacher_forcing_mask(chunks, frames))[:, :, frames:]

    def velocity_cached(self, x_t: Latents, sigma: PerSample, cond: Condition, cache: Cache) -> Latents:
        own = of_kind(WanCache, cache)
        return self._pass(x_t, sigma, cond, _next_frames(x_t, own), cached=_attended(own))

    @torch.no_grad()
    def append(self, x: Latents, cond: Condition, cache: Cache) -> None:
        """Add a finished chunk, at the cache's context noise, and drop frames that leave the window."""
        own, recorded = of_kind(WanCache, cache), list[KeysValues]()
        frames = _next_frames(x, own)
        sigma = torch.full((len(x),), own.chunks.context_noise, dtype=torch.float64)
        self._pass(x, sigma, cond, frames, cached=_attended(own)._replace(recorded=recorded))
        chunks = (*own.past, Finished(tuple(frames), [pair for (pair,) in recorded]))
        kept = frozenset(own.chunks.kept([*own.resident, *frames]))
        own.past = tuple(_cut(chunk, kept) for chunk in chunks if not kept.isdisjoint(chunk.frames))
        own.seen += len(frames)

    def open_cache(self, chunks: ChunkConfig) -> WanCache:
        return RollingSink(chunks, positions=self._positions) if chunks.rolling_sink else WanCache(chunks)

    def cache_bytes(self, latent_shape: tuple[int, int, int, int], chunks: ChunkConfig, dtype: torch.dtype) -> int:
        """Return the memory of one sample's full cache on this rank when passes compute in `dtype`.

        The text's keys and values are not counted. A sequence rank holds the keys and values of its own heads.
        """
        _, frames, height, width = latent_shape
        self._positions.check(frames)
        kept = min(frames, chunks.window_frames or frames)
        _, patch_height, patch_width = self.network.config.patch_size
        tokens = kept * (height // patch_height) * (width // patch_width)
        width = self.feature_size // (self._shared.ranks if self._shared else 1)
        return 2 * len(self.blocks) * tokens * width * dtype.itemsize

    def velocity(self, x_t: Latents, sigma: PerSample, cond: Condition) -> Latents:
        return self._pass(x_t, sigma, cond, list(range(x_t.shape[2])))

    def _pass(
        self,
        x: Latents,
        sigma: PerSample | PerFrame,
        cond: Condition,
        frames: list[int],
        frame_mask: Bool[Tensor, "t t"] | None = None,
        cached: Cached = NOTHING_CACHED,
    ) -> Latents:
        """Run the network's own forward, so that hooks and wrappers of it and of its blocks take part."""
        tokens = self._frame_tokens(x)
        self.pass_share = _share(len(frames) * tokens, tokens, frame_mask, cached)
        mask = None
        if frame_mask is not None and not bool(frame_mask.all()):
            mask = token_mask(frame_mask.to(x.device, non_blocking=True), tokens, flex=has_flex_attention(x.device))
        time = network_time(sigma, x)
        if time.ndim == 2:
            time = time.repeat_interleave(tokens, 1)
        self._positions.expect(frames, mask, cached)
        x = self._shared.whole_gradient(x) if self._shared else x
        return self.called(x, time, cond, frames)

    def _frame_tokens(self, x: Latents) -> int:
        _, patch_height, patch_width = self.network.config.patch_size
        return (x.shape[3] // patch_height) * (x.shape[4] // patch_width)


class _Positions(nn.Module):
    """The rotary embedding of diffusers at absolute latent frames, returned as a `Pass`."""

    def __init__(self, rope: WanRotaryPosEmbed) -> None:
        super().__init__()
        self._rope, self._expected = rope, PLAIN

    def expect(self, frames: list[int], mask: Mask | None, cached: Cached) -> None:
        """Set the latent frames and the attention of the network's next forward."""
        self.check(max(frames) + 1)
        self._expected = frames, mask, cached

    def check(self, frames: int) -> None:
        """Raise UserError for more latent frames than there are positions."""
        if frames > self._rope.max_seq_len:
            raise UserError(
                f"latent frame {frames - 1} is beyond the {self._rope.max_seq_len} positions of this Wan "
                "(rope_max_seq_len): generate fewer frames"
            )

    def forward(self, x: Latents) -> Pass:
        frames, mask, cached = self._expected
        self._expected, frames = PLAIN, frames or list(range(x.shape[2]))
        _, patch_height, patch_width = self._rope.patch_size
        height, width = x.shape[3] // patch_height, x.shape[4] // patch_width
        at = torch.tensor(frames).to(x.device, non_blocking=True)
        cos, sin = self._angles(at, height, width)
        return Pass(cos, sin, mask, *cached)

    def turned(self, keys: PastKeys, by: Sequence[int]) -> PastKeys:
        """Turn keys of finished frames further, those of each frame by its number of frames."""
        at = torch.tensor(by).repeat_interleave(keys.shape[1] // len(by)).to(keys.device, non_blocking=True)
        return rotate(keys.float(), Pass(*self._angles(at, 1, 1))).to(keys)

    def _angles(self, at: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
        cos, sin = self._rope.freqs_cos, self._rope.freqs_sin
        return self._by_token(cos, at, height, width), self._by_token(sin, at, height, width)

    def _by_token(self, table: Tensor, at: Tensor, height: int, width: int) -> Float[Tensor, "1 n 1 d"]:
        by_frame, by_row, by_column = table.split([self._rope.t_dim, self._rope.h_dim, self._rope.w_dim], 1)
        parts = by_frame[at][:, None, None], by_row[:height][None, :, None], by_column[:width][None, None]
        return torch.cat([part.expand(len(at), height, width, -1) for part in parts], -1).flatten(0, 2)[None, :, None]


def _next_frames(x: Latents, cache: WanCache) -> list[int]:
    return list(range(cache.seen, cache.seen + x.shape[2]))


def _attended(cache: WanCache) -> Cached:
    """What a pass that begins now attends to."""
    return Cached(cache.attended(), None if torch.is_grad_enabled() else cache.text)


def _share(
    tokens: int, frame_tokens: int, frame_mask: Bool[Tensor, "t t"] | None, cached: Cached
) -> dict[str, Fraction]:
    """Return the share of a plain pass: of its pairs of query and key, and of the text's keys, which may be cached."""
    known = sum(chunk.own[0][0].shape[1] for chunk in cached.past)
    pairs = tokens * (tokens + known) if frame_mask is None else int(frame_mask.sum()) * frame_tokens**2
    text = dict.fromkeys(("attn2.to_k", "attn2.to_v"), Fraction(0)) if cached.text else {}
    return {"attn1": Fraction(pairs, tokens**2), **text}


def _cut(chunk: Finished, kept: frozenset[int]) -> Finished:
    """Cut a chunk to the frames that stay in the cache."""
    if kept.issuperset(chunk.frames):
        return chunk
    stay = [i for i, frame in enumerate(chunk.frames) if frame in kept]
    rows = torch.tensor(stay).to(chunk.own[0][0].device, non_blocking=True)

    def rows_of(part: Tensor) -> Tensor:
        return part.unflatten(1, (len(chunk.frames), -1)).index_select(1, rows).flatten(1, 2)

    frames = tuple(frame for frame in chunk.frames if frame in kept)
    return Finished(frames, [(rows_of(key), rows_of(value)) for key, value in chunk.own])


def _by_frame(sigma: PerSample | PerFrame, frames: int) -> PerFrame:
    return sigma if sigma.ndim == 2 else sigma[:, None].expand(-1, frames)
