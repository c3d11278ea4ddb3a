"""What the trainer asks of a model family: a network to train, and a codec shared by all roles."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.types import Condition, Latents, PerFrame, PerSample, Video

CheckpointContexts = Callable[[], tuple[AbstractContextManager[object], AbstractContextManager[object]]]


class VideoModel(Protocol):
    """A network that predicts velocities; all unit conversion happens inside."""

    network: nn.Module
    adapter_layers: tuple[str, ...]  # names of the linear layers that adapters usually go on

    def velocity(self, x_t: Latents, sigma: PerSample, cond: Condition) -> Latents:
        """velocity = noise - x0, in float32."""
        ...

    @property
    def blocks(self) -> nn.ModuleList:
        """The repeated blocks, the units of sharding."""
        ...

    @property
    def feature_size(self) -> int:
        """Width of the features."""
        ...

    def features(self) -> AbstractContextManager[list[Tensor]]:
        """Inside, every pass appends its middle block's output [b, tokens, feature_size] to the list."""
        ...

    def read(self, mesh: Mesh) -> None:
        """Give a network that was opened without weights those of its folder, each rank its shards."""
        ...

    def share_tokens(self, mesh: Mesh) -> None:
        """Spread every sample's tokens over the mesh's sequence ranks; in and out go whole samples."""
        ...

    def example(self) -> tuple[Latents, PerSample, Condition]:
        """A small input, the same every time, to compare two copies of the network on."""
        ...

    def save(self, folder: Path, component: str, dtype: torch.dtype, max_shard_size: str) -> None:
        """Write the network as a component of a pipeline folder; the weights in memory are rounded to `dtype` too."""
        ...

    def checkpoint_activations(self, contexts: CheckpointContexts) -> None:
        """Recompute the blocks' activations in the backward pass, in the second of the contexts made in the first."""
        ...


class Cache(Protocol):
    """What later chunks look back on; opaque, and written by `append` alone."""

    seen: int  # latent frames finished so far

    def start_prompt(self) -> None:
        """From now on the passes have another condition; what was seen stays as it was seen."""
        ...


class CausalVideoModel(VideoModel, Protocol):
    """A model that also generates chunk by chunk; `velocity` stays bidirectional."""

    def velocity_masked(
        self,
        x_t: Latents,
        sigma: PerSample | PerFrame,
        cond: Condition,
        chunks: ChunkConfig,
        clean: Latents | None = None,
    ) -> Latents:
        """All chunks in one pass. They look back on each other as they are, or on `clean` ones (teacher forcing).

        Clean chunks are seen as a cache would hold them: they must be at the chunks' context noise.
        """
        ...

    def open_cache(self, chunks: ChunkConfig) -> Cache:
        """An empty cache for one rollout, all of whose passes have one condition until it turns."""
        ...

    def velocity_cached(self, x_t: Latents, sigma: PerSample, cond: Condition, cache: Cache) -> Latents:
        """The next chunk, looking back on the cache, which gets neither gradient nor entry."""
        ...

    def append(self, x: Latents, cond: Condition, cache: Cache) -> None:
        """Let later chunks look back on this one, which is at the cache's context noise; without gradient."""
        ...

    def cache_bytes(self, latent_shape: tuple[int, int, int, int], chunks: ChunkConfig, dtype: torch.dtype) -> int:
        """Memory of one sample's full cache on this rank when passes compute in `dtype`, the text's left out.

        ValueError for more latent frames than the model has positions.
        """
        ...


class Codec(Protocol):
    """Text to conditions, pixels to normalised latents and back; frozen, one for all roles."""

    folder: Path

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Channels, latent frames, height, width; ValueError when the size does not divide."""
        ...

    def encode_text(self, prompts: Sequence[str]) -> Condition: ...

    def encode(self, video: Video) -> Latents:
        """Normalised latents: the posterior's mean, without noise."""
        ...

    def normalise(self, raw: Latents) -> Latents:
        """(raw - mean) / std by the VAE's own statistics."""
        ...

    def decode(self, latents: Latents) -> Video:
        """With a gradient to the latents if they take one."""
        ...

    def decoder(self) -> Callable[[Latents], Video]:
        """Decodes chunk after chunk of one batch: put together, they are what `decode` makes of all."""
        ...
