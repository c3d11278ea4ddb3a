"""The sizes of the models that the recipes are made for: from a folder's configs, or as they were published.

No file but configs is read. Sources of the published ones: config.json of the transformers, the text encoders and the
VAE in the folders of `PUBLISHED` on the Hugging Face hub. HPSv3 (arXiv:2508.03789) is Qwen/Qwen2-VL-7B-Instruct
with a head in place of the vocabulary's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import read_json
from unified_trainer.models import hub
from unified_trainer.models.base import EXPERTS, Family, Shape
from unified_trainer.models.blueprint import Blueprint
from unified_trainer.models.image_latents import image_latent_shape, video_latent_shape
from unified_trainer.models.pass_flops import PassCount
from unified_trainer.run.registry import family_named, family_of
from unified_trainer.run.settings.config import RunConfig, load_recipe
from unified_trainer.tools.plan.flops import decode_flops, encode_flops
from unified_trainer.tools.plan.network_size import (
    CodecKind,
    Config,
    ModelKind,
    NetworkSize,
    frozen_config,
    outline_of,
    plain_pass,
    size_of,
)

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
QWEN_IMAGE = {"num_layers": 60, "num_attention_heads": 24, "attention_head_dim": 128, "in_channels": 64}
QWEN_IMAGE |= {"out_channels": 16, "joint_attention_dim": 3584}
SD3_MEDIUM: dict[str, Any] = {"sample_size": 128, "patch_size": 2, "in_channels": 16, "num_layers": 24}
SD3_MEDIUM |= {"num_attention_heads": 24}
SD3_MEDIUM |= {"attention_head_dim": 64, "joint_attention_dim": 4096, "caption_projection_dim": 1536}
SD3_MEDIUM |= {"pooled_projection_dim": 2048, "out_channels": 16, "pos_embed_max_size": 384, "qk_norm": "rms_norm"}
SD3_MEDIUM |= {"dual_attention_layers": [*range(13)]}
KL_VAE: dict[str, Any] = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
KL_VAE |= {"block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "latent_channels": 16}
KL_VAE |= {"scaling_factor": 1.5305, "shift_factor": 0.0609, "use_quant_conv": False, "use_post_quant_conv": False}
CLIP_L = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
CLIP_L |= {"projection_dim": 768, "vocab_size": 49408, "max_position_embeddings": 77}
CLIP_G = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20}
CLIP_G |= {"projection_dim": 1280, "vocab_size": 49408, "max_position_embeddings": 77}
# HunyuanVideo 1.5: its own defaults in diffusers; Qwen2.5-VL without vision, and the encoder of ByT5-small.
HUNYUAN15 = {
    "num_layers": 54,
    "num_attention_heads": 16,
    "attention_head_dim": 128,
    "in_channels": 65,
    "out_channels": 32,
}
HUNYUAN15 |= {"text_embed_dim": 3584, "text_embed_2_dim": 1472, "image_embed_dim": 1152}
BYT5: dict[str, Any] = {"vocab_size": 1510, "d_model": 1472, "d_kv": 64, "d_ff": 3584, "num_layers": 12, "num_heads": 6}
BYT5 |= {"feed_forward_proj": "gated-gelu"}
HUNYUAN15_ENCODERS: tuple[Any, Any] = ({"_class_name": "AutoencoderKLHunyuanVideo15"}, (QWEN_VL["text_config"], BYT5))
T5_XXL = {**UMT5_XXL, "vocab_size": 32128, "feed_forward_proj": "gated-gelu"}
LTX = {"num_layers": 28, "num_attention_heads": 32, "attention_head_dim": 64, "in_channels": 128, "out_channels": 128}
LTX |= {"cross_attention_dim": 2048, "caption_channels": 4096}
LTX2: dict[str, Any] = {"num_layers": 48, "num_attention_heads": 32, "attention_head_dim": 128, "in_channels": 128}
LTX2 |= {"out_channels": 128, "cross_attention_dim": 4096, "audio_in_channels": 128, "audio_out_channels": 128}
LTX2 |= {"audio_num_attention_heads": 32, "audio_attention_head_dim": 64, "audio_cross_attention_dim": 2048}
LTX2 |= {"caption_channels": 3840, "rope_type": "split"}
LTX2_VAE = {"_class_name": "AutoencoderKLLTX2Video", "decoder_causal": False}
LTX2_VAE |= {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8}
GEMMA3_12B = {"vocab_size": 262208, "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48}
GEMMA3_12B |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256}


@dataclass(frozen=True)
class Published:
    """The configs of a model's folder, as far as sizes depend on them."""

    pipeline: str  # the class that model_index.json names
    transformer: Mapping[str, Any]
    vae: Mapping[str, Any]
    text_encoders: tuple[Mapping[str, Any], ...] = (UMT5_XXL,)
    boundary: float | None = None  # noise level at which two networks meet


