"""The text encoder (Gemma 3 and its connectors), the VAEs and the vocoder of LTX-2 as a codec."""

import re
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLLTX2Audio, AutoencoderKLLTX2Video
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder, LTX2VocoderWithBWE
from jaxtyping import Float
from torch import Tensor, nn
from transformers import Gemma3ForConditionalGeneration

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import read_as
from unified_trainer.basics.types import DTYPES, Latents, Video
from unified_trainer.models.base import Prompt, Shape
from unified_trainer.models.diffusers_codec import DiffusersCodec
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.folder import check_described, load_strictly
from unified_trainer.models.frozen_network import FrozenNetwork
from unified_trainer.models.ltx2.configs import (
    AudioVAEConfig,
    ConnectorsConfig,
    Ltx2VAEConfig,
    VocoderConfig,
    latent_shape,
    transformer_config,
)
from unified_trainer.models.ltx2.layout import BANDS, SPACE, parts
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.reading import fill

VOCODERS = {kind.__name__: kind for kind in (LTX2Vocoder, LTX2VocoderWithBWE)}
STATISTICS = ("latents_mean", "latents_std")  # buffers of both VAEs


class Ltx2Codec(DiffusersCodec):
    """All layers of Gemma 3, of which connectors make two embeddings, and the VAE, whose weights have the statistics.

    The embedding of a prompt is one matrix: the channels for the video, then those for the sound.
    """

    name = "ltx2"
    text_class = Gemma3ForConditionalGeneration
    vae_class = AutoencoderKLLTX2Video
    vae_schema = Ltx2VAEConfig
    longest_text = 1024  # what LTX2Pipeline takes
    causal = False

    def __init__(self, folder: Path, device: torch.device, config: EncoderConfig) -> None:
        transformer_config(folder)  # its faults are those of a file
        super().__init__(folder, device, config)
        self._check_connectors()
        channels = self._mean.shape[1]
        audio = read_as(AudioVAEConfig, folder / "audio_vae" / "config.json")
        if (given := (audio.base_channels, audio.latent_channels * BANDS)) != (channels, channels):
            raise UserError(
                f"{folder}/audio_vae/config.json: base_channels and {BANDS} latent_channels are {given}, but the "
                f"transformer takes {channels}"
            )
        held = {name: torch.empty(channels) for name in STATISTICS}
        fill(held, folder / "vae", Mesh(torch.device("cpu")))
        mean, std = (statistic.to(device).view_as(self._mean) for statistic in held.values())
        self._mean, self._std = mean, std * self._std
        vocoder = read_as(VocoderConfig, folder / "vocoder" / "config.json")
        self.sample_rate, self._vocoder = vocoder.output_sampling_rate, VOCODERS[vocoder.class_name]
        check_described(AutoencoderKLLTX2Audio, folder / "audio_vae")
        check_described(self._vocoder, folder / "vocoder")
        precision = DTYPES[self._text_precision]

        def connectors() -> nn.Module:
            return load_strictly(LTX2TextConnectors, folder / "connectors", dtype=precision)

        self._connectors = FrozenNetwork(connectors, device, offload=config.offload, pinned=False)
        self._sound = FrozenNetwork(self._sound_networks, device, offload=config.offload)

    def _check_connectors(self) -> None:
        """Raise UserError unless the connectors fit the text encoder, the network and the length of a text."""
        file = self.folder / "connectors" / "config.json"
        config, takes = read_as(ConnectorsConfig, file), transformer_config(self.folder).text_widths
        if config.caption_channels != (width := self.text_width):
            raise UserError(
                f"{file}: caption_channels is {config.caption_channels}, but the text encoder gives {width}"
            )
        if (gives := config.text_widths) != takes:
            raise UserError(f"{file}: the connectors give {gives} channels, but the transformer takes {takes}")
        for count in config.registers:
            if self.text_tokens % count:
                raise UserError(f"{file}: {count} registers do not divide the {self.text_tokens} tokens of a text")
        check_described(LTX2TextConnectors, file.parent)

    def _sound_networks(self) -> nn.ModuleList:
        """Read audio VAE and vocoder, which compute in float32."""
        return nn.ModuleList(
            load_strictly(kind, self.folder / name)
            for kind, name in ((AutoencoderKLLTX2Audio, "audio_vae"), (self._vocoder, "vocoder"))
        )

    @classmethod
    def channels_of(cls, folder: Path, width: int) -> int:
        return sum(transformer_config(folder).text_widths)

    def text_weight(self, key: str) -> str:
        """Published files have the names of earlier versions of transformers, which reads both."""
        key = re.sub(r"^language_model\.(model\.)?", "model.language_model.", key)
        return re.sub(r"^(vision_tower|multi_modal_projector)\.", r"model.\1.", key)

    @classmethod
    def text_layers(cls, encoder: Any) -> nn.Module:
        """Return the language model: texts pass by the vision tower and the vocabulary's head."""
        return encoder.model.language_model

    def cleaned(self, prompt: str) -> str:
        return prompt.strip()  # as LTX2Pipeline reads it

    def embed(self, encoder: Any, prompt: str) -> Tensor:
        tokens = self._tokenizer(
            [prompt],
            padding="max_length",
            padding_side="left",
            max_length=self.text_tokens,
            truncation=True,
            return_tensors="pt",
        ).to(self._device)
        ids, mask = tokens.input_ids, tokens.attention_mask
        layers = encoder.model(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
        with self._connectors.in_use() as connectors:
            text, sound_text, _ = connectors(torch.stack(layers, -1).flatten(2), mask, padding_side="left")
        return torch.cat([text[0], sound_text[0]], 1)

    def _embed(self, prompts: Sequence[str]) -> Generator[Prompt, None, None]:
        with self._connectors.in_use():
            yield from super()._embed(prompts)

    def _free_text(self) -> None:
        super()._free_text()
        self._connectors.free()

    def named(self, text: Float[Tensor, "b n d"]) -> dict[str, Tensor]:
        widths = transformer_config(self.folder).text_widths
        return dict(zip(("text", "sound_text"), text.split(widths, 2), strict=True))

    def _text_parts(self) -> list[Path]:
        return [*super()._text_parts(), self.folder / "connectors"]

    def latent_shape(self, frames: int, height: int, width: int) -> Shape:
        return latent_shape(self.folder, frames, height, width)

    @classmethod
    def statistics(cls, config: Any) -> tuple[list[float], list[float]]:
        """Return the part that the config has: a scale for all channels."""
        return [0.0] * config.latent_channels, [1 / config.scaling_factor] * config.latent_channels

    @classmethod
    def tile(cls, vae: Any, size: int) -> None:
        stride = size * 3 // 4
        vae.enable_tiling(size, size, tile_sample_stride_height=stride, tile_sample_stride_width=stride)

    @classmethod
    def decoded(cls, vae: Any, raw: Latents) -> Video:
        """As for all families; UserError for a side or a last tile of one latent, which no reflection pads."""
        if vae.config.decoder_spatial_padding_mode == "reflect":
            sides, tile = [SPACE * latents for latents in raw.shape[3:]], vae.tile_sample_min_height
            tiled = vae.use_tiling and max(sides) > tile
            way = f"set another encoders.vae_tile than {tile}, or 0" if tiled else f"a side has {2 * SPACE} or more"
            for side in sides:
                if (side % vae.tile_sample_stride_height if tiled else side) == SPACE:
                    raise UserError(f"the VAE cannot pad {SPACE} pixels by their reflection, the last of {side}: {way}")
        return super().decoded(vae, raw)

    @classmethod
    def of_video(cls, latents: Latents) -> Float[Tensor, "b c frames h w"]:
        return parts(latents).video

    def encode_raw(self, video: Video) -> Latents:
        raise UserError("LTX-2's latents hold a sound, which frames alone do not give")

    @torch.no_grad()
    def sound(self, latents: Latents) -> Float[Tensor, "b channels n"]:
        with self._sound.in_use() as (vae, vocoder):
            mean, std = (getattr(vae, name) for name in STATISTICS)
            raw = parts(latents.to(mean)).sound * std + mean
            return vocoder(vae.decode(raw.unflatten(2, (-1, BANDS)).transpose(1, 2)).sample)
