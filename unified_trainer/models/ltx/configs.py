"""The configs of the folders of LTX-Video: which fields the trainer depends on, and what they may be."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import Schema, read_as
from unified_trainer.models.base import EXPERTS
from unified_trainer.models.image_latents import video_latent_shape

FPS = 25.0  # frames per second: the frame_rate of LTXPipeline, in which the positions of tokens are seconds
TIME, SPACE = 8, 32  # frames of a latent, and pixels along its sides
Size = Annotated[int, Field(ge=1, le=2**20)]


class LtxTransformerConfig(Schema):
    """The config of a LTXVideoTransformer3DModel."""

    class_name: Literal["LTXVideoTransformer3DModel"] = Field(alias="_class_name")
    in_channels: Size = 128
    out_channels: Size = 128
    patch_size: Literal[1] = 1
    patch_size_t: Literal[1] = 1
    num_attention_heads: Size = 32
    attention_head_dim: Size = 64
    cross_attention_dim: Size = 2048
    caption_channels: Size = 4096

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        width = self.num_attention_heads * self.attention_head_dim
        if self.cross_attention_dim != width:
            raise ValueError(
                f"cross_attention_dim is {self.cross_attention_dim}, but texts enter with {width} channels"
            )
        if self.out_channels != self.in_channels:
            raise ValueError(f"out_channels is {self.out_channels}, but in_channels {self.in_channels}")
        return self


class VAESizes(Schema):
    """The fields that the configs of the VAEs of LTX-Video and LTX-2 share."""

    latent_channels: Size = 128
    patch_size: Size = 4
    patch_size_t: Size = 1
    spatio_temporal_scaling: Annotated[list[bool], Field(max_length=8)] = [True, True, True]  # noqa: RUF012
    spatial_compression_ratio: Size | None = None
    temporal_compression_ratio: Size | None = None
    scaling_factor: Annotated[float, Field(gt=0, le=1000)] = 1.0

    @model_validator(mode="after")
    def _latents_are_of_one_size(self) -> Self:
        scale = 2 ** sum(self.spatio_temporal_scaling)
        time = self.temporal_compression_ratio or scale * self.patch_size_t
        space = self.spatial_compression_ratio or scale * self.patch_size
        if (time, space) != (TIME, SPACE):
            raise ValueError(
                f"a latent is of {time} frames and {space} pixels a side, but the positions of tokens are "
                f"those of latents of {TIME} frames and {SPACE} pixels"
            )
        return self


class LtxVAEConfig(VAESizes):
    """The config of an AutoencoderKLLTXVideo."""

    class_name: Literal["AutoencoderKLLTXVideo"] = Field(alias="_class_name")


def transformer_config(folder: Path) -> LtxTransformerConfig:
    """Read the config of the transformer; UserError names file and field."""
    return read_as(LtxTransformerConfig, folder / EXPERTS[0] / "config.json")


def latent_shape(folder: Path, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
    """Return channels, latent frames, height and width of a video, from configs.

    UserError, with the nearest good sizes, unless the VAE divides it.
    """
    file, channels = folder / "vae" / "config.json", transformer_config(folder).in_channels
    if (held := read_as(LtxVAEConfig, file).latent_channels) != channels:
        raise UserError(f"{file}: latent_channels is {held}, but the transformer takes {channels}")
    return video_latent_shape(channels, TIME, SPACE, 1, frames, height, width)
