"""What the trainer asks of a model family: a network to train, and a codec shared by all roles."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from unified_trainer.types import Condition, Latents, PerSample, Video

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

    def checkpoint_activations(self, contexts: CheckpointContexts) -> None:
        """Recompute the blocks' activations in the backward pass, in the second of the contexts made in the first."""
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

    def decode(self, latents: Latents) -> Video: ...
