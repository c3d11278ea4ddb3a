"""Wan's attention with a KV cache of earlier chunks, a mask, or tokens on several ranks.

The forward of diffusers is unchanged: it passes the rotary embedding to every block untouched. A `Pass` takes the place
of the rotary embedding and carries the cache, the mask and the ranks. A hook before each block takes what is that
block's own out of it, so that all blocks get inputs of one form and one compiled graph serves them.
"""

from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanAttention
from jaxtyping import Float
from torch import Tensor, nn

from unified_trainer.models.masked_attention import Keys, Mask, Queries, attend
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.sequence import Heads, heads_to_tokens, tokens_to_heads

TEXT_TOKENS = 512  # of the text in the network's condition; those of an image, where there are some, stand before them
PastKeys = Float[Tensor, "b _ heads d"]  # of one chunk, a text or an image: they differ in length
KeysValues = list[tuple[PastKeys, PastKeys]]
LayerLists = list[KeysValues]  # one list for each block, in the order of the forward pass


@dataclass(frozen=True)
class Finished:
    """The cached keys and values of a finished chunk."""

    frames: tuple[int, ...]  # absolute latent frames
    own: KeysValues  # of each block, positions applied; where ranks share the tokens, those of this rank's heads


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
    text: LayerLists | None = None  # cache of the cross-attention, filled by the first pass that has it; None: no cache
    recorded: LayerLists | None = None  # empty list to which this pass adds each block's own keys and values
    mesh: Mesh | None = None  # whose sequence ranks share the tokens; None: this rank has all
    tokens: int = 0  # number of tokens of all those ranks


@dataclass(frozen=True)
class LayerPass:
    """A `Pass` as one block sees it."""

    cos: Tensor
    sin: Tensor
    mask: Mask | None
    past: list[tuple[PastKeys, PastKeys]]  # of each cached chunk
    recorded: KeysValues | None  # list to which the block appends its own keys and values
    mesh: Mesh | None
    tokens: int

    def joined(self) -> "LayerPass":
        """Return the pass with the cached chunks as one: a graph then has the same inputs for any number of them."""
        if len(self.past) == 0:
            return self
        pair = tuple(torch.cat(parts, 1) if len(parts) > 1 else parts[0] for parts in zip(*self.past, strict=True))
        for part in pair:
            torch._dynamo.maybe_mark_dynamic(part, 1)
        return replace(self, past=[pair])


@dataclass(frozen=True)
class LayerText:
    """The text as the cross-attention of one block sees it, in place of the text alone."""

    encoder: Tensor
    cached: KeysValues  # the block's cached keys and values; an empty list is filled by the pass


def set_attention(blocks: nn.ModuleList) -> None:
    """Set attention that takes a `Pass` in place of the rotary embedding; it may be set twice."""
    for layer, block in enumerate(blocks):
        if not isinstance(block.attn1.processor, SelfAttention):
            block.register_forward_pre_hook(partial(_own_inputs, layer))
        block.attn2.processor = _TextAttention() if block.attn2.add_k_proj is None else _ImageTextAttention()
        block.attn1.processor = SelfAttention()


def joined_inputs(*inputs: Any) -> tuple[Any, ...]:
    """Return a block's inputs in a form that is the same for any number of cached chunks."""
    return tuple(value.joined() if isinstance(value, LayerPass) else value for value in inputs)


