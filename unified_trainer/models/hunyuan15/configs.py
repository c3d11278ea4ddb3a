"""The configs of the folders of HunyuanVideo 1.5: which fields the trainer depends on, and what they may be."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import Schema, read_as, read_json
from unified_trainer.models.base import EXPERTS
from unified_trainer.models.image_latents import video_latent_shape

INDEX = "model_index.json"
PIPELINES = {"t2v": "HunyuanVideo15Pipeline", "i2v": "HunyuanVideo15ImageToVideoPipeline"}  # by a network's task_type
GUIDER = "guider/guider_config.json"  # of the component that has the guidance scale
Size = Annotated[int, Field(ge=1, le=2**20)]


class Hunyuan15TransformerConfig(Schema):
    """The config of a HunyuanVideo15Transformer3DModel."""

    class_name: Literal["HunyuanVideo15Transformer3DModel"] = Field(alias="_class_name")
    num_attention_heads: Size
    in_channels: Size = 65  # latents, latents of an image, and a mask
    out_channels: Size = 32
    patch_size: Size = 1
    patch_size_t: Literal[1] = 1
    qk_norm: Literal["rms_norm"] = "rms_norm"
    text_embed_dim: Size = 3584
    text_embed_2_dim: Size = 1472
    image_embed_dim: Size = 1152
    task_type: Literal["t2v", "i2v"] = "i2v"
    use_meanflow: bool = False


class Hunyuan15VAEConfig(Schema):
    """The config of an AutoencoderKLHunyuanVideo15."""

    class_name: Literal["AutoencoderKLHunyuanVideo15"] = Field(alias="_class_name")
    latent_channels: Size = 32
    spatial_compression_ratio: Size = 16
    temporal_compression_ratio: Size = 4
    scaling_factor: Annotated[float, Field(gt=0, le=1000)] = 1.03682


class GuiderConfig(Schema):
    """The config of a guider that computes uncond + w (cond - uncond) at every step."""

    class_name: Literal["ClassifierFreeGuidance"] = Field(alias="_class_name")
    guidance_rescale: Annotated[float, Field(ge=0, le=0)] = 0.0
    use_original_formulation: Literal[False] = False
    start: Annotated[float, Field(ge=0, le=0)] = 0.0
    stop: Annotated[float, Field(ge=1, le=1)] = 1.0


def transformer_config(folder: Path) -> Hunyuan15TransformerConfig:
    """Read the config of the transformer; UserError names file and field."""
    file = folder / EXPERTS[0] / "config.json"
    config = read_as(Hunyuan15TransformerConfig, file)
    if config.use_meanflow:
        raise UserError(
            f"{file}: use_meanflow is true: this network was distilled to few steps and reads where each step ends, "
            "which the methods do not tell it; take one that was not"
        )
    if config.in_channels != 2 * config.out_channels + 1:
        raise UserError(
            f"{file}: in_channels is {config.in_channels}, but a network of {config.out_channels} latent channels "
            f"reads {2 * config.out_channels + 1}: those of the latents, of an image's latents, and a mask"
        )
    return config


def networks(folder: Path) -> tuple[tuple[str, ...], None]:
    """Return the folder's transformer; UserError for one that cannot be, for another's pipeline or rule of guidance.

    Roles that do not sample may lack a guider: of a hub id, the transformer alone is downloaded for them.
    """
    task, pipeline = transformer_config(folder).task_type, read_json(folder / INDEX)["_class_name"]
    if pipeline != PIPELINES[task]:
        raise UserError(
            f"{folder / INDEX}: the pipeline is {pipeline}, but the transformer's config.json has task_type {task}, "
            f"which is of {PIPELINES[task]}: fetch both from one model"
        )
    if (folder / GUIDER).is_file():
        read_as(GuiderConfig, folder / GUIDER)
    return EXPERTS[:1], None


def images(folder: Path) -> tuple[int, int]:
    """Return the fewest and the most condition images of a sample: one for an image-to-video network, 0 for others."""
    count = int(transformer_config(folder).task_type == "i2v")
    return count, count


def latent_shape(folder: Path, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
    """Return channels, latent frames, height and width of a video, from configs.

    UserError, with the nearest good sizes, unless VAE and patches divide it.
    """
    file = folder / "vae" / "config.json"
    vae, network = read_as(Hunyuan15VAEConfig, file), transformer_config(folder)
    if vae.latent_channels != network.out_channels:
        raise UserError(
            f"{file}: latent_channels is {vae.latent_channels}, but the transformer makes {network.out_channels}"
        )
    time, space = vae.temporal_compression_ratio, vae.spatial_compression_ratio
    return video_latent_shape(vae.latent_channels, time, space, network.patch_size, frames, height, width)
