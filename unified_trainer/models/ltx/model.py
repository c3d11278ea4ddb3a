"""LTX-Video's transformer as a `VideoModel` (arXiv:2501.00103): a token is a latent, and positions are seconds.

The condition's `image` holds the normalised latents [b, c, 1, h, w] of a condition image: the first latent frame.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import LTXVideoTransformer3DModel
from jaxtyping import Float
from torch import Tensor, nn

from unified_trainer.basics.types import Condition, Latents, PerSample
from unified_trainer.models.base import Shape
from unified_trainer.models.diffusers_model import DiffusersModel
from unified_trainer.models.image_tensors import to_first_frames
from unified_trainer.models.ltx.configs import FPS, SPACE, TIME
from unified_trainer.models.ltx.shared_tokens import SelfAttention
from unified_trainer.parallel.mesh import Mesh


class LtxModel(DiffusersModel):
    """A LTXVideoTransformer3DModel of text, or of text and an image; its time is 1000 sigma, and padding is masked.

    It sees a known first frame clean, at time 0.
    """

    network_class = LTXVideoTransformer3DModel
    # those of both attentions, as LTX-Video-Trainer trains them
    adapter_layers = ("to_q", "to_k", "to_v", "to_out.0")

    def __init__(self, network: LTXVideoTransformer3DModel, folder: Path | None = None) -> None:
        super().__init__(network, folder)
        self._shared: SelfAttention | None = None
        for block in network.transformer_blocks:
            for norm in (block.attn1.norm_q, block.attn1.norm_k, block.attn2.norm_q, block.attn2.norm_k):
                norm.register_forward_pre_hook(widen)

    def share_tokens(self, mesh: Mesh) -> None:
        self._shared = SelfAttention(self.network, mesh)

    def whole(self, tokens: Tensor) -> Tensor:
        return self._shared.gather(tokens) if self._shared else tokens

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return tuple(self.network.transformer_blocks)

    @property
    def feature_size(self) -> int:
        return self.network.config.num_attention_heads * self.network.config.attention_head_dim

    def velocity(self, x_t: Latents, sigma: PerSample, cond: Condition) -> Latents:
        time = 1000 * sigma.float().to(x_t.device, non_blocking=True)
        if "image" not in cond.tensors:
            return self._predicted(x_t, time, cond)
        known, frame = cond["image"], math.prod(x_t.shape[3:])
        times = time[:, None].repeat(1, x_t.shape[2] * frame)
        times[:, :frame] = 0
        v = self._predicted(torch.cat([known.to(x_t.dtype), x_t[:, :, 1:]], 2), times, cond)
        return to_first_frames(v, x_t, sigma, known)

    def _predicted(self, x: Latents, time: Float[Tensor, " b"] | Float[Tensor, "b tokens"], cond: Condition) -> Latents:
        """Return the network's velocity at the times of samples or of tokens."""
        _, _, frames, height, width = x.shape
        v = self.network(
            hidden_states=x.flatten(2).transpose(1, 2),
            encoder_hidden_states=cond["text"],
            timestep=time,
            encoder_attention_mask=cond["text_mask"],
            num_frames=frames,
            height=height,
            width=width,
            rope_interpolation_scale=(TIME / FPS, SPACE, SPACE),
            return_dict=False,
        )[0]
        return v.float().transpose(1, 2).reshape(x.shape)

    def example(
        self, shape: Shape | None = None, samples: int = 1, text_tokens: int = 4
    ) -> tuple[Latents, PerSample, Condition]:
        config, draw = self.network.config, torch.Generator().manual_seed(0)
        x_t = torch.randn(samples, *(shape or (config.in_channels, 2, 2, 2)), generator=draw)
        text = torch.randn(samples, text_tokens, config.caption_channels, generator=draw)
        mask = torch.arange(text_tokens).expand(samples, -1) < text_tokens - 1
        device = next(self.network.parameters()).device
        cond = Condition({"text": text, "text_mask": mask}).map(lambda x: x.to(device))
        return x_t.to(device), torch.full((samples,), 0.5, device=device), cond


def widen(_norm: nn.RMSNorm, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Widen the input to float32, the dtype of the norm's weight: of a bf16 one torch would make several kernels."""
    return (inputs[0].float(),)
