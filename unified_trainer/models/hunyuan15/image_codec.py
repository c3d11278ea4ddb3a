"""The codec of HunyuanVideo 1.5 with a condition image: its latents, and tokens of SigLIP."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import SiglipImageProcessorPil, SiglipVisionModel

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Image
from unified_trainer.basics.types import DTYPES, Condition, Latents
from unified_trainer.models.base import Shape
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.folder import check_described, load_strictly, read_pretrained
from unified_trainer.models.frozen_network import FrozenNetwork
from unified_trainer.models.hunyuan15.codec import Hunyuan15Codec
from unified_trainer.models.hunyuan15.configs import transformer_config
from unified_trainer.models.image_tensors import ImageTensors, of_tower

SIGLIP, PROCESSOR = "image_encoder", "feature_extractor"  # components of a folder
NAMES: dict[str, Any] = {"weights": "model", "inside": of_tower}


class ImageHunyuan15Codec(Hunyuan15Codec):
    """Hunyuan15Codec with `encode_images`; `image` and `siglip` of its conditions are described in image_model.py."""

    def __init__(self, folder: Path, device: torch.device, config: EncoderConfig) -> None:
        super().__init__(folder, device, config)
        self._images = ImageTensors(config)
        width = check_described(SiglipVisionModel, folder / SIGLIP, **NAMES).get("hidden_size", 768)
        if width != (takes := transformer_config(folder).image_embed_dim):
            raise UserError(
                f"{folder}/transformer/config.json: image_embed_dim is {takes}, but the image encoder gives {width}"
            )

        def siglip() -> SiglipVisionModel:
            return load_strictly(SiglipVisionModel, folder / SIGLIP, dtype=DTYPES[config.text_precision], **NAMES)

        self._siglip = FrozenNetwork(siglip, device, offload=config.offload)

    def encode_images(self, images: Sequence[tuple[Image, ...]], latent_shape: Shape) -> Condition:
        return self._images.condition(images, latent_shape, self._encode).map(lambda x: x.to(self._device))

    def first_frames(self, latents: Latents) -> Condition:
        raise UserError(f"{self.folder}: this network needs the first frames of clips, not their latents")

    @torch.no_grad()
    def _encode(self, image: Image, latent_shape: Shape) -> dict[str, Tensor]:
        """Encode one image alone, because the rounding of a row can depend on the other rows of a batch."""
        _, space = self.scales(self._outline.config)
        height, width = (size * space for size in latent_shape[2:])
        pixels = self._processor(images=image.picture(height, width), return_tensors="pt").pixel_values
        with self._siglip.in_use() as siglip:
            seen = siglip(pixels.to(self._device, siglip.dtype)).last_hidden_state
        return {"image": self.encode(image.at(height, width)[None, :, None])[0].cpu(), "siglip": seen[0].float().cpu()}

    @cached_property
    def _processor(self) -> SiglipImageProcessorPil:
        return read_pretrained(SiglipImageProcessorPil, self.folder / PROCESSOR)
