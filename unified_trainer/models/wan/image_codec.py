"""The codec of Wan's networks with a condition image: latents of the image, and for Wan2.1 I2V tokens of CLIP."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CLIPImageProcessorPil, CLIPVisionModel

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Image
from unified_trainer.basics.types import DTYPES, Condition, Latents
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.folder import check_described, fingerprint, load_strictly, read_pretrained
from unified_trainer.models.frozen_network import FrozenNetwork
from unified_trainer.models.image_tensors import ImageTensors, of_tower
from unified_trainer.models.wan.attention import TEXT_TOKENS
from unified_trainer.models.wan.codec import WanCodec
from unified_trainer.models.wan.configs import CLIP, ClipConfig, transformer_config

GRAY = 0.5  # 0 in the VAE's range
PROCESSOR = "image_processor"  # component of a folder
NAMES: dict[str, Any] = {"weights": "model", "schema": ClipConfig, "inside": of_tower}


class ImageWanCodec(WanCodec):
    """WanCodec with `encode_images`; `image` and `clip` of its conditions are described in image_model.py."""

    _clip: FrozenNetwork | None = None
    _first_alone: bool  # the image is encoded as the first latent frame, without frames behind it

    def __init__(self, folder: Path, device: torch.device, config: EncoderConfig) -> None:
        super().__init__(folder, device, config)
        self._images = ImageTensors(config)
        network = transformer_config(folder)
        self._first_alone = network.in_channels == network.out_channels
        if network.image_dim:
            if self.text_tokens != TEXT_TOKENS:
                raise UserError(
                    f"{folder / 'tokenizer'}: prompts of {self.text_tokens} tokens: a network with CLIP tokens takes "
                    f"{TEXT_TOKENS} tokens of text, which follow them"
                )
            check_described(CLIPVisionModel, folder / CLIP, **NAMES)

            def clip() -> CLIPVisionModel:
                return load_strictly(CLIPVisionModel, folder / CLIP, dtype=DTYPES[config.text_precision], **NAMES)

            self._clip = FrozenNetwork(clip, device, offload=config.offload)

    @property
    def video_fingerprint(self) -> str:
        """Identifies what latents and CLIP's tokens depend on, but for rounding."""
        clip = [fingerprint(self.folder / CLIP)] if self._clip is not None else []
        return " ".join([super().video_fingerprint, *clip])

    def encode_images(self, images: Sequence[tuple[Image, ...]], latent_shape: tuple[int, int, int, int]) -> Condition:
        return self._images.condition(images, latent_shape, self._encode).map(lambda x: x.to(self._device))

    def first_frames(self, latents: Latents) -> Condition:
        if not self._first_alone:
            raise UserError(f"{self.folder}: this network needs the first frames of clips, not their latents")
        return Condition({"image": latents[:, :, :1]})

    @torch.no_grad()
    def _encode(self, images: tuple[Image, ...], latent_shape: tuple[int, int, int, int]) -> dict[str, Tensor]:
        """Encode one image alone, because the rounding of a row can depend on the other rows of a batch."""
        config, (_, frames, height, width), (image,) = self._outline.config, latent_shape, images
        height, width = height * config.scale_factor_spatial, width * config.scale_factor_spatial
        first = image.at(height, width)[None, :, None]
        if self._first_alone:
            return {"image": self.encode(first)[0].cpu()}
        rest = first.new_full((1, 3, (frames - 1) * config.scale_factor_temporal, height, width), GRAY)
        made = {"image": self.encode(torch.cat([first, rest], 2))[0].cpu()}
        if self._clip is not None:
            pixels = self._processor(images=image.picture(height, width), return_tensors="pt").pixel_values
            with self._clip.in_use() as clip:
                seen = clip(pixels.to(self._device, clip.dtype), output_hidden_states=True)
            made["clip"] = seen.hidden_states[-2][0].float().cpu()
        return made

    @cached_property
    def _processor(self) -> CLIPImageProcessorPil:
        return read_pretrained(CLIPImageProcessorPil, self.folder / PROCESSOR)
