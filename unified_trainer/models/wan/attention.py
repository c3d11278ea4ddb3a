"""Wan's attention when a pass is more than its own tokens: behind earlier chunks, or with its tokens on several ranks.

diffusers' forward stays as it is. What differs goes along with the rotary embedding, which it hands to every block
untouched, also when activations are recomputed.
"""

from dataclasses import dataclass

import torch
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from jaxtyping import Float
from torch import Tensor, nn

from unified_trainer.models.masked_attention import Keys, Mask, attend
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.sequence import Heads, heads_to_tokens, tokens_to_heads

KeysValues = list[tuple[Keys, Keys]]  # by block


@dataclass(frozen=True)
class Finished:
    """What is still looked back on of a finished chunk."""

    frames: tuple[int, ...]  # absolute latent frames
    own: KeysValues  # positions applied; of a rank's heads where ranks share the tokens


@dataclass(frozen=True)
class Pass:
    """One pass through the blocks: where its tokens are, and what they see.

    It holds the past as it was when the pass began. Recomputing the pass in a backward, when the cache is further on,
    must not see the chunks that came later.
    """

    cos: Tensor  # of this rank's tokens
    sin: Tensor
    mask: Mask | None = None  # None sees everything
    past: tuple[Finished, ...] = ()
    text: KeysValues | None = None  # of the cross-attention, filled by the first pass that has it; None computes anew
    recorded: KeysValues | None = None  # where this pass leaves its own keys and values
    mesh: Mesh | None = None  # whose sequence ranks share the tokens; None has them all here
    tokens: int = 0  # of all those ranks


def set_attention(blocks: nn.ModuleList) -> None:
    """Let the blocks take a `Pass` for the rotary embedding."""
    for layer, block in enumerate(blocks):
        block.attn2.processor = _TextAttention(layer)
        block.attn1.processor = _SelfAttention(layer, block.attn2.processor)


class _SelfAttention:
    """Attention over the pass's own tokens behind those of the past: every token, a rank's heads."""

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
        # In the precision that attention computes in, before anything is kept or sent.
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


def _project_out(attn: WanAttention, heads: Heads) -> Float[Tensor, "b n width"]:
    return attn.to_out[1](attn.to_out[0](heads.flatten(2)))


def _rotate(x: Heads, now: Pass) -> Heads:
    """Pairs of neighbouring channels turned by the angles of their token's position."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = now.cos[..., 0::2], now.sin[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
