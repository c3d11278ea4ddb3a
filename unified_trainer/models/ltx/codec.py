"""The text encoder (T5) and the VAE of LTX-Video as a codec."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLLTXVideo
from torch import Tensor
from transformers import PreTrainedTokenizerBase, T5EncoderModel

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Image
from unified_trainer.basics.types import Condition, Latents, Video
from unified_trainer.models.base import Shape
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.image_tensors import ImageTensors
from unified_trainer.models.ltx.configs import SPACE, LtxVAEConfig, latent_shape, transformer_config
from unified_trainer.models.ltx.vae import LtxVAECodec
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.reading import fill


class LtxCodec(LtxVAECodec):
    """T5, which reads the padding of a prompt too, and AutoencoderKLLTXVideo, whose weights have the statistics."""

    name = "ltx"
    text_classes = (T5EncoderModel,)
    vae_class = AutoencoderKLLTXVideo
    vae_schema = LtxVAEConfig
    longest_text = 128  # what LTXPipeline takes
    masked = True
    causal = False

    def __init__(self, folder: Path, device: torch.device, config: EncoderConfig) -> None:
        super().__init__(folder, device, config)
        if (takes := transformer_config(folder).caption_channels) != (gives := self.text_widths[0]):
            raise UserError(
                f"{folder}/transformer/config.json: caption_channels is {takes}, but the text encoder gives {gives}"
            )
        held = {name: torch.empty(self._mean.shape[1]) for name in ("latents_mean", "latents_std")}
        fill(held, folder / "vae", Mesh(torch.device("cpu")))
        self._images = ImageTensors(config)
        mean, std = (statistic.to(device).view_as(self._mean) for statistic in held.values())
        self._mean, self._std = mean, std * self._std

    def embed(self, encoder: Any, tokenizer: PreTrainedTokenizerBase, prompt: str) -> Tensor:
        tokens = tokenizer(
            [prompt], padding="max_length", max_length=self.text_tokens, truncation=True, return_tensors="pt"
        ).to(self._device)
        return encoder(tokens.input_ids).last_hidden_state[0, tokens.attention_mask[0].bool()]

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        return latent_shape(self.folder, frames, height, width)

    def encode_images(self, images: Sequence[tuple[Image, ...]], latent_shape: Shape) -> Condition:
        return self._images.condition(images, latent_shape, self._encode).map(lambda x: x.to(self._device))

    def first_frames(self, latents: Latents) -> Condition:
        return Condition({"image": latents[:, :, :1]})

    def _encode(self, image: Image, latent_shape: Shape) -> dict[str, Tensor]:
        """Encode one image alone, because the rounding of a row can depend on the other rows of a batch."""
        height, width = (SPACE * size for size in latent_shape[2:])
        return {"image": self.encode(image.at(height, width)[None, :, None])[0].cpu()}

    @classmethod
    def decoded(cls, vae: Any, raw: Latents) -> Video:
        """Decode at time 0 without noise in the latents, as LTXPipeline does by default.

        A decoder that adds noise between its layers gets the same for all samples and calls.
        """
        if vae.use_slicing and len(raw) > 1:  # diffusers slices no times
            return torch.cat([cls.decoded(vae, part) for part in raw.split(1)])
        time = raw.new_zeros(len(raw)) if vae.config.timestep_conditioning else None
        with _seeded(raw.device) if any(vae.config.decoder_inject_noise) else nullcontext():
            return vae.decode(raw, time).sample


@contextmanager
def _seeded(device: torch.device) -> Iterator[None]:
    """Let torch draw the same numbers in the context each time; its state before is that after."""
    with torch.random.fork_rng([] if device.type in ("cpu", "meta") else [device]):
        torch.manual_seed(0)
        yield
