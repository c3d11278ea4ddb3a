"""Wan as a causal model: the same weights, looking back in chunks, with a cache (Self-Forcing, arXiv:2506.08009).

diffusers' forward stays as it is. What differs goes along with the rotary embedding, which it hands to every block
untouched, also when activations are recomputed: positions, mask, and the keys and values of earlier chunks.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor, WanRotaryPosEmbed
from jaxtyping import Bool, Float
from torch import Tensor, nn

from unified_trainer.chunks import ChunkConfig, block_causal_mask, teacher_forcing_mask
from unified_trainer.models.masked_attention import Keys, Mask, attend, token_mask
from unified_trainer.models.wan import TIME_SCALE, WanCondition, WanModel
from unified_trainer.parallel.device import has_flex_attention
from unified_trainer.types import Latents, PerFrame, PerSample

KeysValues = list[tuple[Keys, Keys]]  # by block


@dataclass(frozen=True)
class Finished:
    """What is still looked back on of a finished chunk."""

    frames: tuple[int, ...]  # absolute latent frames
    own: KeysValues  # positions applied


@dataclass
class Cache:
    """What later chunks look back on, without gradient; written by `append` alone, which never changes a tensor."""

    chunks: ChunkConfig
    seen: int = 0  # latent frames finished so far
    past: tuple[Finished, ...] = ()
    text: KeysValues = field(default_factory=list)  # of the cross-attention, once a pass without gradient made them

    @property
    def resident(self) -> list[int]:
        """The latent frames that are looked back on."""
        return [frame for chunk in self.past for frame in chunk.frames]


@dataclass(frozen=True)
class Pass:
    """One pass through the blocks: where its tokens are, and what they see.

    It holds the past as it was when the pass began. Recomputing the pass in a backward, when the cache is further on,
    must not see the chunks that came later.
    """

    cos: Tensor
    sin: Tensor
    mask: Mask | None = None  # None sees everything
    past: tuple[Finished, ...] = ()
    text: KeysValues | None = None  # of the cross-attention, filled by the first pass that has it; None computes anew
    recorded: KeysValues | None = None  # where this pass leaves its own keys and values


class CausalWanModel(WanModel):
    """WanTransformer3DModel looking back in chunks; without chunks it is the bidirectional one."""

    def __init__(self, network: WanTransformer3DModel, folder: Path | None = None) -> None:
        super().__init__(network, folder)
        if network.config.patch_size[0] != 1:
            raise ValueError(f"a causal Wan cannot patch over time, but patch_size is {network.config.patch_size}")
        if network.config.added_kv_proj_dim is not None:
            raise ValueError("a causal Wan sees no images, but this one does (added_kv_proj_dim)")
        self._positions = network.rope = _Positions(network.rope)
        for layer, block in enumerate(network.blocks):
            block.attn2.processor = _TextAttention(layer)
            block.attn1.processor = _SelfAttention(layer, block.attn2.processor)

    def velocity_masked(
        self,
        x_t: Latents,
        sigma: PerSample | PerFrame,
        cond: WanCondition,
        chunks: ChunkConfig,
        clean: Latents | None = None,
    ) -> Latents:
        """All chunks in one pass. They look back on each other as they are, or on `clean` ones (teacher forcing).

        Clean chunks are seen as a cache would hold them: they must be at the chunks' context noise.
        """
        frames = x_t.shape[2]
        positions = list(range(frames))
        if clean is None:
            return self._pass(x_t, sigma, cond, positions, block_causal_mask(chunks, frames))
        sigma = _by_frame(sigma, frames)
        levels = torch.cat([torch.full_like(sigma, chunks.context_noise), sigma], 1)
        both = torch.cat([clean.to(x_t), x_t], 2)
        return self._pass(both, levels, cond, positions * 2, teacher_forcing_mask(chunks, frames))[:, :, frames:]

    def velocity_cached(self, x_t: Latents, sigma: PerSample, cond: WanCondition, cache: Cache) -> Latents:
        """The next chunk, looking back on the cache, which gets neither gradient nor entry."""
        return self._pass(x_t, sigma, cond, _next_frames(x_t, cache), **_looking_back(cache))

    @torch.no_grad()
    def append(self, x: Latents, cond: WanCondition, cache: Cache) -> None:
        """Let later chunks look back on this one, which is at the cache's context noise; the oldest may fall out."""
        frames, recorded = _next_frames(x, cache), []
        sigma = torch.full((len(x),), cache.chunks.context_noise, dtype=torch.float64)
        self._pass(x, sigma, cond, frames, recorded=recorded, **_looking_back(cache))
        chunks = (*cache.past, Finished(tuple(frames), recorded))
        kept = frozenset(cache.chunks.kept([*cache.resident, *frames]))
        cache.past = tuple(_cut(chunk, kept) for chunk in chunks if not kept.isdisjoint(chunk.frames))
        cache.seen += len(frames)

    def open_cache(self, chunks: ChunkConfig) -> Cache:
        return Cache(chunks)

    def cache_bytes(self, latent_shape: tuple[int, int, int, int], chunks: ChunkConfig, dtype: torch.dtype) -> int:
        """Memory of one sample's full cache when passes compute in `dtype`, the text's share left out."""
        _, frames, height, width = latent_shape
        self._positions.check(frames)
        kept = min(frames, chunks.window_frames or frames)
        _, patch_height, patch_width = self.network.config.patch_size
        tokens = kept * (height // patch_height) * (width // patch_width)
        return 2 * len(self.blocks) * tokens * self.feature_size * dtype.itemsize

    def velocity(self, x_t: Latents, sigma: PerSample, cond: WanCondition) -> Latents:
        return self._pass(x_t, sigma, cond, list(range(x_t.shape[2])))

    def _pass(
        self,
        x: Latents,
        sigma: PerSample | PerFrame,
        cond: WanCondition,
        frames: list[int],
        frame_mask: Bool[Tensor, "t t"] | None = None,
        **seen: object,
    ) -> Latents:
        """Through the network's own forward, so that whatever wraps it or its blocks takes part."""
        tokens = self._frame_tokens(x)
        mask = None
        if frame_mask is not None and not bool(frame_mask.all()):
            mask = token_mask(frame_mask.to(x.device), tokens, flex=has_flex_attention(x.device))
        time = (TIME_SCALE * sigma.double()).to(device=x.device, dtype=torch.float32)
        if time.ndim == 2:
            time = time.repeat_interleave(tokens, 1)
        self._positions.expect(frames, mask=mask, **seen)
        return self.network(x, time, cond.text, return_dict=False)[0].float()

    def _frame_tokens(self, x: Latents) -> int:
        _, patch_height, patch_width = self.network.config.patch_size
        return (x.shape[3] // patch_height) * (x.shape[4] // patch_width)


class _Positions(nn.Module):
    """diffusers' rotary embedding at absolute latent frames, and with it all that a pass must know."""

    def __init__(self, rope: WanRotaryPosEmbed) -> None:
        super().__init__()
        self._rope = rope

    def expect(self, frames: list[int], **seen: object) -> None:
        """What the next forward of the network is about."""
        self.check(max(frames) + 1)
        self._expected = (frames, seen)

    def check(self, frames: int) -> None:
        """ValueError for more latent frames than there are positions."""
        if frames > self._rope.max_seq_len:
            raise ValueError(
                f"latent frame {frames - 1} is beyond the {self._rope.max_seq_len} positions of this Wan "
                "(rope_max_seq_len): generate fewer frames"
            )

    def forward(self, x: Latents) -> Pass:
        frames, seen = self._expected
        del self._expected
        _, patch_height, patch_width = self._rope.patch_size
        height, width = x.shape[3] // patch_height, x.shape[4] // patch_width
        at = torch.tensor(frames, device=x.device)
        rope = self._rope
        return Pass(*(self._by_token(table, at, height, width) for table in (rope.freqs_cos, rope.freqs_sin)), **seen)

    def _by_token(self, table: Tensor, at: Tensor, height: int, width: int) -> Float[Tensor, "1 n 1 d"]:
        by_frame, by_row, by_column = table.split([self._rope.t_dim, self._rope.h_dim, self._rope.w_dim], 1)
        parts = by_frame[at][:, None, None], by_row[:height][None, :, None], by_column[:width][None, None]
        return torch.cat([part.expand(len(at), height, width, -1) for part in parts], -1).flatten(0, 2)[None, :, None]


class _SelfAttention:
    """Attention over the pass's own tokens behind those of the past."""

    def __init__(self, layer: int, text: "_TextAttention") -> None:
        self._layer, self._text = layer, text

    def __call__(
        self, attn: WanAttention, x: Tensor, _encoder: None, _mask: None, now: Pass
    ) -> Float[Tensor, "b n width"]:
        self._text.shared = now.text  # with this block's cross-attention, which comes next, also in a recomputation
        query, key, value = (
            part.unflatten(2, (attn.heads, -1))
            for part in (attn.norm_q(attn.to_q(x)), attn.norm_k(attn.to_k(x)), attn.to_v(x))
        )
        query, key = _rotate(query, now).to(value), _rotate(key, now).to(value)
        if now.recorded is not None:
            now.recorded.append((key, value))
        past = [chunk.own[self._layer] for chunk in now.past]
        if past:
            key, value = (torch.cat(parts, 1) for parts in zip(*past, (key, value), strict=True))
        return _project_out(attn, attend(query, key, value, now.mask))


class _TextAttention(WanAttnProcessor):
    """Cross-attention whose keys and values a rollout computes once; a pass with gradient computes them anew.

    Those of the cache have no gradient, and the projections that make them must get theirs.
    """

    def __init__(self, layer: int) -> None:
        super().__init__()
        self._layer = layer
        self.shared: KeysValues | None = None

    def __call__(
        self, attn: WanAttention, x: Tensor, encoder: Tensor, _mask: None = None, _rope: None = None
    ) -> Float[Tensor, "b n width"]:
        shared, self.shared = self.shared, None
        if shared is None:
            return super().__call__(attn, x, encoder, None, None)
        if len(shared) == self._layer:
            key, value = attn.norm_k(attn.to_k(encoder)), attn.to_v(encoder)
            shared.append((key.to(value).unflatten(2, (attn.heads, -1)), value.unflatten(2, (attn.heads, -1))))
        key, value = shared[self._layer]
        query = attn.norm_q(attn.to_q(x)).to(value).unflatten(2, (attn.heads, -1))
        return _project_out(attn, attend(query, key, value, None))


def _next_frames(x: Latents, cache: Cache) -> list[int]:
    return list(range(cache.seen, cache.seen + x.shape[2]))


def _looking_back(cache: Cache) -> dict[str, object]:
    """What a pass that begins now sees of a rollout."""
    return {"past": cache.past, "text": None if torch.is_grad_enabled() else cache.text}


def _cut(chunk: Finished, kept: frozenset[int]) -> Finished:
    """The frames of a chunk that are kept."""
    if kept.issuperset(chunk.frames):
        return chunk
    rows = torch.tensor([frame in kept for frame in chunk.frames], device=chunk.own[0][0].device)

    def rows_of(part: Tensor) -> Tensor:
        return part.unflatten(1, (len(rows), -1))[:, rows].flatten(1, 2)

    frames = tuple(frame for frame in chunk.frames if frame in kept)
    return Finished(frames, [(rows_of(key), rows_of(value)) for key, value in chunk.own])


def _project_out(attn: WanAttention, heads: Float[Tensor, "b n heads d"]) -> Float[Tensor, "b n width"]:
    return attn.to_out[1](attn.to_out[0](heads.flatten(2)))


def _rotate(x: Float[Tensor, "b n heads d"], now: Pass) -> Float[Tensor, "b n heads d"]:
    """Pairs of neighbouring channels turned by the angles of their token's position."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = now.cos[..., 0::2], now.sin[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def _by_frame(sigma: PerSample | PerFrame, frames: int) -> PerFrame:
    return sigma if sigma.ndim == 2 else sigma[:, None].expand(-1, frames)
