"""Networks of joint attention: each block takes the tokens of the video and of the text, and returns both.

A sequence group shares the tokens of the video; every rank has those of the text (Ulysses, arXiv:2309.14509).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers.models.attention_processor import Attention
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from unified_trainer.models.diffusers_model import DiffusersModel
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.sequence import (
    Heads,
    check_heads,
    gather_heads,
    gather_tokens,
    heads_to_tokens,
    own_heads,
    split_tokens,
    tokens_to_heads,
    whole_gradient,
)

Rotate = Callable[[Heads], Heads]
Rotations = Callable[[Any], tuple[Rotate, Rotate]]  # of the network's angles: for the video's tokens and for the text's


class JointAttention:
    """Attention of video and text to what is not masked, in one call; it waits for no number of the device."""

    def __init__(self, rotations: Rotations) -> None:
        self._rotations = rotations

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
        encoder_hidden_states_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the tokens of video [b, n, width] and text [b, m, width], or of the video alone without a text.

        Either mask is of the text, bool [b, m]: the families name it differently.
        """
        turn, turn_text = self._rotations(image_rotary_emb)
        query, key, value = (self.video_heads(x) for x in _projected(attn, hidden_states, "to_q", "to_k", "to_v"))
        query, key, tokens = turn(_normed(attn.norm_q, query)), turn(_normed(attn.norm_k, key)), query.shape[1]
        if encoder_hidden_states is not None:
            layers = _projected(attn, encoder_hidden_states, "add_q_proj", "add_k_proj", "add_v_proj")
            text_query, text_key, text_value = (self.text_heads(x) for x in layers)
            text_query = turn_text(_normed(attn.norm_added_q, text_query))
            text_key = turn_text(_normed(attn.norm_added_k, text_key))
            pairs = ((query, text_query), (key, text_key), (value, text_value))
            query, key, value = (torch.cat(pair, 1) for pair in pairs)
        mask = attention_mask if encoder_hidden_states_mask is None else encoder_hidden_states_mask
        if mask is not None:
            mask = pad(mask, (tokens, 0), value=True)[:, None, None]
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        seen = scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)
        out = self.video_tokens(seen[:, :tokens]).flatten(2)
        for layer in attn.to_out:
            out = layer(out)
        if encoder_hidden_states is None:
            return out
        text = self.text_tokens(seen[:, tokens:]).flatten(2)
        return out, text if attn.to_add_out is None else attn.to_add_out(text)

    def video_heads(self, x: Heads) -> Heads:
        """Return all tokens of the video, with the heads that this rank attends with, of this rank's tokens."""
        return x

    def text_heads(self, x: Heads) -> Heads:
        """Return the heads of the text that this rank attends with."""
        return x

    def video_tokens(self, x: Heads) -> Heads:
        """Return this rank's tokens of the video, with all heads: the inverse of `video_heads`."""
        return x

    def text_tokens(self, x: Heads) -> Heads:
        """Return all heads of the text: the inverse of `text_heads`."""
        return x


def _projected(attn: Attention, x: Tensor, *layers: str) -> tuple[Heads, Heads, Heads]:
    query, key, value = (getattr(attn, layer)(x).unflatten(2, (attn.heads, -1)) for layer in layers)
    return query, key, value


def _normed(norm: nn.Module | None, x: Heads) -> Heads:
    return x if norm is None else norm(x)


class SharedTokens(JointAttention):
    """Joint attention whose ranks share the tokens of the video, and hooks that divide and gather these.

    A rank has its own tokens from the network's `embedder` to its last projection.
    """

    def __init__(self, network: nn.Module, embedder: str, mesh: Mesh, rotations: Rotations) -> None:
        super().__init__(rotations)
        check_heads(network.config.num_attention_heads, mesh)
        self._mesh, self._tokens = mesh, 0
        network.get_submodule(embedder).register_forward_pre_hook(self._whole_gradient)
        network.get_submodule(embedder).register_forward_hook(self._split)
        network.proj_out.register_forward_hook(lambda _module, _inputs, output: self.gather(output))

    def gather(self, x: Float[Tensor, "b own width"]) -> Float[Tensor, "b all width"]:
        """Gather the tokens of all sequence ranks, of the pass that runs now."""
        return gather_tokens(x, self._tokens, self._mesh)

    def video_heads(self, x: Heads) -> Heads:
        return tokens_to_heads(x, self._tokens, self._mesh)

    def text_heads(self, x: Heads) -> Heads:
        return own_heads(x, self._mesh)

    def video_tokens(self, x: Heads) -> Heads:
        return heads_to_tokens(x, self._mesh)

    def text_tokens(self, x: Heads) -> Heads:
        return gather_heads(x, self._mesh)

    def _whole_gradient(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return whole_gradient(inputs[0], self._mesh), *inputs[1:]

    def _split(self, _module: nn.Module, _inputs: Any, tokens: Float[Tensor, "b all width"]) -> Tensor:
        self._tokens = tokens.shape[1]
        return split_tokens(tokens, self._mesh).clone(memory_format=torch.contiguous_format)


class JointModel(DiffusersModel):
    """Base of the models whose blocks, `transformer_blocks`, have joint attention.

    A family names the child that makes the video's tokens, and their place in what a block returns.
    """

    embedder: ClassVar[str]
    video: ClassVar[int]

    def __init__(self, network: nn.Module, folder: Path | None = None) -> None:
        super().__init__(network, folder)
        self._shared: SharedTokens | None = None

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return tuple(self.network.transformer_blocks)

    @property
    def feature_size(self) -> int:
        config = self.network.config
        return config.num_attention_heads * config.attention_head_dim

    def whole(self, tokens: tuple[Tensor, Tensor]) -> Tensor:
        """Return the tokens of the video, of all ranks, of what a block returns."""
        return self._shared.gather(tokens[self.video]) if self._shared else tokens[self.video]

    @staticmethod
    def rotations(_angles: Any) -> tuple[Rotate, Rotate]:
        """Return how the network's angles turn queries and keys, of the video and of the text: here they do not."""
        return (lambda x: x), (lambda x: x)

    def share_tokens(self, mesh: Mesh) -> None:
        self._shared = SharedTokens(self.network, self.embedder, mesh, self.rotations)
        for block in self.blocks:
            for attention in block.modules():
                if isinstance(attention, Attention):
                    attention.set_processor(self._shared)
