"""Wan with each sample's tokens shared by a sequence group (Ulysses, arXiv:2309.14509).

diffusers' forward stays as it is. Between the first block and the last projection a rank has its own tokens; the number
of all of them goes along with the rotary embedding, which every block is handed, also when activations are recomputed.
"""

from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.sequence import (
    Heads,
    gather_tokens,
    heads_to_tokens,
    split_tokens,
    tokens_to_heads,
    whole_gradient,
)
from unified_trainer.types import Latents

Rope = tuple[Tensor, Tensor, int]  # cos and sin of this rank's tokens, and how many tokens all ranks have


class SharedTokens:
    """The hooks that share the tokens of a network, and what they last saw."""

    def __init__(self, network: WanTransformer3DModel, mesh: Mesh) -> None:
        heads, ranks = network.config.num_attention_heads, mesh.config.sequence
        if heads % ranks:
            raise ValueError(f"parallel.sequence must divide the {heads} attention heads, but is {ranks}")
        self._mesh, self._tokens = mesh, 0
        network.rope.register_forward_hook(self._split_rope)
        network.blocks[0].register_forward_pre_hook(self._split_input)
        network.proj_out.register_forward_hook(lambda _module, _inputs, output: self.gather(output))
        for block in network.blocks:
            block.attn1.processor = _SelfAttention(mesh)

    def whole_gradient(self, x_t: Latents) -> Latents:
        """The network's input, whose gradient the ranks complete."""
        return whole_gradient(x_t, self._mesh)

    def gather(self, x: Float[Tensor, "b own width"]) -> Float[Tensor, "b all width"]:
        """The tokens of all ranks, of the pass that is under way."""
        return gather_tokens(x, self._tokens, self._mesh)

    def _split_rope(self, _module: nn.Module, _inputs: Any, angles: tuple[Tensor, Tensor]) -> Rope:
        self._tokens = angles[0].shape[1]
        cos, sin = (split_tokens(part, self._mesh) for part in angles)
        return cos, sin, self._tokens

    def _split_input(self, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return split_tokens(inputs[0], self._mesh), *inputs[1:]


class _SelfAttention:
    """Every token's keys and values, a rank's heads."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def __call__(
        self, attn: WanAttention, x: Tensor, _encoder: None, _mask: None, rope: Rope
    ) -> Float[Tensor, "b n width"]:
        cos, sin, tokens = rope
        value = attn.to_v(x)
        query, key, value = (
            part.unflatten(2, (attn.heads, -1))
            for part in (attn.norm_q(attn.to_q(x)), attn.norm_k(attn.to_k(x)), value)
        )
        # In the precision that attention computes in, before anything is sent.
        parts = (part.to(value) for part in (_rotate(query, cos, sin), _rotate(key, cos, sin), value))
        by_head = (tokens_to_heads(part, tokens, self._mesh).transpose(1, 2) for part in parts)
        out = heads_to_tokens(scaled_dot_product_attention(*by_head).transpose(1, 2), self._mesh)
        return attn.to_out[1](attn.to_out[0](out.flatten(2)))


def _rotate(x: Heads, cos: Tensor, sin: Tensor) -> Heads:
    """Pairs of neighbouring channels turned by the angles of their token's position."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).type_as(x)
