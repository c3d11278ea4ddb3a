"""Wan's transformer as a `VideoModel`: Wan2.1 and Wan2.2 T2V, and the tiny world in the same layout."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from unified_trainer.basics.types import Condition, Latents, PerFrame, PerSample, widest
from unified_trainer.models.base import Shape
from unified_trainer.models.diffusers_model import DiffusersModel
from unified_trainer.models.wan.attention import joined_inputs, set_attention
from unified_trainer.models.wan.ulysses import SharedTokens
from unified_trainer.parallel.mesh import Mesh

TIME_SCALE = 1000  # the network's time is 1000 sigma, and stays fractional


def network_time(sigma: PerSample | PerFrame, like: Tensor) -> Tensor:
    """Return the network's time at noise levels, float32 on the device of `like`, without waiting for it."""
    return (TIME_SCALE * sigma.to(widest(sigma.device))).float().to(like.device, non_blocking=True)


class WanModel(DiffusersModel):
    """A WanTransformer3DModel that predicts velocities."""

    network_class = WanTransformer3DModel
    adapter_layers = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")

    def __init__(self, network: WanTransformer3DModel, folder: Path | None = None) -> None:
        super().__init__(network, folder)
        self._shared: SharedTokens | None = None
        set_attention(network.blocks)

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> "WanModel":
        """Open the folder's first transformer and read its weights, in this process alone."""
        model = cls.open(folder, "transformer")
        model.read(Mesh(device))
        return model

    def share_tokens(self, mesh: Mesh) -> None:
        self._shared = SharedTokens(self.network, mesh)

    def velocity(self, x_t: Latents, sigma: PerSample, cond: Condition) -> Latents:
        time = network_time(sigma, x_t)
        x_t = self._shared.whole_gradient(x_t) if self._shared else x_t
        return self.called(x_t, time, cond, range(x_t.shape[2]))

    def called(self, x: Latents, time: Tensor, cond: Condition, frames: Sequence[int]) -> Latents:
        """Return the network's output for latent frames with these numbers in the video.

        `time` is the network's, [b] or one for each token [b, n].
        """
        return self.network(x, time, cond["text"], return_dict=False)[0].float()

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return tuple(self.network.blocks)

    @property
    def feature_size(self) -> int:
        config = self.network.config
        return config.num_attention_heads * config.attention_head_dim

    def whole(self, tokens: Tensor) -> Tensor:
        return self._shared.gather(tokens) if self._shared else tokens

    def example(
        self, shape: Shape | None = None, samples: int = 1, text_tokens: int = 4
    ) -> tuple[Latents, PerSample, Condition]:
        config = self.network.config
        shape = shape or (config.in_channels, *(2 * size for size in config.patch_size))
        draw = torch.Generator().manual_seed(0)
        x_t = torch.randn(samples, *shape, generator=draw)
        text = torch.randn(samples, text_tokens, config.text_dim, generator=draw)
        device = next(self.network.parameters()).device
        return x_t.to(device), torch.full((samples,), 0.5, device=device), Condition({"text": text.to(device)})

    def compiled_inputs(self, *inputs: Any) -> tuple[Any, ...]:
        return joined_inputs(*inputs)
