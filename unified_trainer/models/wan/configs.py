"""The configs of a WanPipeline folder: which fields the trainer depends on, and what they may be."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from diffusers import AutoencoderKLWan
from pydantic import Field, model_validator

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import Schema, read_as
from unified_trainer.models.base import EXPERTS
from unified_trainer.models.folder import check_described
from unified_trainer.models.wan.attention import TEXT_TOKENS

INDEX = "model_index.json"
CLIP = "image_encoder"  # component of a folder
CLIP_TOKENS = 257  # of a condition image: 16 x 16 patches and one for all of it
MASK_CHANNELS = 4  # of a network with an image, beside latents and image latents: pixel frames of a latent frame

Size = Annotated[int, Field(ge=1, le=2**20)]
Layers = Annotated[int, Field(ge=1, le=1000)]  # more would take minutes to lay out
Entry = Annotated[list[str | None], Field(min_length=2, max_length=2)]  # library and class


class ModelIndex(Schema):
    """model_index.json, as far as it names networks."""

    boundary_ratio: float | None = Field(None, gt=0, lt=1)
    expand_timesteps: bool = False  # the first latent frame may be that of an image (Wan2.2 TI2V)
    transformer_2: Entry | None = None


class TransformerConfig(Schema):
    """The config of a WanTransformer3DModel."""

    class_name: Literal["WanTransformer3DModel"] = Field(alias="_class_name")
    patch_size: Annotated[list[Size], Field(min_length=3, max_length=3)]
    num_attention_heads: Size
    attention_head_dim: int = Field(128, ge=6, le=4096, multiple_of=2)  # rotary embeddings divide it into three axes
    in_channels: Size
    out_channels: Size = 16
    text_dim: Size = 4096
    freq_dim: int = Field(256, ge=2, le=2**20, multiple_of=2)
    ffn_dim: Size = 13824
    num_layers: Layers = 40
    cross_attn_norm: bool = True
    qk_norm: Literal["rms_norm_across_heads"] | None = "rms_norm_across_heads"
    eps: float = Field(1e-6, gt=0, lt=1)
    image_dim: Size | None = None
    added_kv_proj_dim: Size | None = None
    rope_max_seq_len: int = Field(1024, ge=1, le=2**16)  # rows of a table in memory
    pos_embed_seq_len: Size | None = None  # positions of an image condition

    @model_validator(mode="after")
    def _velocities_have_the_latents_shape(self) -> Self:
        if self.in_channels not in (self.out_channels, 2 * self.out_channels + MASK_CHANNELS):
            raise ValueError(
                f"out_channels is {self.out_channels} and in_channels {self.in_channels}, but a network that predicts "
                "velocities from latents and a text has as many of both; with an image, it reads "
                f"{2 * self.out_channels + MASK_CHANNELS}"
            )
        if self.pos_embed_seq_len is not None:
            raise ValueError("pos_embed_seq_len is of a network of a first and a last frame, which is not supported")
        return self


class VAEConfig(Schema):
    """The config of an AutoencoderKLWan."""

    class_name: Literal["AutoencoderKLWan"] = Field(alias="_class_name")
    base_dim: Size = 96
    decoder_base_dim: Size | None = None
    z_dim: Size = 16
    dim_mult: Annotated[list[Size], Field(min_length=1, max_length=8)] = [1, 2, 4, 4]  # noqa: RUF012 - pydantic copies
    num_res_blocks: Layers = 2
    attn_scales: list[float] = []  # noqa: RUF012
    temperal_downsample: list[bool] = [False, True, True]  # noqa: RUF012
    dropout: float = Field(0.0, ge=0, lt=1)  # a frozen VAE has none
    latents_mean: list[Annotated[float, Field(ge=-1000, le=1000)]] = [0.0] * 16  # the class has other numbers
    latents_std: list[Annotated[float, Field(gt=0, le=1000)]] = [1.0] * 16
    is_residual: bool = False
    in_channels: Size = 3
    out_channels: Size = 3
    patch_size: Size | None = None
    scale_factor_temporal: Size = 4
    scale_factor_spatial: Size = 8

    @model_validator(mode="after")
    def _lengths_fit(self) -> Self:
        for name, held in (("latents_mean", len(self.latents_mean)), ("latents_std", len(self.latents_std))):
            if held != self.z_dim:
                raise ValueError(f"{name} must have a number for each of the {self.z_dim} channels (z_dim), not {held}")
        if len(self.temperal_downsample) != len(self.dim_mult) - 1:
            raise ValueError(
                f"temperal_downsample must have one value less than dim_mult, {len(self.dim_mult) - 1}, not "
                f"{len(self.temperal_downsample)}"
            )
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        patch = self.patch_size or 1
        for name, value, wanted, of in (
            ("in_channels", self.in_channels, 3 * patch**2, f"patches of {patch} x {patch} pixels"),
            ("out_channels", self.out_channels, 3 * patch**2, f"patches of {patch} x {patch} pixels"),
            ("scale_factor_spatial", self.scale_factor_spatial, patch * 2 ** (len(self.dim_mult) - 1), "dim_mult"),
            ("scale_factor_temporal", self.scale_factor_temporal, 2 ** sum(self.temperal_downsample), "its layers"),
        ):
            if value != wanted:
                raise ValueError(f"{name} is {value}, but by {of} it is {wanted}")
        return self


class ClipConfig(Schema):
    """The config of a CLIPVisionModel."""

    model_type: Literal["clip_vision_model"]
    hidden_size: Size = 768
    intermediate_size: Size = 3072
    projection_dim: Size = 512
    num_hidden_layers: Layers = 12
    num_attention_heads: Size = 12
    num_channels: Literal[3] = 3
    image_size: Size = 224
    patch_size: Size = 32
    hidden_act: Literal["quick_gelu", "gelu"] = "quick_gelu"
    layer_norm_eps: float = Field(1e-5, gt=0, lt=1)


class TextEncoderConfig(Schema):
    """The config of a UMT5EncoderModel."""

    model_type: Literal["umt5"]
    vocab_size: int = Field(250112, ge=1, le=2**24)
    d_model: Size
    d_kv: Size = 64
    d_ff: Size = 1024
    num_layers: Layers = 8
    num_heads: Size = 6
    feed_forward_proj: Literal["gated-gelu"] = "gated-gelu"
    relative_attention_num_buckets: Size = 32
    relative_attention_max_distance: Size = 128
    dropout_rate: float = Field(0.1, ge=0, lt=1)
    layer_norm_epsilon: float = Field(1e-6, gt=0, lt=1)


def transformer_config(folder: Path, component: str = EXPERTS[0]) -> TransformerConfig:
    """Read the config of a transformer; UserError names file and field."""
    return read_as(TransformerConfig, folder / component / "config.json")


def native_config(network: Path, folder: Path) -> dict[str, Any]:
    """Return the config that Wan's own code, and ComfyUI beside the weights, has for a network of a pipeline folder."""
    config, index = read_as(TransformerConfig, network / "config.json"), read_as(ModelIndex, folder / INDEX)
    with_image = config.in_channels != config.out_channels
    return {
        "_class_name": "WanModel",
        "model_type": "i2v" if with_image else "ti2v" if index.expand_timesteps else "t2v",
        "dim": config.num_attention_heads * config.attention_head_dim,
        **{"in_dim": config.in_channels, "out_dim": config.out_channels, "text_len": TEXT_TOKENS},
        **{"num_heads": config.num_attention_heads, "num_layers": config.num_layers, "eps": config.eps},
        **{"ffn_dim": config.ffn_dim, "freq_dim": config.freq_dim},
    }


