"""Wan's transformers with a condition image: Wan2.2 TI2V, Wan2.1 and Wan2.2 I2V.

The condition's `image` holds normalised latents. TI2V has [b, c, 1, h, w], of the image alone: the first latent frame
is known. I2V has [b, c, t, h, w], of the image and gray frames behind it: they enter as channels, beside a mask. The
network of Wan2.1 I2V also attends to `clip`, CLIP's tokens [b, n, d] of the image.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from unified_trainer.basics.types import Condition, Latents, PerFrame, PerSample, take_frames
from unified_trainer.models.base import Shape
from unified_trainer.models.image_tensors import image_of, to_first_frames
from unified_trainer.models.wan.attention import TEXT_TOKENS
from unified_trainer.models.wan.configs import CLIP_TOKENS, MASK_CHANNELS
from unified_trainer.models.wan.model import WanModel


class FirstFrameWanModel(WanModel):
    """Wan2.2 TI2V: one network for text, and for text with an image, whose latents are the first latent frame.

    The network sees the known frame clean, at noise level 0.
    """

    def velocity(self, x_t: Latents, sigma: PerSample, cond: Condition) -> Latents:
        return self.with_image(super().velocity(x_t, sigma, cond), x_t, sigma, cond)

    def with_image(self, v: Latents, x_t: Latents, sigma: PerSample | PerFrame, cond: Condition) -> Latents:
        """Return the velocities of frames from the first one on, of which the first goes to the image."""
        return to_first_frames(v, x_t, sigma, cond["image"]) if "image" in cond.tensors else v

    def called(self, x: Latents, time: Tensor, cond: Condition, frames: Sequence[int]) -> Latents:
        if "image" not in cond.tensors or 0 not in frames:
            return super().called(x, time, cond, frames)
        is_known = torch.tensor([frame == 0 for frame in frames]).to(x.device, non_blocking=True)[:, None, None]
        b, _, t, h, w = x.shape
        _, high, wide = self.network.config.patch_size
        time = time.view(b, -1, 1, 1) if time.ndim == 1 else time.view(b, t, h // high, w // wide)
        time = torch.where(is_known, 0.0, time.expand(b, t, h // high, w // wide)).flatten(1)
        return super().called(torch.where(is_known, cond["image"].to(x.dtype), x), time, cond, frames)


class ImageChannelsWanModel(WanModel):
    """Wan I2V: its network reads 16 channels of latents, 4 of a mask of known frames, and 16 of image latents."""

    @property
    def adapter_layers(self) -> tuple[str, ...]:  # type: ignore[override]
        own = ("add_k_proj", "add_v_proj") if self.network.config.image_dim else ()
        return (*WanModel.adapter_layers, *own)

    def called(self, x: Latents, time: Tensor, cond: Condition, frames: Sequence[int]) -> Latents:
        image = image_of(cond)
        mask = torch.zeros_like(image[:, :MASK_CHANNELS])
        mask[:, :, 0] = 1
        x = torch.cat([x, take_frames(torch.cat([mask, image], 1), frames)], 1)
        inputs = (x, time, cond["text"], *([cond["clip"]] if self.network.config.image_dim else []))
        return self.network(*inputs, return_dict=False)[0].float()

    def example(
        self, shape: Shape | None = None, samples: int = 1, text_tokens: int = 4
    ) -> tuple[Latents, PerSample, Condition]:
        config, channels = self.network.config, self.network.config.out_channels
        whole = None if shape is None else (2 * channels, *shape[1:])
        x, sigma, text = super().example(whole, samples, text_tokens)
        held = {"text": text["text"], "image": x[:, channels : 2 * channels]}
        if config.image_dim:
            draw = torch.Generator().manual_seed(1)
            held["clip"] = torch.randn(samples, CLIP_TOKENS if shape else 5, config.image_dim, generator=draw).to(
                x.device
            )
            held["text"] = torch.nn.functional.pad(held["text"], (0, 0, 0, TEXT_TOKENS - held["text"].shape[1]))
        return x[:, :channels], sigma, Condition(held)
