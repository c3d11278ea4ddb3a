"""The part of a codec that LTX-Video and LTX-2 share: the size of a latent, and a scale of all channels."""

from collections.abc import Mapping
from typing import Any

from unified_trainer.models.diffusers_codec import DiffusersCodec
from unified_trainer.models.ltx.configs import SPACE, TIME


class LtxVAECodec(DiffusersCodec):
    """A codec with a VAE of LTX."""

    @classmethod
    def statistics(cls, config: Any) -> tuple[list[float], list[float]]:
        """Return the part that the config has: a scale for all channels."""
        return [0.0] * config.latent_channels, [1 / config.scaling_factor] * config.latent_channels

    @classmethod
    def scales(cls, vae: Mapping[str, Any]) -> tuple[int, int]:
        return TIME, SPACE

    @classmethod
    def tile(cls, vae: Any, size: int) -> None:
        stride = size * 3 // 4
        vae.enable_tiling(size, size, tile_sample_stride_height=stride, tile_sample_stride_width=stride)
