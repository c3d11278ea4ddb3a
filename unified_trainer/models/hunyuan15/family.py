"""The HunyuanVideo 1.5 family: how a folder of its two pipelines is opened, and what its configs say."""

import math
from pathlib import Path

import torch

from unified_trainer.models.base import Family
from unified_trainer.models.blueprint import Blueprint, codec_blueprint
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.hunyuan15.codec import Hunyuan15Codec
from unified_trainer.models.hunyuan15.configs import (
    GUIDER,
    PIPELINES,
    images,
    latent_shape,
    networks,
    transformer_config,
)
from unified_trainer.models.hunyuan15.image_model import ImageHunyuan15Model
from unified_trainer.models.hunyuan15.model import Hunyuan15Model


def open_model(folder: Path, component: str) -> Hunyuan15Model:
    """Open the network of a folder, without weights: of text, or of text and an image."""
    return (ImageHunyuan15Model if images(folder)[0] else Hunyuan15Model).open(folder, component)


def blueprint(folder: Path) -> Blueprint:
    """Return the parts of a folder, whose network takes a text, or a text and an image."""
    return codec_blueprint(folder, ImageHunyuan15Model if images(folder)[0] else Hunyuan15Model, Hunyuan15Codec)


def load_codec(folder: Path, device: torch.device, config: EncoderConfig) -> Hunyuan15Codec:
    """Open text encoders and VAE of a folder, and what encodes condition images if it takes them."""
    if not images(folder)[0]:
        return Hunyuan15Codec.load(folder, device, config)
    from unified_trainer.models.hunyuan15.image_codec import ImageHunyuan15Codec

    return ImageHunyuan15Codec.load(folder, device, config)


HUNYUAN15 = Family(
    pipelines=tuple(PIPELINES.values()),
    model=open_model,
    codec=load_codec,
    images=images,
    latent_channels=lambda folder: transformer_config(folder).out_channels,
    latent_shape=latent_shape,
    attention_heads=lambda folder: transformer_config(folder).num_attention_heads,
    blueprint=blueprint,
    tokens=lambda folder, shape: math.prod(shape[1:]) // transformer_config(folder).patch_size ** 2,
    networks=networks,
    given_levels=lambda folder: True,
    guider=GUIDER,
)
