"""HunyuanVideo 1.5's transformer with a condition image.

The condition's `image` holds the normalised latents [b, c, 1, h, w] of the image alone, which enter as channels of the
first latent frame, and `siglip` the tokens [b, n, d] of SigLIP, which stand beside those of the text.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from unified_trainer.basics.types import Condition, Latents, PerSample
from unified_trainer.models.base import Shape
from unified_trainer.models.hunyuan15.model import Hunyuan15Model
from unified_trainer.models.image_tensors import image_of

SIGLIP_TOKENS = 729  # of 384 x 384 pixels


class ImageHunyuan15Model(Hunyuan15Model):
    """An image-to-video network: it reads 32 channels of latents, 32 of image latents, and a mask of known frames."""

    def image_inputs(self, x_t: Latents, cond: Condition) -> tuple[Tensor, ...]:
        image = image_of(cond)
        known = torch.cat([image, torch.ones_like(image[:, :1])], 1)
        return pad(known, (0, 0, 0, 0, 0, x_t.shape[2] - 1)), cond["siglip"]

    def example(
        self, shape: Shape | None = None, samples: int = 1, text_tokens: int = 4
    ) -> tuple[Latents, PerSample, Condition]:
        x_t, sigma, cond = super().example(shape, samples, text_tokens)
        draw, width = torch.Generator().manual_seed(1), self.network.config.image_embed_dim
        siglip = torch.randn(samples, SIGLIP_TOKENS if shape else 5, width, generator=draw).to(x_t.device)
        return x_t, sigma, cond.updated(Condition({"image": x_t[:, :, :1], "siglip": siglip}))
