"""Wan adapters by the names of Wan's own code and of published adapters, which diffusers and ComfyUI read."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from unified_trainer.basics.errors import UserError

ATTENTION = {"attn1": "self_attn", "attn2": "cross_attn"}
PARTS = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o", "norm_q": "norm_q", "norm_k": "norm_k"}
PARTS |= {"add_k_proj": "k_img", "add_v_proj": "v_img", "norm_added_k": "norm_k_img"}  # of CLIP's tokens
# Names inside of a block and outside of the blocks: diffusers' name, and Wan's own.
INSIDE = {f"{ours}.{part}": f"{theirs}.{name}" for ours, theirs in ATTENTION.items() for part, name in PARTS.items()}
INSIDE |= {"ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2", "norm2": "norm3", "scale_shift_table": "modulation"}
OUTSIDE = {
    "patch_embedding": "patch_embedding",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.image_embedder.norm1": "img_emb.proj.0",
    "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
    "condition_embedder.image_embedder.norm2": "img_emb.proj.4",
    "proj_out": "head.head",
    "scale_shift_table": "head.modulation",
}
KINDS = {"lora_A": "lora_down", "lora_B": "lora_up"}


def published_layer(layer: str) -> str | None:
    """Return Wan's own name of a layer or parameter that diffusers calls `layer`; None if it has none."""
    block = re.fullmatch(r"(blocks\.\d+)\.(.+)", layer)
    if block is None:
        return OUTSIDE.get(layer)
    return f"{block[1]}.{INSIDE[block[2]]}" if block[2] in INSIDE else None


def published_adapter(weights: Mapping[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """Rename an adapter's weights, given by peft's names, to those of published Wan adapters, and add its alpha.

    `blocks.0.attn1.to_q.lora_A.weight` becomes `diffusion_model.blocks.0.self_attn.q.lora_down.weight`. Outside of the
    blocks, where diffusers reads no alpha, B is multiplied by alpha / rank. Raise UserError for a layer that published
    adapters have no name for.
    """
    named = {}
    for key, weight in weights.items():
        layer, kind = key.removesuffix(".weight").rsplit(".", 1)
        name = published_layer(layer)
        if name is None or name == "patch_embedding":  # which diffusers does not read
            raise UserError(f"{key} has no name in published Wan adapters: write the adapter with --adapter peft")
        outside = not name.startswith("blocks.")
        scale = alpha / weight.shape[1] if outside and kind == "lora_B" else 1.0
        named[f"diffusion_model.{name}.{KINDS[kind]}.weight"] = scale * weight.detach().contiguous()
        named |= {} if outside else {f"diffusion_model.{name}.alpha": torch.tensor(float(alpha))}
    return named
