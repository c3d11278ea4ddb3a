"""The LTX-Video family: how a folder of its two pipelines is opened, and what its configs say."""

import math

from unified_trainer.models.base import Family
from unified_trainer.models.blueprint import codec_blueprint
from unified_trainer.models.ltx.codec import LtxCodec
from unified_trainer.models.ltx.configs import FPS, SPACE, latent_shape, transformer_config
from unified_trainer.models.ltx.model import LtxModel

LTX = Family(
    pipelines=("LTXPipeline", "LTXImageToVideoPipeline"),
    model=LtxModel.open,
    codec=LtxCodec.load,
    latent_channels=lambda folder: transformer_config(folder).in_channels,
    latent_shape=latent_shape,
    attention_heads=lambda folder: transformer_config(folder).num_attention_heads,
    blueprint=lambda folder: codec_blueprint(folder, LtxModel, LtxCodec),
    images=lambda folder: (0, 1),  # one network for both
    tokens=lambda folder, shape: math.prod(shape[1:]),
    given_levels=lambda folder: True,
    tile_unit=4 * SPACE,
    fps=FPS,
)