PUBLISHED = {
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": Published(
        "WanPipeline", {**WAN, "num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960}, VAE
    ),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": Published("WanPipeline", OF_14B, VAE),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": Published("WanPipeline", OF_14B, VAE, boundary=0.875),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": Published("WanPipeline", OF_5B, VAE_5B),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": Published(
        "WanImageToVideoPipeline", {**OF_14B, "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}, VAE
    ),
    "Qwen/Qwen-Image": Published("QwenImagePipeline", QWEN_IMAGE, {}, (QWEN_VL,)),
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": Published(
        "WanImageToVideoPipeline", {**OF_14B, "in_channels": 36}, VAE, boundary=0.9
    ),
    "stabilityai/stable-diffusion-3.5-medium": Published(
        "StableDiffusion3Pipeline", SD3_MEDIUM, KL_VAE, (CLIP_L, CLIP_G, T5_XXL)
    ),
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": Published(
        "HunyuanVideo15Pipeline", {**HUNYUAN15, "task_type": "t2v"}, *HUNYUAN15_ENCODERS
    ),
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v": Published(
        "HunyuanVideo15ImageToVideoPipeline", {**HUNYUAN15, "task_type": "i2v"}, *HUNYUAN15_ENCODERS
    ),
    "Lightricks/LTX-Video": Published("LTXPipeline", LTX, {"_class_name": "AutoencoderKLLTXVideo"}, (T5_XXL,)),
    "Lightricks/LTX-2": Published("LTX2Pipeline", LTX2, LTX2_VAE, ({"text_config": GEMMA3_12B},)),
}
HPSV3_WEIGHTS = 8.29e9 - 152064 * 3584 + 3584 * 1024 + 1024 * 16  # without the vocabulary's head, with its own


