"""Wan's attention with a KV cache of earlier chunks, a mask, or tokens on several ranks.

The forward of diffusers is unchanged: it passes the rotary embedding to every block untouched, also when activations
are recomputed. A `Pass` takes the place of the rotary embedding and carries the cache, the mask and the ranks.
"""

from dataclasses import dataclass

import torch
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from jaxtyping import Float
from torch import Tensor, nn

from unified_trainer.models.masked_attention import Keys, Mask, attend
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.sequence import Heads, heads_to_tokens, tokens_to_heads

KeysValues = list[tuple[Keys, Keys]]  # keys and values of each block


@dataclass(frozen=True)
class Finished:
    """The cached keys and values of a finished chunk."""

    frames: tuple[int, ...]  # absolute latent frames
    own: KeysValues  # positions applied; where ranks share the tokens, those of this rank's heads


@dataclass(frozen=True)
class Pass:
    """The positions of one pass's tokens, and what they attend to.

    `past` is the cache as it was when the pass began: when a backward pass recomputes it later, it must not attend to
    chunks that were added since.
    """

    cos: Tensor  # rotary embedding of this rank's tokens
    sin: Tensor
    mask: Mask | None = None  # None attends to everything
    past: tuple[Finished, ...] = ()
    text: KeysValues | None = None  # cache of the cross-attention, filled by the first pass that has it; None: no cache
    recorded: KeysValues | None = None  # list to which this pass appends its own keys and values
    mesh: Mesh | None = None  # whose sequence ranks share the tokens; None: this rank has all
    tokens: int = 0  # number of tokens of all those ranks


def set_attention(blocks: nn.ModuleList) -> None:
    """Set attention processors that take a `Pass` in place of the rotary embedding."""
    for layer, block in enumerate(blocks):
        block.attn2.processor = _TextAttention(layer)
        block.attn1.processor = _SelfAttention(layer, block.attn2.processor)


class _SelfAttention:
    """Self-attention over the tokens of the past and of the pass: all tokens, and on each rank its heads."""

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
        # Rounded to the precision that attention computes in before anything is cached or sent.
        query, key = _rotate(query, now).to(value), _rotate(key, now).to(value)
        if now.mesh:
            query, key, value = (tokens_to_heads(part, now.tokens, now.mesh) for part in (query, key, value))
        if now.recorded is not None:
            now.recorded.append((key, value))
        past = [chunk.own[self._layer] for chunk in now.past]
        if past:
            key, value = (torch.cat(parts, 1) for parts in zip(*past, (key, value), strict=True))
        out = attend(query, key, value, now.mask)
        return _project_out(attn, heads_to_tokens(out, now.mesh) if now.mesh else out)


class _TextAttention(WanAttnProcessor):
    """Cross-attention that caches the text's keys and values for a rollout.

    A pass with gradient computes them again: the cached ones have no graph to the projections that made them.
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


def _project_out(attn: WanAttention, heads: Heads) -> Float[Tensor, "b n width"]:
    return attn.to_out[1](attn.to_out[0](heads.flatten(2)))


def _rotate(x: Heads, now: Pass) -> Heads:
    """Rotate pairs of adjacent channels by the angles of their token's position."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = now.cos[..., 0::2], now.sin[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
