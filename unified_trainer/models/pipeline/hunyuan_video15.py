"""HunyuanVideo 1.5's transformer (arXiv:2511.18870) with masks of keys in place of sorted tokens and masks of pairs.

Its own forward reads which tokens are masked, which waits for the device in each pass, and moves them behind the
others. Text and image have no positions: masks alone give the same velocities.
"""

from functools import partial

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import apply_rotary_emb
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import pad

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.types import Latents


def with_masks(network: HunyuanVideo15Transformer3DModel) -> None:
    """Let a network run by `forward` and attend by `KeyMasked`.

    UserError for one that reads where each step ends, which no pipeline says.
    """
    if network.config.use_meanflow:
        raise UserError(
            "transformer/config.json: use_meanflow is true: this network was distilled to few steps and reads where "
            "each step ends, which the methods do not tell it; take one that was not"
        )
    network.forward = partial(forward, network)
    for block in network.transformer_blocks:
        block.attn.processor = KeyMasked()


def forward(
    network: HunyuanVideo15Transformer3DModel,
    hidden_states: Float[Tensor, "b read t h w"],
    timestep: Tensor,
    encoder_hidden_states: Float[Tensor, "b n d"],
    encoder_attention_mask: Tensor,
    encoder_hidden_states_2: Float[Tensor, "b m e"],
    encoder_attention_mask_2: Tensor,
    image_embeds: Float[Tensor, "b s f"],
    timestep_r: None = None,
    attention_kwargs: None = None,
    return_dict: bool = False,
) -> tuple[Latents]:
    """Return the velocities, for the arguments that the pipelines give; an image of zeros is none, and is masked."""
    (b, _, t, h, w), patch = hidden_states.shape, network.config.patch_size
    turns, times = network.rope(hidden_states), network.time_embed(timestep)
    first, second, third = network.cond_type_embed.weight
    words = refined(network.context_embedder, encoder_hidden_states, timestep, encoder_attention_mask.bool())
    glyphs = network.context_embedder_2(encoder_hidden_states_2)
    said = torch.cat([network.image_embedder(image_embeds) + third, glyphs + second, words + first], 1)
    seen = image_embeds.flatten(1).any(1, keepdim=True).expand(-1, image_embeds.shape[1])
    mask = torch.cat([seen, encoder_attention_mask_2.bool(), encoder_attention_mask.bool()], 1)
    tokens = network.x_embedder(hidden_states)
    for block in network.transformer_blocks:
        tokens, said = block(tokens, said, times, mask, turns)
    tokens = network.proj_out(network.norm_out(tokens, times))
    patches = tokens.view(b, t, h // patch, w // patch, -1, patch, patch).permute(0, 4, 1, 2, 5, 3, 6)
    return (patches.reshape(b, -1, t, h, w),)


def refined(embedder: nn.Module, text: Float[Tensor, "b n d"], time: Tensor, mask: Tensor) -> Tensor:
    """Return the tokens of a text, which attend to those that are not masked."""
    counted = mask.unsqueeze(2).to(text)
    times = embedder.time_text_embed(time, (text * counted).sum(1) / counted.sum(1))
    tokens = embedder.proj_in(text)
    for block in embedder.token_refiner.refiner_blocks:
        tokens = block(tokens, times, mask[:, None, None])
    return tokens


class KeyMasked:
    """Joint attention; its own code makes a mask of all pairs, 2.3 GiB at 121 x 480 x 832.

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
