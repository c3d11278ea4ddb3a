"""The sizes of the models that the recipes are made for: from a folder's configs, or as they were published.

No file but a config.json is read. Sources of the published ones: config.json of the transformers, the text encoder and
the VAE in the folders of `PUBLISHED` on the Hugging Face hub. HPSv3 (arXiv:2508.03789) is Qwen/Qwen2-VL-7B-Instruct
with a head in place of the vocabulary's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, UMT5Config, UMT5EncoderModel

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import read_json
from unified_trainer.models import hub
from unified_trainer.models.wan.configs import EXPERTS, INDEX
from unified_trainer.run.registry import family_of
from unified_trainer.run.settings.config import RunConfig, load_recipe
from unified_trainer.tools.plan.flops import TransformerSize, encode_flops
from unified_trainer.tools.plan.image_size import QwenImageSize, decoder_flops

WAN = {"patch_size": [1, 2, 2], "attention_head_dim": 128, "in_channels": 16, "out_channels": 16, "text_dim": 4096}
WAN |= {"freq_dim": 256, "rope_max_seq_len": 1024}
UMT5_XXL = {"vocab_size": 256384, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
OF_14B = {**WAN, "num_layers": 40, "num_attention_heads": 40, "ffn_dim": 13824}
OF_5B = {**WAN, "num_layers": 30, "num_attention_heads": 24, "ffn_dim": 14336, "in_channels": 48, "out_channels": 48}
VAE = {"_class_name": "AutoencoderKLWan"}
VAE_5B = {**VAE, "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "in_channels": 12}
VAE_5B |= {"out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16, "scale_factor_temporal": 4}
VAE_5B |= {"latents_mean": [0.0] * 48, "latents_std": [1.0] * 48}  # sizes do not depend on them
# The text encoder is Qwen2.5-VL-7B, whose vision tower a text does not use.
QWEN_VL = {"text_config": {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944}}
QWEN_VL["text_config"] |= {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
QWEN_VL["vision_config"] = {"hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584}
QWEN_IMAGE = {"_class_name": "QwenImageTransformer2DModel", "num_layers": 60, "num_attention_heads": 24}
QWEN_IMAGE |= {"attention_head_dim": 128, "in_channels": 64, "out_channels": 16, "joint_attention_dim": 3584}
PUBLISHED: dict[str, tuple[dict[str, Any], float | None, dict[str, Any]]] = {
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": (
        {**WAN, "num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960},
        None,
        VAE,
    ),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": (OF_14B, None, VAE),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": (OF_14B, 0.875, VAE),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": (OF_5B, None, VAE_5B),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": (
        {**OF_14B, "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120},
        None,
        VAE,
    ),
    "Qwen/Qwen-Image": (QWEN_IMAGE, None, {"_class_name": "AutoencoderKLQwenImage"}),
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": ({**OF_14B, "in_channels": 36}, 0.9, VAE),
}
HPSV3_WEIGHTS = 8.29e9 - 152064 * 3584 + 3584 * 1024 + 1024 * 16  # without the vocabulary's head, with its own
NETWORK, IMAGE_NETWORK = "WanTransformer3DModel", "QwenImageTransformer2DModel"
TEXT_TOKENS = 512  # that both families pad prompts to
TEMPLATE_TOKENS = 34  # of Qwen-Image's prompts, which are no part of an embedding


@dataclass(frozen=True)
class Architecture:
    """A model of Wan or Qwen-Image: one or two transformers, a VAE and a text encoder."""

    source: str  # where the sizes come from
    transformer: Mapping[str, Any]  # config
    boundary: float | None  # noise level at which two networks meet
    vae: Mapping[str, Any]  # config
    text_encoder: Mapping[str, Any]  # config
    text_tokens: int = TEXT_TOKENS
    gates: int = 0  # layers of a block that the role's sparse attention adds

    @cached_property
    def size(self) -> TransformerSize | QwenImageSize:
        if self.makes_images:
            return QwenImageSize.of(self.transformer)
        return replace(TransformerSize.of(self.transformer), gates=self.gates)

    @property
    def makes_images(self) -> bool:
        """Whether the network is Qwen-Image's."""
        return self.transformer.get("_class_name") == IMAGE_NETWORK

    @property
    def heads(self) -> int:
        """The heads of self-attention that sequence ranks divide; 1 where they cannot."""
        return 1 if self.makes_images else int(self.transformer["num_attention_heads"])

    @property
    def encode_flops(self) -> float:
        """The FLOPs of encoding a prompt."""
        count = decoder_flops if self.makes_images else encode_flops
        return count(self.text_encoder, self.text_tokens)

    @cached_property
    def vae_weights(self) -> int:
        """The number of weights of the VAE, laid out without memory."""
        kind = AutoencoderKLQwenImage if self.makes_images else AutoencoderKLWan
        return _count(lambda: kind.from_config(dict(self.vae)))

    @cached_property
    def text_weights(self) -> int:
        """The number of weights of the text encoder, laid out without memory."""
        if self.makes_images:
            return _count(lambda: Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**self.text_encoder)))
        return _count(lambda: UMT5EncoderModel(UMT5Config(**self.text_encoder)))

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Return channels, latent frames, height and width of a video's latents."""
        if self.makes_images and frames != 1:
            raise UserError(f"video.frames must be 1, not {frames}: this model makes images")
        time, space = self.vae.get("scale_factor_temporal", 4), self.vae.get("scale_factor_spatial", 8)
        return self.size.channels, (frames - 1) // time + 1, height // space, width // space


