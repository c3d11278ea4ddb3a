"""Wan as a causal model: the same weights, looking back in chunks, with a cache (Self-Forcing, arXiv:2506.08009).

diffusers' forward stays as it is. What differs goes along with the rotary embedding, which it hands to every block
untouched, also when activations are recomputed: positions, mask, and the keys and values of earlier chunks.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor, WanRotaryPosEmbed
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from unified_trainer.chunks import ChunkConfig, block_causal_mask, teacher_forcing_mask
from unified_trainer.models.wan import TIME_SCALE, WanCondition, WanModel
from unified_trainer.parallel.device import has_flex_attention
from unified_trainer.types import Latents, PerFrame, PerSample

Heads = Float[Tensor, "b n heads d"]


@dataclass
class Cache:
    """Keys and values of the finished chunks that later ones look back on; written by `append` alone."""

    chunks: ChunkConfig
    seen: int = 0  # latent frames finished so far
    resident: list[int] = field(default_factory=list)  # those still kept
    own: list[tuple[Heads, Heads]] = field(default_factory=list)  # by block: keys and values, positions applied
    text: list[tuple[Heads, Heads]] = field(default_factory=list)  # by block: of the cross-attention


@dataclass
class Pass:
    """One pass through the blocks: where its tokens are, and what they see."""

    cos: Tensor
    sin: Tensor
    mask: Bool[Tensor, "n n"] | BlockMask | None  # by token; None sees everything
    cache: Cache | None
    recorded: list[tuple[Heads, Heads]] | None  # where this pass leaves its own keys and values


class CausalWanModel(WanModel):
    """WanTransformer3DModel looking back in chunks; without chunks it is the bidirectional one."""

    def __init__(self, network: WanTransformer3DModel, folder: Path | None = None) -> None:
        super().__init__(network, folder)
        if network.config.patch_size[0] != 1:
            raise ValueError(f"a causal Wan must not patch over time, but patch_size is {network.config.patch_size}")
        self._rope = network.rope = _Positions(network.rope)
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
        """All chunks in one pass. They look back on each other as they are, or on `clean` ones (teacher forcing)."""
        frames = x_t.shape[2]
        positions = list(range(frames))
        if clean is None:
            return self._pass(x_t, _by_frame(sigma, frames), cond, positions, block_causal_mask(chunks, frames))
        sigma = _by_frame(sigma, frames)
        levels = torch.cat([torch.full_like(sigma, chunks.context_noise), sigma], 1)
        both = torch.cat([clean.to(x_t), x_t], 2)
        velocity = self._pass(both, levels, cond, positions * 2, teacher_forcing_mask(chunks, frames))
        return velocity[:, :, frames:]

    def velocity_cached(self, x_t: Latents, sigma: PerSample, cond: WanCondition, cache: Cache) -> Latents:
        """The next chunk, looking back on the cache, which gets neither gradient nor entry."""
        positions = list(range(cache.seen, cache.seen + x_t.shape[2]))
        return self._pass(x_t, sigma, cond, positions, None, cache)

    @torch.no_grad()
    def append(self, x: Latents, cond: WanCondition, cache: Cache) -> None:
        """Let later chunks look back on this one, which is at the cache's context noise; the oldest may fall out."""
        positions = list(range(cache.seen, cache.seen + x.shape[2]))
        recorded: list[tuple[Heads, Heads]] = []
        sigma = torch.full((len(x),), cache.chunks.context_noise, dtype=torch.float64)
        self._pass(x, sigma, cond, positions, None, cache, recorded)
        resident = cache.resident + positions
        kept = cache.chunks.kept(resident)
        tokens = self._frame_tokens(x)
        rows = torch.tensor([i for i, frame in enumerate(resident) if frame in kept], device=x.device)
        rows = (rows[:, None] * tokens + torch.arange(tokens, device=x.device)).flatten()
        old = cache.own or [(k[:, :0], v[:, :0]) for k, v in recorded]
        cache.own = [
            (torch.cat([k, k_new], 1)[:, rows], torch.cat([v, v_new], 1)[:, rows])
            for (k, v), (k_new, v_new) in zip(old, recorded, strict=True)
        ]
        cache.seen, cache.resident = cache.seen + len(positions), kept

    def open_cache(self, chunks: ChunkConfig) -> Cache:
        return Cache(chunks)

    def cache_bytes(self, latent_shape: tuple[int, int, int, int], chunks: ChunkConfig) -> int:
        """Memory of one sample's keys and values in float32 when the cache is full, text left out."""
        _, frames, height, width = latent_shape
        kept = min(frames, chunks.window_frames or frames)
        _, patch_height, patch_width = self.network.config.patch_size
        tokens = kept * (height // patch_height) * (width // patch_width)
        return 2 * len(self.blocks) * tokens * self.feature_size * 4

    def _pass(
        self,
        x: Latents,
        sigma: Tensor,
        cond: WanCondition,
        positions: list[int],
        frame_mask: Bool[Tensor, "t t"] | None,
        cache: Cache | None = None,
        recorded: list[tuple[Heads, Heads]] | None = None,
    ) -> Latents:
        tokens = self._frame_tokens(x)
        mask = None
        if frame_mask is not None and not bool(frame_mask.all()):
            mask = token_mask(frame_mask.to(x.device), tokens, flex=has_flex_attention(x.device))
        time = (TIME_SCALE * sigma.double()).to(device=x.device, dtype=torch.float32)
        if time.ndim == 2:
            time = time.repeat_interleave(tokens, 1)
        self._rope.expect(positions, mask, cache, recorded)
        return self.network(x, time, cond.text, return_dict=False)[0].float()

    def _frame_tokens(self, x: Latents) -> int:
        _, patch_height, patch_width = self.network.config.patch_size
        return (x.shape[3] // patch_height) * (x.shape[4] // patch_width)

    def velocity(self, x_t: Latents, sigma: PerSample, cond: WanCondition) -> Latents:
        return self._pass(x_t, sigma, cond, list(range(x_t.shape[2])), None)


class _Positions(nn.Module):
    """diffusers' rotary embedding at absolute latent frames, and with it all that a pass must know."""

    def __init__(self, rope: WanRotaryPosEmbed) -> None:
        super().__init__()
        self._rope = rope
        self._expected: tuple | None = None

    def expect(self, positions: list[int], *rest: object) -> None:
        if max(positions) >= self._rope.max_seq_len:
            raise ValueError(
                f"latent frame {max(positions)} is beyond the {self._rope.max_seq_len} positions of this Wan "
                "(rope_max_seq_len): generate fewer frames"
            )
        self._expected = (positions, *rest)

    def forward(self, x: Latents) -> Pass:
        positions, *rest = self._expected
        self._expected = None
        whole = x.new_empty(()).expand(1, 1, max(positions) + 1, *x.shape[3:])
        cos, sin = self._rope(whole)
        frames = torch.tensor(positions, device=x.device)
        cos, sin = (part.unflatten(1, (max(positions) + 1, -1))[:, frames].flatten(1, 2) for part in (cos, sin))
        return Pass(cos, sin, *rest)


class _SelfAttention:
    """Attention over the pass's own tokens behind those of the cache."""

    def __init__(self, layer: int, text: "_TextAttention") -> None:
        self._layer, self._text = layer, text

    def __call__(
        self, attn: WanAttention, x: Tensor, _encoder: None, _mask: None, now: Pass
    ) -> Float[Tensor, "b n width"]:
        self._text.cache = now.cache  # of this block, whose cross-attention comes next, also in a recomputation
        query, key, value = (
            part.unflatten(2, (attn.heads, -1))
            for part in (attn.norm_q(attn.to_q(x)), attn.norm_k(attn.to_k(x)), attn.to_v(x))
        )
        query, key = _rotate(query, now), _rotate(key, now)
        if now.recorded is not None:
            now.recorded.append((key, value))
        if now.cache is not None and now.cache.own:
            past_key, past_value = now.cache.own[self._layer]
            key, value = torch.cat([past_key.to(key), key], 1), torch.cat([past_value.to(value), value], 1)
        return _project_out(attn, _attend(query, key, value, now.mask))


class _TextAttention(WanAttnProcessor):
    """Cross-attention whose keys and values a rollout computes once; with gradients they are computed anew."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self._layer = layer
        self.cache: Cache | None = None

    def __call__(
        self, attn: WanAttention, x: Tensor, encoder: Tensor, _mask: None = None, _rope: None = None
    ) -> Float[Tensor, "b n width"]:
        cache, self.cache = self.cache, None
        if cache is None or torch.is_grad_enabled():
            return super().__call__(attn, x, encoder, None, None)
        if len(cache.text) == self._layer:
            key, value = attn.norm_k(attn.to_k(encoder)), attn.to_v(encoder)
            cache.text.append((key.unflatten(2, (attn.heads, -1)), value.unflatten(2, (attn.heads, -1))))
        query = attn.norm_q(attn.to_q(x)).unflatten(2, (attn.heads, -1))
        return _project_out(attn, _attend(query, *cache.text[self._layer], None))


def token_mask(frame_mask: Bool[Tensor, "t t"], tokens: int, *, flex: bool) -> Bool[Tensor, "n n"] | BlockMask:
    """The mask by token: in blocks that FlexAttention skips, or dense."""
    if not flex:
        return frame_mask.repeat_interleave(tokens, 0).repeat_interleave(tokens, 1)
    n = len(frame_mask) * tokens

    def sees(_sample: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return frame_mask[query // tokens, key // tokens]

    return create_block_mask(sees, None, None, n, n, device=frame_mask.device)


def _attend(query: Heads, key: Heads, value: Heads, mask: Tensor | BlockMask | None) -> Heads:
    by_head = (part.transpose(1, 2) for part in (query, key.to(query), value.to(query)))
    if isinstance(mask, BlockMask):
        return _compiled_flex_attention()(*by_head, block_mask=mask).transpose(1, 2)
    return scaled_dot_product_attention(*by_head, attn_mask=mask).transpose(1, 2)


@functools.cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


def _project_out(attn: WanAttention, heads: Heads) -> Float[Tensor, "b n width"]:
    return attn.to_out[1](attn.to_out[0](heads.flatten(2)))


def _rotate(x: Heads, now: Pass) -> Heads:
    """Pairs of neighbouring channels turned by the angles of their token's position."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = now.cos[..., 0::2], now.sin[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).type_as(x)


def _by_frame(sigma: PerSample | PerFrame, frames: int) -> PerFrame:
    return sigma if sigma.ndim == 2 else sigma[:, None].expand(-1, frames)
