"""Stable Diffusion 3's transformer as a `VideoModel` (arXiv:2403.03206): images are videos of one frame."""

import torch
from diffusers import SD3Transformer2DModel

from unified_trainer.basics.types import Condition, Latents, PerSample
from unified_trainer.models.base import Shape
from unified_trainer.models.joint_model import JointModel


class SD3Model(JointModel):
    """A SD3Transformer2DModel; its time is 1000 sigma, and it takes the tokens and the summary of a text."""

    network_class = SD3Transformer2DModel
    embedder, video = "pos_embed", 1
    # those of the joint attention, as Flow-GRPO trains them (arXiv:2505.05470)
    adapter_layers = tuple(
        f"attn.{layer}"
        for layer in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    )

    def velocity(self, x_t: Latents, sigma: PerSample, cond: Condition) -> Latents:
        v = self.network(
            hidden_states=x_t[:, :, 0],
            timestep=1000 * sigma.float().to(x_t.device, non_blocking=True),
            encoder_hidden_states=cond["text"],
            pooled_projections=cond["pooled"],
            return_dict=False,
        )[0]
        return v.float()[:, :, None]

    def example(
        self, shape: Shape | None = None, samples: int = 1, text_tokens: int = 4
    ) -> tuple[Latents, PerSample, Condition]:
        config, draw = self.network.config, torch.Generator().manual_seed(0)
        shape = shape or (config.in_channels, 1, 2 * config.patch_size, 2 * config.patch_size)
        x_t = torch.randn(samples, *shape, generator=draw)
        text = torch.randn(samples, text_tokens, config.joint_attention_dim, generator=draw)
        pooled = torch.randn(samples, config.pooled_projection_dim, generator=draw)
        device = next(self.network.parameters()).device
        cond = Condition({"text": text, "pooled": pooled}).map(lambda x: x.to(device))
        return x_t.to(device), torch.full((samples,), 0.5, device=device), cond
