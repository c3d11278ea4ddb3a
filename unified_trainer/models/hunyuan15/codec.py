"""The text encoders (Qwen2.5-VL, and ByT5 for quoted text) and the VAE of HunyuanVideo 1.5 as a codec."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLHunyuanVideo15
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase, Qwen2_5_VLTextModel, T5EncoderModel

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.types import Latents, Video
from unified_trainer.models.chat_template import TEXT, fixed_chat
from unified_trainer.models.diffusers_codec import DiffusersCodec
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.hunyuan15.configs import Hunyuan15VAEConfig, latent_shape, transformer_config

# The system's turn, as HunyuanVideo15Pipeline writes it: the blanks count.
SYSTEM = "        ".join(
    (
        "You are a helpful assistant. Describe the video by detailing the following aspects: ",
        "1. The main content and theme of the video. ",
        "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects. ",
        "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects. ",
        "4. background environment, light, style and atmosphere. ",
        "5. camera angles, movements, and transitions used in the video.",
    )
)
TEMPLATE_TOKENS = 108  # of the turns before the prompt
SKIPPED_LAYERS = 2  # of Qwen2.5-VL, at its end
GLYPHS = 256  # tokens of quoted text, which are bytes, that the pipeline takes


class Hunyuan15Codec(DiffusersCodec):
    """Hidden states of Qwen2.5-VL after the template's tokens, and those of ByT5 of the texts in quotes.

    An embedding is one matrix: the rows of ByT5, whose last channels are zero, then the rows of Qwen, where they are
    not. A condition's `text` and `glyphs` are parts of it, each with a mask of its own rows.
    """

    name = "hunyuan15"
    text_classes = (Qwen2_5_VLTextModel, T5EncoderModel)
    vae_class = AutoencoderKLHunyuanVideo15
    vae_schema = Hunyuan15VAEConfig
    longest_text = 1000  # what the pipeline takes

    def __init__(self, folder: Path, device: torch.device, config: EncoderConfig) -> None:
        super().__init__(folder, device, config)
        network = transformer_config(folder)
        if self.text_widths != (takes := [network.text_embed_dim, network.text_embed_2_dim]):
            raise UserError(
                f"{folder}/transformer/config.json: text_embed_dim and text_embed_2_dim are {takes}, but the text "
                f"encoders give {self.text_widths}"
            )
        if takes[0] <= takes[1]:
            raise UserError(f"{folder}/transformer/config.json: text_embed_dim must be more than text_embed_2_dim")

    def embed(self, encoder: Any, tokenizer: PreTrainedTokenizerBase, prompt: str) -> Tensor:
        if isinstance(encoder, T5EncoderModel):
            return self._glyphs(encoder, tokenizer, prompt)
        turns = json.dumps([{"role": "system", "content": SYSTEM}, {"role": "user", "content": TEXT}])
        special = json.dumps(tokenizer.special_tokens_map)
        around = fixed_chat(tokenizer.get_chat_template(), turns, special, f"{self.folder}/tokenizer")
        tokens = tokenizer(
            (prompt or " ").join(around),
            add_special_tokens=False,
            max_length=TEMPLATE_TOKENS + self.tokens_of(tokenizer),
            truncation=True,
            return_tensors="pt",
        ).to(self._device)
        states = encoder(tokens.input_ids, tokens.attention_mask, output_hidden_states=True).hidden_states
        return states[-1 - SKIPPED_LAYERS][0, TEMPLATE_TOKENS:]

    def _glyphs(self, encoder: T5EncoderModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> Tensor:
        quoted = extract_glyph_texts(prompt)
        if quoted is None:
            return torch.zeros(0, encoder.config.d_model, dtype=encoder.dtype, device=self._device)
        longest = min(GLYPHS, self.tokens_of(tokenizer))
        tokens = tokenizer([quoted], max_length=longest, truncation=True, return_tensors="pt")
        return encoder(tokens.input_ids.to(self._device)).last_hidden_state[0]

    def joined(self, embeddings: Sequence[Tensor]) -> Tensor:
        text, glyphs = embeddings
        return torch.cat([pad(glyphs, (0, text.shape[1] - glyphs.shape[1])), text])

    @classmethod
    def text_rows(cls, tokens: Sequence[int]) -> int:
        return tokens[0] + min(tokens[1], GLYPHS)

    def named(self, text: Tensor) -> dict[str, Tensor]:
        width = self.text_widths[1]
        of_text = text[:, :, width:].any(2)
        glyphs, of_glyphs = text[:, :GLYPHS, :width], text.any(2) & ~of_text
        return {"text": text, "text_mask": of_text, "glyphs": glyphs, "glyphs_mask": of_glyphs[:, :GLYPHS]}

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        return latent_shape(self.folder, frames, height, width)

    @classmethod
    def statistics(cls, config: Any) -> tuple[list[float], list[float]]:
        return [0.0] * config.latent_channels, [1 / config.scaling_factor] * config.latent_channels

    @classmethod
    def scales(cls, vae: Mapping[str, Any]) -> tuple[int, int]:
        return vae.get("temporal_compression_ratio", 4), vae.get("spatial_compression_ratio", 16)

    def encoded(self, vae: Any, video: Video) -> Latents:
        return super().encoded(_with_mask(vae), video)

    @classmethod
    def decoded(cls, vae: Any, raw: Latents) -> Video:
        return super().decoded(_with_mask(vae), raw)

    @classmethod
    def tile(cls, vae: Any, size: int) -> None:
        vae.enable_tiling(size, size, *[size // vae.spatial_compression_ratio] * 2, tile_overlap_factor=0.25)


def _with_mask(vae: Any) -> Any:
    """Let the VAE's attention have `causal_mask`: diffusers writes its own row by row, and for one sample alone."""
    for part in (vae.encoder, vae.decoder):
        for attention in filter(None, part.mid_block.attentions):
            attention.prepare_causal_attention_mask = causal_mask
    return vae


def causal_mask(frames: int, pixels: int, dtype: torch.dtype, device: torch.device, batch_size: int) -> Tensor:
    """Return what is added to the scores of attention, for all samples: each frame sees itself and earlier ones."""
    frame = torch.arange(frames, device=device).repeat_interleave(pixels)
    later = frame > frame[:, None]
    return torch.zeros(later.shape, dtype=dtype, device=device).masked_fill_(later, -torch.inf)
