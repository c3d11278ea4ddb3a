"""Causal Wan with a condition image: a known first frame (Wan2.2 TI2V), or channels of each frame (Wan I2V).

Frames are told apart by their number in the video, so that a chunk has the image wherever it stands in a pass.
"""

from unified_trainer.basics.types import Condition, Latents, PerFrame, PerSample, of_kind
from unified_trainer.models.base import Cache
from unified_trainer.models.image_tensors import to_first_frames
from unified_trainer.models.wan.causal import CausalWanModel, WanCache
from unified_trainer.models.wan.image_model import FirstFrameWanModel, ImageChannelsWanModel
from unified_trainer.numerics.chunks import ChunkConfig


class CausalImageChannelsWanModel(ImageChannelsWanModel, CausalWanModel):
    """Wan2.1 and Wan2.2 I2V, chunk by chunk: each chunk has the channels of its own frames."""


class CausalFirstFrameWanModel(FirstFrameWanModel, CausalWanModel):
    """Wan2.2 TI2V, chunk by chunk: the image is the first frame of the first chunk, and clean in the KV cache."""

    def velocity_masked(
        self,
        x_t: Latents,
        sigma: PerSample | PerFrame,
        cond: Condition,
        chunks: ChunkConfig,
        clean: Latents | None = None,
    ) -> Latents:
        return self.with_image(super().velocity_masked(x_t, sigma, cond, chunks, clean), x_t, sigma, cond)

    def velocity_cached(self, x_t: Latents, sigma: PerSample, cond: Condition, cache: Cache) -> Latents:
        if of_kind(WanCache, cache).seen:
            return super().velocity_cached(x_t, sigma, cond, cache)
        if "image" in cond.tensors and x_t.shape[2] == 1:  # a chunk of the image alone: nothing is to be predicted
            return to_first_frames(x_t, x_t, sigma, cond["image"])
        return self.with_image(super().velocity_cached(x_t, sigma, cond, cache), x_t, sigma, cond)
