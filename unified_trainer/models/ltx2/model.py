"""LTX-2's transformer (arXiv:2601.03233) as a `VideoModel`: it denoises a video and its sound together.

The condition's `text` and `sound_text` are embeddings of a prompt for the two; no token of them is masked.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import LTX2VideoTransformer3DModel
from diffusers.models.transformers.transformer_ltx2 import LTX2Attention
from torch import Tensor, nn

from unified_trainer.basics.types import Condition, Latents, PerSample
from unified_trainer.models.base import Shape
from unified_trainer.models.diffusers_model import DiffusersModel, widen
from unified_trainer.models.ltx2.configs import Ltx2TransformerConfig
from unified_trainer.models.ltx2.layout import FPS, Parts, joined, parts, with_sound

SMALLEST = 1e-6  # noise level by which the rest is divided at least


class Ltx2Model(DiffusersModel):
    """A LTX2VideoTransformer3DModel, whose time is 1000 sigma for both; tokens are those of the video."""

    network_class = LTX2VideoTransformer3DModel
    # those of all attentions, of the video, of the sound and between them, as ltx-trainer trains both together
    adapter_layers = ("to_q", "to_k", "to_v", "to_out.0")

    def __init__(self, network: LTX2VideoTransformer3DModel, folder: Path | None = None) -> None:
        super().__init__(network, folder)
        for part in network.transformer_blocks.modules():
            if isinstance(part, LTX2Attention):
                for norm in (part.norm_q, part.norm_k):
                    norm.register_forward_pre_hook(widen)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return tuple(self.network.transformer_blocks)

    def whole(self, tokens: tuple[Tensor, Tensor]) -> Tensor:
        return tokens[0]

    @property
    def feature_size(self) -> int:
        return self.network.config.num_attention_heads * self.network.config.attention_head_dim

    def velocity(self, x_t: Latents, sigma: PerSample, cond: Condition) -> Latents:
        sigma = sigma.float().to(x_t.device, non_blocking=True)
        video, sound, rest = parts(x_t)
        frames, height, width = video.shape[2:]
        of_video, of_sound = self.network(
            hidden_states=video.flatten(2).transpose(1, 2),
            audio_hidden_states=sound,
            encoder_hidden_states=cond["text"],
            audio_encoder_hidden_states=cond["sound_text"],
            timestep=1000 * sigma,
            sigma=1000 * sigma,
            num_frames=frames,
            height=height,
            width=width,
            fps=FPS,
            audio_num_frames=sound.shape[1],
            return_dict=False,
        )
        v = of_video.float().transpose(1, 2).reshape(video.shape)
        known = rest.float() / sigma.clamp_min(SMALLEST)[:, None]
        return joined(Parts(v, of_sound.float(), known), x_t.shape[1:])

    def example(
        self, shape: Shape | None = None, samples: int = 1, text_tokens: int = 4
    ) -> tuple[Latents, PerSample, Condition]:
        config, draw = self.network.config, torch.Generator().manual_seed(0)
        x_t = torch.randn(samples, *(shape or with_sound((config.in_channels, 2, 2, 2))), generator=draw)
        widths = zip(("text", "sound_text"), Ltx2TransformerConfig.model_validate(config).text_widths, strict=True)
        device = next(self.network.parameters()).device
        cond = {name: torch.randn(samples, text_tokens, n, generator=draw).to(device) for name, n in widths}
        return x_t.to(device), torch.full((samples,), 0.5, device=device), Condition(cond)
