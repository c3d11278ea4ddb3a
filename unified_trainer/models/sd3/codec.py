"""The three text encoders (two CLIP, T5) and the VAE of Stable Diffusion 3 as a codec."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor
from torch.nn.functional import pad
from transformers import CLIPTextModelWithProjection, PreTrainedTokenizerBase, T5EncoderModel

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.types import Latents, Video
from unified_trainer.models.diffusers_codec import DiffusersCodec
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.sd3.configs import KLVAEConfig, latent_shape, transformer_config


class SD3Codec(DiffusersCodec):
    """The tokens of both CLIPs side by side, then those of T5, none masked; `pooled` is both CLIPs' own summary.

    An embedding is one matrix: a row of `pooled`, the rows of CLIP, the rows of T5; CLIP's end with zeros.
    """

    name = "sd3"
    text_classes = (CLIPTextModelWithProjection, CLIPTextModelWithProjection, T5EncoderModel)
    vae_class = AutoencoderKL
    vae_schema = KLVAEConfig
    longest_text = 256  # what StableDiffusion3Pipeline takes by T5, beside the 77 of CLIP

    def __init__(self, folder: Path, device: torch.device, config: EncoderConfig) -> None:
        super().__init__(folder, device, config)
        network, (first, second, t5) = transformer_config(folder), self.text_widths
        for field, takes, has in (
            ("joint_attention_dim", network.joint_attention_dim, t5),
            ("pooled_projection_dim", network.pooled_projection_dim, first + second),
        ):
            if takes != has:
                raise UserError(
                    f"{folder}/transformer/config.json: {field} is {takes}, but the text encoders give {has}"
                )
        self._pooled = first + second

    def embed(self, encoder: Any, tokenizer: PreTrainedTokenizerBase, prompt: str) -> Tensor:
        """Return T5's rows, or CLIP's: its summary and the tokens of the last layer but one."""
        longest = self.tokens_of(tokenizer)
        tokens = tokenizer([prompt], padding="max_length", max_length=longest, truncation=True, return_tensors="pt")
        ids = tokens.input_ids.to(self._device)
        if isinstance(encoder, T5EncoderModel):
            return encoder(ids).last_hidden_state[0]
        found = encoder(ids, output_hidden_states=True)
        return torch.cat([found.text_embeds, found.hidden_states[-2][0]])

    def joined(self, embeddings: Sequence[Tensor]) -> Tensor:
        *clips, t5 = embeddings
        return torch.cat([pad(torch.cat(clips, 1), (0, t5.shape[1] - self._pooled)), t5])

    @classmethod
    def text_rows(cls, tokens: Sequence[int]) -> int:
        return 1 + tokens[0] + tokens[2]

    def named(self, text: Tensor) -> dict[str, Tensor]:
        return {"text": text[:, 1:], "pooled": text[:, 0, : self._pooled]}

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        return latent_shape(self.folder, frames, height, width)

    @classmethod
    def statistics(cls, config: Any) -> tuple[list[float], list[float]]:
        channels = config.latent_channels
        return [config.shift_factor] * channels, [1 / config.scaling_factor] * channels

    @classmethod
    def scales(cls, vae: Mapping[str, Any]) -> tuple[int, int]:
        return 1, 2 ** (len(vae["block_out_channels"]) - 1)

    @classmethod
    def tile(cls, vae: Any, size: int) -> None:
        vae.tile_sample_min_size, vae.tile_overlap_factor = size, 0.25
        vae.tile_latent_min_size = size // 2 ** (len(vae.config.block_out_channels) - 1)
        vae.enable_tiling()

    def encoded(self, vae: Any, video: Video) -> Latents:
        return vae.encode(video[:, :, 0]).latent_dist.mean[:, :, None]

    @classmethod
    def decoded(cls, vae: Any, raw: Latents) -> Video:
        return vae.decode(raw[:, :, 0]).sample[:, :, None]