def _own_inputs(layer: int, _block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a block's inputs with what is its own of the pass and of the text's cache."""
    x, encoder, time, angles = inputs
    now = angles if isinstance(angles, Pass) else Pass(*angles)
    past = [chunk.own[layer] for chunk in now.past]
    own = LayerPass(now.cos, now.sin, now.mask, past, _list_of(now.recorded, layer), now.mesh, now.tokens)
    text = _list_of(now.text, layer)
    return x, encoder if text is None else LayerText(encoder, text), time, own


def _list_of(lists: LayerLists | None, layer: int) -> KeysValues | None:
    """Return the list of one block, which the first pass that needs it adds."""
    if lists is not None and len(lists) == layer:
        lists.append([])
    return None if lists is None else lists[layer]


class SelfAttention:
    """Self-attention over the tokens of the past and of the pass: all tokens, and on each rank its heads."""

    def __call__(
        self, attn: WanAttention, x: Tensor, _encoder: None, _mask: None, now: LayerPass
    ) -> Float[Tensor, "b n width"]:
        query, key, value, *more = self.projected(attn, x, now)
        if now.mesh:
            query, key, value, *more = (
                tokens_to_heads(part, now.tokens, now.mesh) for part in (query, key, value, *more)
            )
        if now.recorded is not None:
            now.recorded.append((key, value))
        if now.past:
            key, value = (torch.cat(parts, 1) for parts in zip(*now.past, (key, value), strict=True))
        out = self.attended(now, query, key, value, *more)
        return project_out(attn, heads_to_tokens(out, now.mesh) if now.mesh else out)

    def projected(self, attn: WanAttention, x: Tensor, now: LayerPass) -> tuple[Heads, ...]:
        """Return queries, keys and values of this rank's tokens, and what else of them the attention reads.

        Queries and keys are rotated, and rounded to the precision that attention computes in before anything is cached
        or sent.
        """
        query, key, value = (
            part.unflatten(2, (attn.heads, -1))
            for part in (normed(attn.norm_q, attn.to_q(x)), normed(attn.norm_k, attn.to_k(x)), attn.to_v(x))
        )
        return rotate(query, now).to(value), rotate(key, now).to(value), value

    def attended(self, now: LayerPass, query: Queries, key: Keys, value: Keys, *_more: Queries) -> Queries:
        """Attend from the pass's queries to all keys and values."""
        return attend(query, key, value, now.mask)


class _TextAttention:
    """Cross-attention that caches the text's keys and values for a rollout.

    A pass with gradient computes them again: the cached ones have no graph to the projections that made them.
    """

    def __call__(
        self, attn: WanAttention, x: Tensor, text: Tensor | LayerText, _mask: None = None, _rope: None = None
    ) -> Float[Tensor, "b n width"]:
        if not isinstance(text, LayerText):
            pairs = self.keys_and_values(attn, text)
        else:
            if len(text.cached) == 0:
                text.cached.extend(self.keys_and_values(attn, text.encoder))
            pairs = text.cached
        query = normed(attn.norm_q, attn.to_q(x)).to(pairs[0][1]).unflatten(2, (attn.heads, -1))
        return project_out(attn, reduce(torch.add, (attend(query, key, value, None) for key, value in pairs)))

    def keys_and_values(self, attn: WanAttention, text: Tensor) -> KeysValues:
        """Return keys and values of each attention whose results are added: here of the text's."""
        return [_by_head(attn, normed(attn.norm_k, attn.to_k(text)), attn.to_v(text))]


class _ImageTextAttention(_TextAttention):
    """Cross-attention to the text's tokens, and apart from it to CLIP's tokens of an image before them (Wan2.1 I2V)."""

    def keys_and_values(self, attn: WanAttention, text: Tensor) -> KeysValues:
        image, text = text[:, :-TEXT_TOKENS], text[:, -TEXT_TOKENS:]
        of_image = _by_head(attn, normed(attn.norm_added_k, attn.add_k_proj(image)), attn.add_v_proj(image))
        return [*super().keys_and_values(attn, text), of_image]


def normed(norm: nn.RMSNorm, x: Float[Tensor, "b n width"]) -> Float[Tensor, "b n width"]:
    """Apply x / sqrt(mean x^2 + eps) weight in float32, with a float32 result, in one kernel.

    Of a bf16 input and a float32 weight torch would make several; and only from 2.13 on does autocast widen the input.
    """
    return norm(x.float())


def _by_head(attn: WanAttention, key: Tensor, value: Tensor) -> tuple[Keys, Keys]:
    return key.to(value).unflatten(2, (attn.heads, -1)), value.unflatten(2, (attn.heads, -1))


def project_out(attn: WanAttention, heads: Heads) -> Float[Tensor, "b n width"]:
    return attn.to_out[1](attn.to_out[0](heads.flatten(2)))


def rotate(x: Heads, now: LayerPass | Pass) -> Heads:
    """Rotate pairs of adjacent channels by the angles of their token's position."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = now.cos[..., 0::2], now.sin[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