def _count(make: Any) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in make().parameters())


def architecture_of(role: str, path: str, run: RunConfig) -> Architecture:
    """Return the sizes of the model in a role's path; an empty path is the model that the recipe was made for.

    UserError for a model that is neither published with these sizes nor in a folder.
    """
    if path and path != "tiny" and hub.is_hub_id(path) and not Path(path).exists():
        name = path.partition("@")[0]
        if name not in PUBLISHED:
            raise UserError(
                f"{role}.path {path}: no sizes are known for it; name a folder with its config.json files, or one of "
                f"{', '.join(PUBLISHED)}"
            )
        return _published(name, f"published configs of {name}")
    if path:
        family, folder = family_of(role, path)
        components, boundary = family.networks(folder)
        network = read_json(folder / components[0] / "config.json")
        if network.get("_class_name") not in (NETWORK, IMAGE_NETWORK):
            raise UserError(
                f"{role}.path {path}: memory and FLOPs are computed for networks of class {NETWORK} and "
                f"{IMAGE_NETWORK} alone, not for {network.get('_class_name')}"
            )
        vae, encoder = (read_json(folder / part / "config.json") for part in ("vae", "text_encoder"))
        tokens, settings = TEXT_TOKENS, folder / "tokenizer" / "tokenizer_config.json"
        if settings.is_file():
            unseen = TEMPLATE_TOKENS if network["_class_name"] == IMAGE_NETWORK else 0
            tokens = int(min(TEXT_TOKENS, read_json(settings).get("model_max_length", 2 * TEXT_TOKENS) - unseen))
        return Architecture(f"configs in {folder}", network, boundary, vae, encoder, tokens)
    fits = load_recipe(run.recipe).get("fits", {}) if run.recipe else {}
    for name, (config, boundary, _) in PUBLISHED.items():
        known = {**config, "networks": 1 if boundary is None else len(EXPERTS)}
        if fits and fits.items() <= known.items():
            return _published(name, f"recipe {run.recipe}: published configs of {name}")
    raise UserError(
        f"{role}.path is not given and recipe {run.recipe or '(none)'} fits no published model: name a folder with "
        f"{INDEX} and the config.json files, or a hub id of {', '.join(PUBLISHED)}"
    )


def _published(name: str, source: str) -> Architecture:
    config, boundary, vae = PUBLISHED[name]
    return Architecture(source, config, boundary, vae, QWEN_VL if "_class_name" in config else UMT5_XXL)