def clip_shape(folder: Path) -> tuple[int, int]:
    """Return the tokens that CLIP makes of an image, one for each patch and one for all, and their channels."""
    config = read_as(ClipConfig, folder / CLIP / "config.json")
    return (config.image_size // config.patch_size) ** 2 + 1, config.hidden_size


def vae_config(folder: Path) -> VAEConfig:
    """Read the config of the VAE; UserError names file and field, and weights beside it that are of another VAE."""
    config = read_as(VAEConfig, folder / "vae" / "config.json")
    if any((folder / "vae").glob("*.safetensors")):
        check_described(AutoencoderKLWan, folder / "vae")
    return config


def check_folder(folder: Path) -> None:
    """Raise UserError, naming the file, unless VAE and text encoder fit the transformer, as far as they are there."""
    transformer = transformer_config(folder)
    parts = (("vae", VAEConfig, "z_dim", "out_channels"), ("text_encoder", TextEncoderConfig, "d_model", "text_dim"))
    for part, schema, own, other in parts:
        file = folder / part / "config.json"
        if not file.is_file():
            continue  # a role other than the student brings its transformer alone
        held, wanted = dict(read_as(schema, file))[own], dict(transformer)[other]
        if held != wanted:
            raise UserError(f"{file}: {own} is {held}, but {other} of {EXPERTS[0]}/config.json is {wanted}")
