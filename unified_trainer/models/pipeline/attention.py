"""Attention of networks of diffusers in fewer roundings and less memory than their own code takes."""

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import apply_rotary_emb
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import pad

from unified_trainer.models.pipeline.hunyuan_video15 import with_masks


def improve(network: nn.Module) -> None:
    """Let torch's norms compute in float32, and HunyuanVideo 1.5 run and attend with a mask of keys."""
    if isinstance(network, HunyuanVideo15Transformer3DModel):
        with_masks(network)
    for module in network.modules():
        if isinstance(module, nn.RMSNorm):
            module.register_forward_pre_hook(widen)
        if type(vars(module).get("processor")).__name__ == "HunyuanVideo15AttnProcessor2_0":
            module.processor = KeyMasked()


def widen(_norm: nn.RMSNorm, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Widen the input to float32, as the weight is: of a bf16 one torch makes several kernels, and rounds twice."""
    return (inputs[0].float(),)


class KeyMasked:
    """Joint attention of HunyuanVideo 1.5; its own code makes a mask of all pairs, 2.3 GiB at 121 x 480 x 832.

    That also masks the queries of padding, which nothing reads.
    """

    def __call__(
        self,
        attn: Attention,
        hidden_states: Float[Tensor, "b n width"],
        encoder_hidden_states: Float[Tensor, "b m width"],
        attention_mask: Bool[Tensor, "b m"],
        image_rotary_emb: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens of the video, and those of the text, some of which are masked."""
        heads, tokens = (attn.heads, -1), hidden_states.shape[1]
        query, key, value = (layer(hidden_states).unflatten(2, heads) for layer in (attn.to_q, attn.to_k, attn.to_v))
        layers = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        text_query, text_key, text_value = (layer(encoder_hidden_states).unflatten(2, heads) for layer in layers)
        query, key = (
            torch.cat([apply_rotary_emb(norm(x), image_rotary_emb, sequence_dim=1), text_norm(text)], 1)
            for norm, x, text_norm, text in (
                (attn.norm_q, query, attn.norm_added_q, text_query),
                (attn.norm_k, key, attn.norm_added_k, text_key),
            )
        )
        mask = pad(attention_mask, (tokens, 0), value=True)[:, None, None]
        seen = dispatch_attention_fn(query, key, torch.cat([value, text_value], 1), attn_mask=mask).flatten(2)
        return attn.to_out[0](seen[:, :tokens]), attn.to_add_out(seen[:, tokens:])
