"""Wan's text encoder (UMT5) and VAE as a codec, and the latents that a video of a size has."""

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
from torch import Tensor
from transformers import UMT5EncoderModel

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import read_as
from unified_trainer.basics.suggestions import multiples_near
from unified_trainer.basics.types import Latents, Video
from unified_trainer.models.diffusers_codec import DecodeNext, DiffusersCodec
from unified_trainer.models.wan.configs import TextEncoderConfig, VAEConfig


class WanCodec(DiffusersCodec):
    """UMT5, whose padding is zero and is attended to as it was in Wan's training, and AutoencoderKLWan."""

    name = "wan"
    text_class = UMT5EncoderModel
    text_schema = TextEncoderConfig
    vae_class = AutoencoderKLWan
    vae_schema = VAEConfig

    def text_sizes(self, file: Path) -> tuple[int, int]:
        config = read_as(TextEncoderConfig, file)
        return config.vocab_size, config.d_model

    def cleaned(self, prompt: str) -> str:
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean  # pipelines, which plan needs not

        return prompt_clean(prompt)

    def embed(self, encoder: Any, prompt: str) -> Tensor:
        tokens = self._tokenizer(
            [prompt], padding="max_length", max_length=self.text_tokens, truncation=True, return_tensors="pt"
        ).to(self._device)
        text = encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
        return text[0, tokens.attention_mask[0].bool()]

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        return latent_shape(self._outline.config, frames, height, width)

    def chunk_decoder(self) -> DecodeNext:
        """Run the VAE's own loop over latent frames and keep its feature cache from call to call."""
        memory: list[Tensor | None] = []

        def decode_next(vae: Any, raw: Latents) -> Video:
            if not memory:
                memory.extend([None] * vae._cached_conv_counts["decoder"])
            parts = []
            for frame in vae.post_quant_conv(raw).split(1, 2):
                first = {"first_chunk": True} if memory[0] is None else {}
                parts.append(vae.decoder(frame, feat_cache=memory, feat_idx=[0], **first))
            video = torch.cat(parts, 2).float()
            patch = vae.config.patch_size
            return video if patch is None else unpatchify(video, patch_size=patch)

        return decode_next


def latent_shape(
    vae: Any, frames: int, height: int, width: int, patch: tuple[int, int] = (1, 1)
) -> tuple[int, int, int, int]:
    """Return channels, latent frames, height and width of a video's latents, from the VAE's config.

    UserError, with the nearest good sizes, unless VAE and `patch`, latent height and width of one token, divide it.
    """
    time, space = vae.scale_factor_temporal, vae.scale_factor_spatial
    if frames < 1 or frames % time != 1:
        below = (frames - 1) // time * time + 1
        good = f"{below} or {below + time}" if frames > 1 else "1"
        raise UserError(f"video.frames must be {time}k + 1 for this VAE, not {frames}: set {good}")
    for name, size, unit in (("height", height, space * patch[0]), ("width", width, space * patch[1])):
        if size < unit or size % unit:
            parts = "VAE" if unit == space else f"VAE ({space}) and the transformer's patches ({unit // space})"
            good = multiples_near(size, unit)
            raise UserError(f"video.{name} must be a multiple of {unit} for this {parts}, not {size}: set {good}")
    return vae.z_dim, frames // time + 1, height // space, width // space
