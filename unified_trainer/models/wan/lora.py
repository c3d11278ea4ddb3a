"""Wan adapters by the names of Wan's own code and of published adapters, which diffusers and ComfyUI read."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from unified_trainer.errors import UserError

ATTENTION = {"attn1": "self_attn", "attn2": "cross_attn"}
LAYERS = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o", "net.0.proj": "0", "net.2": "2"}
KINDS = {"lora_A": "lora_down", "lora_B": "lora_up"}
KEY = re.compile(
    r"blocks\.(\d+)\.(attn1|attn2|ffn)\.(to_q|to_k|to_v|to_out\.0|net\.0\.proj|net\.2)\.(lora_[AB])\.weight"
)


def published_adapter(weights: Mapping[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """Rename an adapter's weights, given by peft's names, to those of published Wan adapters, and add its alpha.

    `blocks.0.attn1.to_q.lora_A.weight` becomes `diffusion_model.blocks.0.self_attn.q.lora_down.weight`. Raise UserError
    for a layer that published adapters have no name for.
    """
    named = {}
    for key, weight in weights.items():
        found = KEY.fullmatch(key)
        if found is None:
            raise UserError(f"{key} has no name in published Wan adapters: write the adapter with --adapter peft")
        block, part, layer, kind = found.groups()
        place = f"diffusion_model.blocks.{block}.{ATTENTION.get(part, part)}.{LAYERS[layer]}"
        named[f"{place}.{KINDS[kind]}.weight"] = weight.detach().contiguous()
        named[f"{place}.alpha"] = torch.tensor(float(alpha))
    return named
