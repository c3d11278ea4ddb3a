"""Causal Wan with video sparse attention: each chunk has tiles of its own, and finds those of earlier chunks by score.

No tile crosses the end of a chunk, and windows keep whole chunks: a chunk sees the same tiles through a KV cache as in
a masked pass.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Bool
from torch import Tensor

from unified_trainer.basics.types import Condition, Latents, PerFrame, PerSample
from unified_trainer.models.adapter_file import AdapterFile
from unified_trainer.models.sparse_attention import where_equal
from unified_trainer.models.wan.causal import NOTHING_CACHED, Cached, WanCache
from unified_trainer.models.wan.causal_image import CausalFirstFrameWanModel
from unified_trainer.models.wan.sparse import SparseWanModel
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.parallel.mesh import Mesh


class CausalSparseWanModel(SparseWanModel, CausalFirstFrameWanModel):
    """A causal Wan transformer of text, or of TI2V, with sparse attention; `velocity` is that of `SparseWanModel`."""

    # The mask of the network's next pass, and the frames of each chunk in its cache.
    _sees: tuple[Bool[Tensor, "t t"] | None, Sequence[int]] = None, ()

    def read(self, mesh: Mesh, merged: AdapterFile | None = None) -> None:
        super().read(mesh, merged)
        half, plain = self._fine
        self._fine = where_equal(half, plain), plain
        self._set_attention()

    def open_cache(self, chunks: ChunkConfig) -> WanCache:
        chunks.check_whole()
        return super().open_cache(chunks)

    def velocity_masked(
        self,
        x_t: Latents,
        sigma: PerSample | PerFrame,
        cond: Condition,
        chunks: ChunkConfig,
        clean: Latents | None = None,
    ) -> Latents:
        chunks.check_whole()
        return super().velocity_masked(x_t, sigma, cond, chunks, clean)

    def _pass(
        self,
        x: Latents,
        sigma: PerSample | PerFrame,
        cond: Condition,
        frames: list[int],
        frame_mask: Bool[Tensor, "t t"] | None = None,
        cached: Cached = NOTHING_CACHED,
    ) -> Latents:
        """Leave the mask to the choice of tiles."""
        self._sees = frame_mask, [len(chunk.frames) for chunk in cached.past]
        return super()._pass(x, sigma, cond, frames, cached=cached)

    def _chunks(self, frames: int) -> tuple[list[int], Bool[Tensor, "own chunks"]]:
        (mask, past), self._sees = self._sees, (None, ())
        if mask is None:
            return [*past, frames], torch.ones(1, len(past) + 1, dtype=torch.bool)
        # The frames of a chunk see the same frames, and those of the next one others: at least their own.
        starts = [i for i in range(frames) if i == 0 or not torch.equal(mask[i], mask[i - 1])]
        return [stop - start for start, stop in pairwise([*starts, frames])], mask[starts][:, starts]
