"""Self-attention of LTX-Video whose ranks share the tokens of a sample (Ulysses, arXiv:2309.14509).

Every rank has the whole text, to which its own tokens attend as without ranks.
"""

from typing import Any

from diffusers import LTXVideoTransformer3DModel
from diffusers.models.transformers.transformer_ltx import LTXAttention, apply_rotary_emb
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from unified_trainer.models.joint_model import JointModel, SharedTokens
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.sequence import split_tokens


class SelfAttention(SharedTokens):
    """Attention that exchanges heads between ranks, and hooks that divide tokens, their angles and their times."""

    def __init__(self, network: LTXVideoTransformer3DModel, mesh: Mesh) -> None:
        super().__init__(network, "proj_in", mesh, JointModel.rotations)
        network.rope.register_forward_hook(self._split_angles)
        network.time_embed.register_forward_pre_hook(self._split_times, with_kwargs=True)
        for block in network.transformer_blocks:
            block.attn1.set_processor(self)

    def __call__(  # type: ignore[override]
        self,
        attn: LTXAttention,
        hidden_states: Float[Tensor, "b own width"],
        encoder_hidden_states: None = None,
        attention_mask: None = None,
        image_rotary_emb: Any = None,
    ) -> Float[Tensor, "b own width"]:
        query = apply_rotary_emb(attn.norm_q(attn.to_q(hidden_states)), image_rotary_emb)
        key = apply_rotary_emb(attn.norm_k(attn.to_k(hidden_states)), image_rotary_emb)
        value = attn.to_v(hidden_states)
        parts = (x.to(value).unflatten(2, (attn.heads, -1)) for x in (query, key, value))
        query, key, value = (self.video_heads(x).transpose(1, 2) for x in parts)
        seen = scaled_dot_product_attention(query, key, value).transpose(1, 2)
        return attn.to_out[0](self.video_tokens(seen).flatten(2))

    def _split_angles(self, _module: nn.Module, _inputs: Any, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return tuple(split_tokens(part, self._mesh) for part in angles)

    def _split_times(self, _module: nn.Module, inputs: tuple[Tensor], named: dict[str, Any]) -> Any:
        """Take the times of this rank's tokens, where every token has its own."""
        times = inputs[0].view(named["batch_size"], -1)
        if times.shape[1] == 1:  # one time for the whole sample
            return None
        return (split_tokens(times, self._mesh).flatten(),), named