@dataclass(frozen=True)
class Architecture:
    """A model of a family: one or two transformers, a VAE and text encoders."""

    source: str  # where the sizes come from
    family: Family
    transformer: Mapping[str, Any]  # config
    boundary: float | None  # noise level at which two networks meet
    vae: Mapping[str, Any]  # config
    text_encoders: tuple[Mapping[str, Any], ...]  # configs
    longest: tuple[int, ...]  # tokens of a prompt that each text encoder reads at most
    folder: Path | None = None  # of its configs; None for a published model, whose sizes are known here
    gates: int = 0  # layers of a block that the role's sparse attention adds
    flow_map: bool = False  # whether the role is a flow map

    @property
    def blueprint(self) -> Blueprint:
        blueprint = self.family.blueprint
        assert blueprint is not None  # `architecture_of` refuses families without one
        return blueprint

    @property
    def codec(self) -> CodecKind:
        """The class of the codec."""
        return self.blueprint.codec

    @property
    def kind(self) -> ModelKind:
        """The class of the network's model."""
        return (self.blueprint.flow_map if self.flow_map else None) or self.blueprint.model(self.transformer)

    @cached_property
    def config(self) -> Config:
        """The config of the transformer, as a key of caches."""
        return frozen_config(self.transformer)

    @cached_property
    def size(self) -> NetworkSize:
        return replace(size_of(self.kind, self.config), gates=self.gates)

    def plain_pass(self, shape: Shape) -> PassCount:
        """Return the FLOPs of a forward pass over one sample whose latents have this shape."""
        return plain_pass(self.kind, self.config, shape, self.text_tokens)

    @property
    def heads(self) -> int:
        """The heads of self-attention that sequence ranks divide; 1 where they cannot."""
        return self.blueprint.heads(self.transformer)

    @property
    def text_tokens(self) -> int:
        """The rows that the embedding of a prompt is padded to."""
        return self.codec.text_rows(self.longest)

    @property
    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        """The largest shapes of the tensors of a prompt, by their names."""
        kinds = zip(self.codec.text_classes, self.text_encoders, strict=True)
        configs = [kind.config_class.from_dict(dict(config)) for kind, config in kinds]
        widths = [config.get_text_config().hidden_size for config in configs]
        return {"text": (self.text_tokens, self.codec.joined_width(widths, lambda: self.transformer))}

    @property
    def encode_flops(self) -> float:
        """The FLOPs of encoding a prompt."""
        return encode_flops(self.codec, tuple(map(frozen_config, self.text_encoders)), self.longest)

    def decode_flops(self, frames: int, height: int, width: int) -> float:
        """Return the FLOPs of decoding latents of this size."""
        return decode_flops(self.codec, self.vae, frames, height, width)

    @cached_property
    def vae_weights(self) -> int:
        """The number of weights of the VAE, laid out without memory."""
        with torch.device("meta"):
            network = self.codec.vae_class.from_config(dict(self.vae))
        return sum(p.numel() for p in network.parameters())

    def latent_shape(self, frames: int, height: int, width: int) -> Shape:
        """Return channels, latent frames, height and width of a video; UserError for one that no latents make."""
        if self.folder is not None:
            return self.family.latent_shape(self.folder, frames, height, width)
        (time, space), (channels, patch) = self.codec.scales(self.vae), self._input
        if self.blueprint.images:
            return self.codec.joint_shape(image_latent_shape(channels, space, patch, frames, height, width))
        return self.codec.joint_shape(video_latent_shape(channels, time, space, patch, frames, height, width))

    @cached_property
    def _input(self) -> tuple[int, int]:
        """The channels of the network's latents, and the latents along a side of its patches."""
        model = outline_of(self.kind, self.config)
        x_t, _, _ = model.example()
        patch = cast(Any, model.network).config.patch_size
        return x_t.shape[1], max(patch) if isinstance(patch, list | tuple) else patch


def architecture_of(role: str, path: str, run: RunConfig) -> Architecture:
    """Return the sizes of the model in a role's path; an empty path is the model that the recipe was made for.

    UserError for a model that is neither published with these sizes nor in a folder of a family with a blueprint.
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
        return _of_folder(role, *family_of(role, path))
    fits = load_recipe(run.recipe).get("fits", {}) if run.recipe else {}
    for name, model in PUBLISHED.items():
        known = {**model.transformer, "networks": 1 if model.boundary is None else len(EXPERTS)}
        if fits and fits.items() <= known.items():
            return _published(name, f"recipe {run.recipe}: published configs of {name}")
    raise UserError(
        f"{role}.path is not given and recipe {run.recipe or '(none)'} fits no published model: name a folder with "
        f"model_index.json and the config.json files, or a hub id of {', '.join(PUBLISHED)}"
    )


def _of_folder(role: str, family: Family, folder: Path) -> Architecture:
    components, boundary = family.networks(folder)
    if family.blueprint is None:
        raise UserError(
            f"{role}.path {folder}: memory and FLOPs are computed for families with a blueprint; set that of "
            f"the family of {family.pipelines[0]} (unified_trainer.models.blueprint.Blueprint)"
        )
    codec = family.blueprint.codec
    encoders = tuple(read_json(part / "config.json") for part in codec.parts(folder, "text_encoder"))
    files = [part / "tokenizer_config.json" for part in codec.parts(folder, "tokenizer")]
    given = [read_json(file).get("model_max_length") if file.is_file() else None for file in files]
    most = codec.longest_text
    longest = [most if tokens is None else int(min(most, tokens - codec.template_tokens)) for tokens in given]
    network, vae = (read_json(folder / part / "config.json") for part in (components[0], "vae"))
    return Architecture(f"configs in {folder}", family, network, boundary, vae, encoders, tuple(longest), folder)


def _published(name: str, source: str) -> Architecture:
    model = PUBLISHED[name]
    family = family_named(model.pipeline, name)
    assert family.blueprint is not None  # the families of this package have one
    most = family.blueprint.codec.longest_text
    longest = tuple(min(most, encoder.get("max_position_embeddings", most)) for encoder in model.text_encoders)
    return Architecture(source, family, model.transformer, model.boundary, model.vae, model.text_encoders, longest)
