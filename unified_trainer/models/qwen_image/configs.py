"""The configs of a QwenImagePipeline folder: which fields the trainer depends on, and what they may be."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import Schema, read_as
from unified_trainer.models.image_latents import image_latent_shape

Size = Annotated[int, Field(ge=1, le=2**20)]
PATCH = 2  # latents of a token along each side


class ImageTransformerConfig(Schema):
    """The config of a QwenImageTransformer2DModel that makes an image from a text alone."""

    class_name: Literal["QwenImageTransformer2DModel"] = Field(alias="_class_name")
    patch_size: Literal[2] = 2
    in_channels: int = Field(64, ge=4, le=2**20, multiple_of=PATCH**2)
    num_attention_heads: Size
    joint_attention_dim: Size = 3584
    guidance_embeds: Literal[False] = False
    zero_cond_t: Literal[False] = False  # True: a network that edits images
    use_additional_t_cond: Literal[False] = False
    use_layer3d_rope: Literal[False] = False  # True: one that makes images in layers


class ImageVAEConfig(Schema):
    """The config of an AutoencoderKLQwenImage."""

    class_name: Literal["AutoencoderKLQwenImage"] = Field(alias="_class_name")
    z_dim: Size = 16
    temperal_downsample: Annotated[list[bool], Field(max_length=8)] = [False, True, True]  # noqa: RUF012
    latents_mean: list[Annotated[float, Field(ge=-1000, le=1000)]] = [0.0] * 16  # the class has other numbers
    latents_std: list[Annotated[float, Field(gt=0, le=1000)]] = [1.0] * 16

    @model_validator(mode="after")
    def _lengths_fit(self) -> Self:
        for name, held in (("latents_mean", len(self.latents_mean)), ("latents_std", len(self.latents_std))):
            if held != self.z_dim:
                raise ValueError(f"{name} must have a number for each of the {self.z_dim} channels (z_dim), not {held}")
        return self


def transformer_config(folder: Path) -> ImageTransformerConfig:
    """Read the config of the transformer; UserError names file and field."""
    return read_as(ImageTransformerConfig, folder / "transformer" / "config.json")


def latent_shape(folder: Path, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
    """Return channels, 1, latent height and width of an image, from configs.

    UserError for another number of frames than 1, and unless VAE and patches divide the sides.
    """
    file = folder / "vae" / "config.json"
    vae, channels = read_as(ImageVAEConfig, file), transformer_config(folder).in_channels // PATCH**2
    if vae.z_dim != channels:
        raise UserError(f"{file}: z_dim is {vae.z_dim}, but the transformer takes latents of {channels} channels")
    space = 2 ** len(vae.temperal_downsample)
    return image_latent_shape(channels, space, PATCH, frames, height, width)
