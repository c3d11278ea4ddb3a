"""The LTX-2 family: how a folder of its pipeline is opened, and what its configs say."""

import math

from unified_trainer.models.base import Family
from unified_trainer.models.blueprint import codec_blueprint
from unified_trainer.models.ltx2.codec import Ltx2Codec
from unified_trainer.models.ltx2.configs import latent_shape, transformer_config
from unified_trainer.models.ltx2.layout import FPS, SPACE, of_video
from unified_trainer.models.ltx2.model import Ltx2Model

LTX2 = Family(
    pipelines=("LTX2Pipeline",),
    model=Ltx2Model.open,
    codec=Ltx2Codec.load,
    latent_channels=lambda folder: transformer_config(folder).in_channels,
    latent_shape=latent_shape,
    tokens=lambda folder, shape: math.prod(of_video(shape)[1:]),
    given_levels=lambda folder: True,
    tile_unit=4 * SPACE,
    fps=FPS,
    sound=True,
    guidance=lambda folder, scale, config: {
        "guidance_scale": scale,
        "audio_guidance_scale": scale,
        "stg_scale": 0,
        "audio_stg_scale": 0,
        "modality_scale": 1,
        "audio_modality_scale": 1,
        "guidance_rescale": 0,
        "audio_guidance_rescale": 0,
    },
    blueprint=lambda folder: codec_blueprint(folder, Ltx2Model, Ltx2Codec),
)
