"""Qwen-Image's transformer as a `VideoModel` (arXiv:2508.02324): images are videos of one frame, packed as tokens."""

from functools import partial

import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.types import Condition, Latents, PerFrame, PerSample
from unified_trainer.models.base import Shape
from unified_trainer.models.joint_model import JointModel, Rotate
from unified_trainer.models.qwen_image.configs import PATCH
from unified_trainer.numerics.flow import guide


class QwenImageModel(JointModel):
    """A QwenImageTransformer2DModel; its time is sigma, and text behind the last token of a prompt is masked."""

    network_class = QwenImageTransformer2DModel
    embedder, video = "img_in", 1
    adapter_layers = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")

    @staticmethod
    def rotations(angles: tuple[Tensor, Tensor]) -> tuple[Rotate, Rotate]:
        """Return the rotations of the tokens of image and text."""
        image, text = (partial(apply_rotary_emb_qwen, freqs_cis=each, use_real=False) for each in angles)
        return image, text

    def velocity(self, x_t: Latents, sigma: PerSample, cond: Condition) -> Latents:
        _, _, _, height, width = x_t.shape
        v = self.network(
            hidden_states=packed(x_t),
            timestep=sigma.float().to(x_t.device, non_blocking=True),
            encoder_hidden_states=cond["text"],
            encoder_hidden_states_mask=cond["text_mask"],
            img_shapes=[[(1, height // PATCH, width // PATCH)]] * len(x_t),
            return_dict=False,
        )[0]
        return unpacked(v.float(), height, width)

    def guide(self, cond: Latents, uncond: Latents, guidance_scale: float | PerSample | PerFrame) -> Latents:
        """Return the guided velocity with the norm of `cond` in each token, as QwenImagePipeline does."""
        _, _, _, height, width = cond.shape
        guided = packed(guide(cond, uncond, guidance_scale))
        scale = packed(cond).norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)
        return unpacked(guided * scale, height, width)

    def example(
        self, shape: Shape | None = None, samples: int = 1, text_tokens: int = 4
    ) -> tuple[Latents, PerSample, Condition]:
        config, draw = self.network.config, torch.Generator().manual_seed(0)
        shape = shape or (config.in_channels // PATCH**2, 1, 2 * PATCH, 2 * PATCH)
        x_t = torch.randn(samples, *shape, generator=draw)
        text = torch.randn(samples, text_tokens, config.joint_attention_dim, generator=draw)
        mask = torch.arange(text_tokens).expand(samples, -1) < text_tokens - 1
        device = next(self.network.parameters()).device
        cond = Condition({"text": text, "text_mask": mask})
        return x_t.to(device), torch.full((samples,), 0.5, device=device), cond.map(lambda x: x.to(device))


def packed(x: Latents) -> Float[Tensor, "b tokens d"]:
    """Return latents [b, c, 1, h, w] as tokens, each of 2 x 2 latents in the order c, dy, dx."""
    b, c, _, height, width = x.shape
    patches = x.reshape(b, c, height // PATCH, PATCH, width // PATCH, PATCH).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(b, height * width // PATCH**2, c * PATCH**2)


def unpacked(tokens: Float[Tensor, "b tokens d"], height: int, width: int) -> Latents:
    """Return the latents [b, c, 1, h, w] of these tokens."""
    b, _, d = tokens.shape
    patches = tokens.view(b, height // PATCH, width // PATCH, d // PATCH**2, PATCH, PATCH).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(b, d // PATCH**2, 1, height, width)
