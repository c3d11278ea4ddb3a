"""The configs of the folders of LTX-2: which fields the trainer depends on, and what they may be."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import Schema, read_as
from unified_trainer.basics.suggestions import multiples_near
from unified_trainer.models.base import EXPERTS, Shape
from unified_trainer.models.ltx2.layout import BANDS, SPACE, TIME, with_sound

Size = Annotated[int, Field(ge=1, le=2**20)]


class Ltx2TransformerConfig(Schema):
    """The config of a LTX2VideoTransformer3DModel; a text has one embedding for the video and one for the sound."""

    class_name: Literal["LTX2VideoTransformer3DModel"] = Field("LTX2VideoTransformer3DModel", alias="_class_name")
    in_channels: Size = 128
    out_channels: Size | None = 128
    patch_size: Literal[1] = 1
    patch_size_t: Literal[1] = 1
    vae_scale_factors: Annotated[Sequence[Size], Field(max_length=3)] = (TIME, SPACE, SPACE)
    cross_attention_dim: Size = 4096
    audio_in_channels: Size = 128
    audio_out_channels: Size | None = 128
    audio_patch_size: Literal[1] = 1
    audio_patch_size_t: Literal[1] = 1
    audio_cross_attention_dim: Size = 2048
    audio_scale_factor: Literal[4] = 4
    audio_sampling_rate: Literal[16000] = 16000
    audio_hop_length: Literal[160] = 160
    caption_channels: Size = 3840
    use_prompt_embeddings: bool = True
    timestep_scale_multiplier: Literal[1000] = 1000

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        channels = (self.in_channels, self.out_channels, self.audio_in_channels, self.audio_out_channels)
        if {*channels} - {self.in_channels, None}:
            raise ValueError(
                "in_channels, out_channels, audio_in_channels and audio_out_channels must be equal, but are "
                f"{', '.join(map(str, channels))}"
            )
        if (factors := tuple(self.vae_scale_factors)) != (TIME, SPACE, SPACE):
            raise ValueError(f"vae_scale_factors must be {(TIME, SPACE, SPACE)}, not {factors}")
        if self.in_channels % BANDS:
            raise ValueError(f"in_channels must be a multiple of {BANDS}, not {self.in_channels}")
        return self

    @property
    def text_widths(self) -> tuple[int, int]:
        """The channels of the embeddings of a text, for the video and for the sound."""
        if self.use_prompt_embeddings:
            return self.caption_channels, self.caption_channels
        return self.cross_attention_dim, self.audio_cross_attention_dim


class Ltx2VAEConfig(Schema):
    """The config of an AutoencoderKLLTX2Video."""

    class_name: Literal["AutoencoderKLLTX2Video"] = Field(alias="_class_name")
    latent_channels: Size = 128
    patch_size: Size = 4
    patch_size_t: Size = 1
    spatio_temporal_scaling: Annotated[list[bool], Field(max_length=8)] = [True, True, True, True]  # noqa: RUF012
    spatial_compression_ratio: Size | None = None
    temporal_compression_ratio: Size | None = None
    scaling_factor: Annotated[float, Field(gt=0, le=1000)] = 1.0
    timestep_conditioning: Literal[False] = False
    decoder_inject_noise: list[Literal[False]] | Literal[False] = False
    decoder_spatial_padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "reflect"

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


class AudioVAEConfig(Schema):
    """The config of an AutoencoderKLLTX2Audio, whose statistics are those of `base_channels`."""

    class_name: Literal["AutoencoderKLLTX2Audio"] = Field(alias="_class_name")
    base_channels: Size = 128
    latent_channels: Size = 8
    mel_bins: Literal[64] = 64
    sample_rate: Literal[16000] = 16000
    mel_hop_length: Literal[160] = 160


class ConnectorsConfig(Schema):
    """The config of LTX2TextConnectors; learnable registers stand where a text has padding, so that none is masked."""

    class_name: Literal["LTX2TextConnectors"] = Field(alias="_class_name")
    caption_channels: Size = 3840
    text_proj_in_factor: Size = 49
    video_connector_num_attention_heads: Size = 30
    video_connector_attention_head_dim: Size = 128
    video_connector_num_learnable_registers: Size = 128
    audio_connector_num_attention_heads: Size = 30
    audio_connector_attention_head_dim: Size = 128
    audio_connector_num_learnable_registers: Size = 128

    @property
    def registers(self) -> tuple[int, int]:
        """The learnable registers of both connectors."""
        return self.video_connector_num_learnable_registers, self.audio_connector_num_learnable_registers

    @property
    def text_widths(self) -> tuple[int, int]:
        """The channels of the embeddings that the connectors give."""
        return (
            self.video_connector_num_attention_heads * self.video_connector_attention_head_dim,
            self.audio_connector_num_attention_heads * self.audio_connector_attention_head_dim,
        )


class VocoderConfig(Schema):
    """The config of a vocoder."""

    class_name: Literal["LTX2Vocoder", "LTX2VocoderWithBWE"] = Field(alias="_class_name")
    output_sampling_rate: Size = 24000


def transformer_config(folder: Path) -> Ltx2TransformerConfig:
    """Read the config of the transformer; UserError names file and field."""
    return read_as(Ltx2TransformerConfig, folder / EXPERTS[0] / "config.json")


def latent_shape(folder: Path, frames: int, height: int, width: int) -> Shape:
    """Return the shape of the latents of a video and its sound, from configs.

    UserError, with the nearest good sizes, unless the VAE divides the video and can pad it.
    """
    file, channels = folder / "vae" / "config.json", transformer_config(folder).in_channels
    vae = read_as(Ltx2VAEConfig, file)
    if (held := vae.latent_channels) != channels:
        raise UserError(f"{file}: latent_channels is {held}, but the transformer takes {channels}")
    if frames < 1 or (frames - 1) % TIME:
        below = max(frames - 1, 0) // TIME * TIME + 1
        raise UserError(f"video.frames must be {TIME}k + 1 for this VAE, not {frames}: set {below} or {below + TIME}")
    for name, size in (("height", height), ("width", width)):
        if size < SPACE or size % SPACE:
            good = multiples_near(size, SPACE)
            raise UserError(f"video.{name} must be a multiple of {SPACE} for this VAE, not {size}: set {good}")
        if size == SPACE and vae.decoder_spatial_padding_mode == "reflect":
            raise UserError(
                f"video.{name} must be at least {2 * SPACE}, not {size}: this VAE pads a side by its reflection"
            )
    return with_sound((channels, (frames - 1) // TIME + 1, height // SPACE, width // SPACE))
