"""The Stable Diffusion 3 family: how a StableDiffusion3Pipeline folder is opened, and what its configs say."""

import math

from unified_trainer.models.base import Family
from unified_trainer.models.blueprint import Blueprint, heads_of
from unified_trainer.models.sd3.codec import SD3Codec
from unified_trainer.models.sd3.configs import latent_shape, transformer_config
from unified_trainer.models.sd3.model import SD3Model

SD3 = Family(
    pipelines=("StableDiffusion3Pipeline",),
    model=SD3Model.open,
    codec=SD3Codec.load,
    latent_channels=lambda folder: transformer_config(folder).in_channels,
    latent_shape=latent_shape,
    attention_heads=lambda folder: transformer_config(folder).num_attention_heads,
    blueprint=Blueprint(lambda config: SD3Model, SD3Codec, images=True, heads=heads_of),
    tokens=lambda folder, shape: math.prod(shape[1:]) // transformer_config(folder).patch_size ** 2,
)
