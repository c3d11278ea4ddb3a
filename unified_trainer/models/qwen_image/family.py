"""The Qwen-Image family: how a QwenImagePipeline folder is opened, and what its configs say."""

import math

from unified_trainer.models.base import Family
from unified_trainer.models.blueprint import Blueprint, heads_of
from unified_trainer.models.qwen_image.codec import QwenImageCodec
from unified_trainer.models.qwen_image.configs import PATCH, latent_shape, transformer_config
from unified_trainer.models.qwen_image.model import QwenImageModel

QWEN_IMAGE = Family(
    pipelines=("QwenImagePipeline",),
    model=QwenImageModel.open,
    codec=QwenImageCodec.load,
    latent_channels=lambda folder: transformer_config(folder).in_channels // PATCH**2,
    latent_shape=latent_shape,
    attention_heads=lambda folder: transformer_config(folder).num_attention_heads,
    blueprint=Blueprint(lambda config: QwenImageModel, QwenImageCodec, images=True, heads=heads_of),
    tokens=lambda folder, shape: math.prod(shape[1:]) // PATCH**2,
    given_levels=lambda folder: True,
    guidance=lambda folder, scale, config: {
        "true_cfg_scale": scale
    },  # in effect with a negative prompt, even an empty one
)
