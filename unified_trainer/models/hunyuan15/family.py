"""The HunyuanVideo 1.5 family: how a HunyuanVideo15Pipeline folder is opened, and what its configs say."""

import math

from unified_trainer.models.base import Family
from unified_trainer.models.blueprint import Blueprint
from unified_trainer.models.hunyuan15.codec import Hunyuan15Codec
from unified_trainer.models.hunyuan15.configs import GUIDER, latent_shape, networks, transformer_config
from unified_trainer.models.hunyuan15.model import Hunyuan15Model

HUNYUAN15 = Family(
    pipelines=("HunyuanVideo15Pipeline",),
    model=Hunyuan15Model.open,
    codec=Hunyuan15Codec.load,
    latent_channels=lambda folder: transformer_config(folder).out_channels,
    latent_shape=latent_shape,
    attention_heads=lambda folder: transformer_config(folder).num_attention_heads,
    blueprint=Blueprint(
        lambda config: Hunyuan15Model, Hunyuan15Codec, heads=lambda config: config["num_attention_heads"]
    ),
    tokens=lambda folder, shape: math.prod(shape[1:]) // transformer_config(folder).patch_size ** 2,
    networks=networks,
    given_levels=True,
    guider=GUIDER,
)
