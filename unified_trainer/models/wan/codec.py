"""Wan's text encoder (UMT5) and VAE as a `Codec`, with the conditions that they make."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from jaxtyping import Float
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, UMT5EncoderModel

from unified_trainer.errors import MissingFileError, UserError
from unified_trainer.models.folder import load_strictly, read_json
from unified_trainer.types import Latents, Video

MAX_TEXT_TOKENS = 512  # what Wan was trained with; a tokenizer may say less


@dataclass(frozen=True)
class WanCondition:
    """UMT5 embeddings of prompts, zero behind the last token of each prompt."""

    text: Float[Tensor, "b n d"]

    def __len__(self) -> int:
        return len(self.text)

    def map(self, fn: Callable[[Tensor], Tensor]) -> "WanCondition":
        return WanCondition(fn(self.text))

    def cat(self, other: "WanCondition") -> "WanCondition":
        return WanCondition(torch.cat([self.text, other.text]))


class WanCodec:
    """UMT5 and AutoencoderKLWan, both frozen and in float32."""

    def __init__(
        self,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        text_encoder: UMT5EncoderModel,
        vae: AutoencoderKLWan,
    ) -> None:
        self.folder = folder
        self._tokenizer = tokenizer
        self._text_encoder = text_encoder.eval().requires_grad_(False)
        self._vae = vae.eval().requires_grad_(False)
        self._text_tokens = min(MAX_TEXT_TOKENS, tokenizer.model_max_length)
        statistics = torch.tensor([vae.config.latents_mean, vae.config.latents_std]).view(2, 1, -1, 1, 1, 1)
        self._mean, self._std = statistics.to(vae.device)

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> "WanCodec":
        """Load tokenizer, text encoder and VAE of a WanPipeline folder; raise UserError for one that is not whole."""
        tokenizer = folder / "tokenizer"
        if not any((tokenizer / name).is_file() for name in ("tokenizer.json", "spiece.model")):
            raise MissingFileError(f"{tokenizer} holds neither tokenizer.json nor spiece.model")
        for file in sorted(tokenizer.glob("*.json")):
            read_json(file)
        return cls(
            folder,
            AutoTokenizer.from_pretrained(tokenizer),
            load_strictly(UMT5EncoderModel, folder / "text_encoder", "model").to(device),
            load_strictly(AutoencoderKLWan, folder / "vae").to(device),
        )

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        return latent_shape(self._vae, frames, height, width)

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[str]) -> WanCondition:
        tokens = self._tokenizer(
            [prompt_clean(prompt) for prompt in prompts],
            padding="max_length",
            max_length=self._text_tokens,
            truncation=True,
            return_tensors="pt",
        ).to(self._text_encoder.device)
        text = self._text_encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
        return WanCondition(text * tokens.attention_mask[..., None])

    @torch.no_grad()
    def encode(self, video: Video) -> Latents:
        return self.normalise(self._vae.encode(video * 2 - 1).latent_dist.mean)

    def normalise(self, raw: Latents) -> Latents:
        return (raw.to(self._mean) - self._mean) / self._std

    def decode(self, latents: Latents) -> Video:
        return (self._vae.decode(latents * self._std + self._mean).sample / 2 + 0.5).clamp(0, 1)

    def decoder(self) -> Callable[[Latents], Video]:
        """Return a decoder of consecutive chunks, without gradient.

        It runs the VAE's own loop over latent frames and keeps the VAE's feature cache from call to call.
        """
        vae = self._vae
        memory: list[Tensor | None] = [None] * vae._cached_conv_counts["decoder"]

        @torch.no_grad()
        def decode_next(latents: Latents) -> Video:
            parts = []
            for frame in vae.post_quant_conv(latents * self._std + self._mean).split(1, 2):
                first = {"first_chunk": True} if memory[0] is None else {}
                parts.append(vae.decoder(frame, feat_cache=memory, feat_idx=[0], **first))
            video = torch.cat(parts, 2)
            if vae.config.patch_size is not None:
                video = unpatchify(video, patch_size=vae.config.patch_size)
            return (video / 2 + 0.5).clamp(0, 1)

        return decode_next


def latent_shape(vae: AutoencoderKLWan, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
    """Return channels, latent frames, height and width of a video's latents; UserError for a size that does not fit."""
    config = vae.config
    time, space = config.scale_factor_temporal, config.scale_factor_spatial
    if frames < 1 or frames % time != 1:
        raise UserError(f"video.frames must be {time}k + 1 for this VAE, not {frames}")
    for name, size in (("height", height), ("width", width)):
        if size < space or size % space:
            raise UserError(f"video.{name} must be a multiple of {space} for this VAE, not {size}")
    return config.z_dim, frames // time + 1, height // space, width // space
