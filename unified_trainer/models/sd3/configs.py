"""The configs of a StableDiffusion3Pipeline folder: which fields the trainer depends on, and what they may be."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import Schema, read_as
from unified_trainer.models.image_latents import image_latent_shape

Size = Annotated[int, Field(ge=1, le=2**20)]


class SD3TransformerConfig(Schema):
    """The config of a SD3Transformer2DModel."""

    class_name: Literal["SD3Transformer2DModel"] = Field(alias="_class_name")
    num_attention_heads: Size
    patch_size: Size = 2
    in_channels: Size = 16
    joint_attention_dim: Size = 4096
    pooled_projection_dim: Size = 2048
    pos_embed_max_size: Size = 96  # tokens that the table of positions has along each side


class KLVAEConfig(Schema):
    """The config of an AutoencoderKL whose latents have one shift and one scale."""

    class_name: Literal["AutoencoderKL"] = Field(alias="_class_name")
    latent_channels: Size = 4
    block_out_channels: Annotated[list[Size], Field(min_length=1, max_length=8)]
    scaling_factor: Annotated[float, Field(gt=0, le=1000)]
    shift_factor: Annotated[float, Field(ge=-1000, le=1000)]


def transformer_config(folder: Path) -> SD3TransformerConfig:
    """Read the config of the transformer; UserError names file and field."""
    return read_as(SD3TransformerConfig, folder / "transformer" / "config.json")


def latent_shape(folder: Path, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
    """Return channels, 1, latent height and width of an image, from configs.

    UserError for another number of frames than 1, for sides that VAE and patches do not divide or that have more tokens
    than positions.
    """
    file = folder / "vae" / "config.json"
    vae, network = read_as(KLVAEConfig, file), transformer_config(folder)
    if vae.latent_channels != network.in_channels:
        raise UserError(
            f"{file}: latent_channels is {vae.latent_channels}, but the transformer takes latents of "
            f"{network.in_channels} channels"
        )
    space = 2 ** (len(vae.block_out_channels) - 1)
    shape = image_latent_shape(network.in_channels, space, network.patch_size, frames, height, width)
    most = network.pos_embed_max_size * network.patch_size * space
    for name, size in (("height", height), ("width", width)):
        if size > most:
            raise UserError(f"video.{name} must be at most {most}, the positions of this transformer, not {size}")
    return shape
