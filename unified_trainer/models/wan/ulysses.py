"""Sequence parallelism for Wan, causal or not: a sequence group shares each sample's tokens (arXiv:2309.14509).

The forward of diffusers is unchanged; hooks do the exchange. Between the first block and the last projection a rank has
its own tokens only. The number of all tokens is passed to the blocks with the rotary embedding.
"""

from dataclasses import replace
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from jaxtyping import Float
from torch import Tensor, nn

from unified_trainer.basics.types import Latents
from unified_trainer.models.wan.attention import Pass, set_attention
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.sequence import check_heads, gather_tokens, split_tokens, whole_gradient


class SharedTokens:
    """Hooks that share the tokens of a network among the sequence ranks."""

    def __init__(self, network: WanTransformer3DModel, mesh: Mesh) -> None:
        check_heads(network.config.num_attention_heads, mesh)
        self.ranks, self._mesh, self._tokens = mesh.config.sequence, mesh, 0
        network.rope.register_forward_hook(self._split_rope)
        network.condition_embedder.register_forward_hook(self._split_time)
        network.blocks[0].register_forward_pre_hook(self._split_input)
        network.proj_out.register_forward_hook(lambda _module, _inputs, output: self.gather(output))
        set_attention(network.blocks)

    def whole_gradient(self, x_t: Latents) -> Latents:
        """Return the network's input unchanged; its gradient is summed over the sequence ranks."""
        return whole_gradient(x_t, self._mesh)

    def gather(self, x: Float[Tensor, "b own width"]) -> Float[Tensor, "b all width"]:
        """Gather the tokens of all sequence ranks, of the pass that runs now."""
        return gather_tokens(x, self._tokens, self._mesh)

    def _split_rope(self, _module: nn.Module, _inputs: Any, angles: Pass | tuple[Tensor, Tensor]) -> Pass:
        whole = angles if isinstance(angles, Pass) else Pass(*angles)
        self._tokens = whole.cos.shape[1]
        cos, sin = (split_tokens(part, self._mesh) for part in (whole.cos, whole.sin))
        return replace(whole, cos=cos, sin=sin, mesh=self._mesh, tokens=self._tokens)

    def _split_time(self, _module: nn.Module, _inputs: Any, output: tuple[Any, ...]) -> tuple[Any, ...]:
        """Take the time embeddings of this rank's tokens, where every token has its own noise level."""
        at_the_end, in_blocks, *text = output
        if at_the_end.ndim == 2:  # one noise level for the whole sample
            return output
        return split_tokens(at_the_end, self._mesh), split_tokens(in_blocks, self._mesh), *text

    def _split_input(self, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        # With the strides of a block's output, also of one sample: a compiled graph is one for all blocks then.
        own = split_tokens(inputs[0], self._mesh).clone(memory_format=torch.contiguous_format)
        return own, *inputs[1:]
