"""A pipeline folder of Wan2.1's architecture with random weights, for benchmarks where no checkpoint is at hand."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch import nn
from transformers import UMT5Config, UMT5EncoderModel

from unified_trainer.run.registry import TINY

SPREAD = 0.02  # standard deviation of the random weights


@dataclass(frozen=True)
class Architecture:
    """The sizes of a random pipeline."""

    layers: int
    heads: int
    head_dim: int
    ffn: int
    text_dim: int
    text_tokens: int
    vae_dim: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


WAN_1_3B = Architecture(layers=30, heads=12, head_dim=128, ffn=8960, text_dim=4096, text_tokens=512, vae_dim=96)
TOY = Architecture(layers=2, heads=4, head_dim=12, ffn=96, text_dim=32, text_tokens=16, vae_dim=8)


def write(folder: Path, size: Architecture, device: torch.device) -> None:
    """Write the folder, all in fp32: transformer, VAE, and a text encoder of one layer with a small vocabulary.

    The text encoder's outputs have the width of UMT5-XXL's. Its time and memory are not: a run encodes its prompts
    before the first step and then removes it.
    """
    torch.manual_seed(0)
    with device:
        transformer = WanTransformer3DModel(
            num_layers=size.layers,
            num_attention_heads=size.heads,
            attention_head_dim=size.head_dim,
            ffn_dim=size.ffn,
            text_dim=size.text_dim,
        )
        vae = AutoencoderKLWan(base_dim=size.vae_dim)
        text = UMT5Config(vocab_size=512, d_model=size.text_dim, d_kv=16, d_ff=64, num_layers=1, num_heads=2)
        encoder = UMT5EncoderModel(text)
    _randomise(transformer)
    for part, network in {"transformer": transformer, "vae": vae, "text_encoder": encoder}.items():
        network.save_pretrained(folder / part)
    for part in ("tokenizer", "scheduler"):
        shutil.copytree(TINY / "wan" / part, folder / part)
    shutil.copy(TINY / "wan" / "model_index.json", folder)
    settings = folder / "tokenizer" / "tokenizer_config.json"
    held = json.loads(settings.read_text(encoding="utf-8"))
    settings.write_text(json.dumps(held | {"model_max_length": size.text_tokens}), encoding="utf-8")


def _randomise(network: nn.Module) -> None:
    """Draw all matrices anew: the last one of a new transformer is zero, which would hide everything before it."""
    for weight in network.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=SPREAD)
