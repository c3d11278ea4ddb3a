"""A text encoder of transformers and a VAE of diffusers as a codec: caches, padding, offload and normalisation."""

from collections.abc import Callable, Generator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from diffusers import ModelMixin
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from unified_trainer.basics.input_files import Schema, read_as, read_json
from unified_trainer.basics.types import DTYPES, Condition, Latents, Video
from unified_trainer.models.base import Prompt
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.folder import check_described, fingerprint, load_strictly, outline, read_tokenizer
from unified_trainer.models.frozen_codec import FrozenCodec
from unified_trainer.models.frozen_network import FrozenNetwork, channels_last
from unified_trainer.models.layout import reading_config
from unified_trainer.models.prompt_embeddings import PromptEmbeddings
from unified_trainer.models.prompt_lengths import Cut, cut_by
from unified_trainer.models.prompt_tensors import Shapes, stack
from unified_trainer.parallel.device import rounds_products

DecodeNext = Callable[[Any, Latents], Video]  # (VAE, latents of the next chunk in its own units) -> video in [-1, 1]


class DiffusersCodec(FrozenCodec):
    """Base of the codecs of a family: one text encoder and one VAE, both frozen.

    A family sets `name`, the classes and `text_schema`, and defines `embed` and `latent_shape`; the other functions
    below are Wan's form of them. Latents, videos and conditions are float32 on the device. A condition is `text`
    [b, n, d], zero behind the last token of each prompt; `named` may make several tensors of it.
    """

    name: ClassVar[str]  # of the family, in fingerprints
    text_class: ClassVar[type[PreTrainedModel]]
    text_schema: ClassVar[type[Schema] | None] = None  # the fields of its config that count; None: all
    vae_class: ClassVar[type[ModelMixin]]
    vae_schema: ClassVar[type[Schema] | None] = None  # what its config must be, beside what the class takes
    longest_text: ClassVar[int] = 512  # tokens that conditions are padded to; a tokenizer may say less
    causal = True

    def __init__(self, folder: Path, device: torch.device, config: EncoderConfig) -> None:
        """Open a pipeline folder, of which no weight is read yet; UserError for a folder that is not whole."""
        config = config.on(device.type)
        described: dict[str, Any] = {"weights": "model", "schema": self.text_schema}
        encoder = folder / "text_encoder"
        vocabulary, self.text_width = self.text_sizes(encoder / "config.json")
        check_described(self.text_class, encoder, **described)
        self.folder, self._device = folder, device
        self._tokenizer = read_tokenizer(AutoTokenizer, folder / "tokenizer", vocabulary)
        if self.vae_schema is not None:
            read_as(self.vae_schema, folder / "vae" / "config.json")
        self._outline = outline(self.vae_class, folder / "vae")
        self.text_tokens = int(min(self.longest_text, self._tokenizer.model_max_length))
        self.text_shapes: Shapes = {"text": (self.text_tokens, self.text_width)}
        self._text_precision = config.text_precision
        self._vae_settings = config.vae_precision + (f" tiles {config.vae_tile}" if config.vae_tile else "")
        settings: tuple[str | int, ...] = (config.text_precision, device.type, self.text_tokens)
        settings += ("tf32",) if rounds_products() and config.text_precision == "fp32" else ()
        self._embeddings = PromptEmbeddings(self._embed, f"{self._identity()} {settings}", self.text_shapes, config)
        mean, std = self.statistics(self._outline.config)
        self._mean, self._std = torch.tensor([mean, std]).view(2, 1, -1, 1, 1, 1).to(device)

        def text_encoder() -> nn.Module:
            return load_strictly(self.text_class, encoder, dtype=DTYPES[config.text_precision], **described)

        def vae() -> ModelMixin:
            network = load_strictly(self.vae_class, folder / "vae", dtype=DTYPES[config.vae_precision])
            if config.vae_slicing:
                network.enable_slicing()
            if config.vae_tile:
                self.tile(network, config.vae_tile)
            return channels_last(network) if config.vae_channels_last else network

        self._text_encoder = FrozenNetwork(text_encoder, device, offload=config.offload, pinned=False)
        self._vae = FrozenNetwork(vae, device, offload=config.offload)

    @classmethod
    def load(cls, folder: Path, device: torch.device, config: EncoderConfig) -> Self:
        """Open a pipeline folder and read the VAE; raise UserError for a folder that is not whole.

        The text encoder is read when a prompt has no embedding yet.
        """
        codec = cls(folder, device, config)
        codec._vae.load()
        return codec

    # What a family defines.

    def text_sizes(self, file: Path) -> tuple[int, int]:
        """Return the vocabulary and the channels of a text encoder, from its config file."""
        with reading_config(file, "text encoder"):
            config = self.text_class.config_class.from_dict(read_json(file)).get_text_config()
            return config.vocab_size, config.hidden_size

    def embed(self, encoder: Any, prompt: str) -> Float[Tensor, "n d"]:
        """Return the embedding of a cleaned prompt, without padding: at most `text_tokens` rows."""
        raise NotImplementedError

    def named(self, text: Float[Tensor, "b n d"]) -> dict[str, Tensor]:
        """Return the tensors of a condition, from padded embeddings."""
        return {"text": text}

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        raise NotImplementedError

    @classmethod
    def statistics(cls, config: Any) -> tuple[Sequence[float], Sequence[float]]:
        """Return mean and standard deviation of each channel of the latents, from the VAE's config."""
        return config.latents_mean, config.latents_std

    @classmethod
    def tile(cls, vae: Any, size: int) -> None:
        """Let the VAE work in tiles of `size` pixels a side that overlap by a quarter."""
        vae.enable_tiling(size, size, size * 3 // 4, size * 3 // 4)

    @classmethod
    def decoded(cls, vae: Any, raw: Latents) -> Video:
        """Return the video in [-1, 1] of latents in the VAE's own units."""
        return vae.decode(raw).sample

    def chunk_decoder(self) -> DecodeNext:
        """Return a function that decodes chunk after chunk of one batch; without chunks, the whole."""
        return self.decoded

    # What all families share.

    @cached_property
    def text_fingerprint(self) -> str:
        files = fingerprint(*self._text_parts())
        return f"{self.name} {self._text_precision} {self.text_tokens} tokens {files}"

    @cached_property
    def video_fingerprint(self) -> str:
        return f"{self.name} {self._vae_settings} {fingerprint(self.folder / 'vae')}"

    def cut(self, prompts: Sequence[str]) -> Cut:
        return cut_by(self._tokenizer, self.text_tokens, [self.cleaned(prompt) for prompt in prompts])

    def text_condition(self, prompts: Sequence[Prompt]) -> Condition:
        text = stack(prompts, self.text_shapes)["text"]
        return Condition(self.named(text)).map(lambda x: x.to(self._device, non_blocking=True))

    @torch.no_grad()
    def _embed(self, prompts: Sequence[str]) -> Generator[Prompt, None, None]:
        """Encode prompts one by one, because the rounding of a row can depend on the other rows of a batch."""
        with self._text_encoder.in_use() as encoder:
            for prompt in prompts:
                yield {"text": self.embed(encoder, prompt).cpu()}

    @torch.no_grad()
    def encode_raw(self, video: Video) -> Latents:
        with self._vae.in_use() as vae:
            return vae.encode((video.to(self._device) * 2 - 1).to(vae.dtype)).latent_dist.mean.float()

    def normalise(self, raw: Latents) -> Latents:
        return (raw.to(self._mean) - self._mean) / self._std

    def decode(self, latents: Latents) -> Video:
        return self._decode(latents, self.decoded)

    def decoder(self) -> Callable[[Latents], Video]:
        """Return a decoder of consecutive chunks, without gradient.

        Samples are decoded together and frames whole, whatever the settings of slices and tiles.
        """
        decode_next = self.chunk_decoder()
        return torch.no_grad()(lambda latents: self._decode(latents, decode_next))

    def _decode(self, latents: Latents, decode: DecodeNext) -> Video:
        with self._vae.in_use() as vae:
            return (decode(vae, self.raw(latents).to(vae.dtype)).float() / 2 + 0.5).clamp(0, 1)

    def raw(self, latents: Latents) -> Latents:
        return latents.to(self._mean) * self._std + self._mean

    def _text_parts(self) -> list[Path]:
        return [self.folder / name for name in ("text_encoder", "tokenizer")]

    def _free_text(self) -> None:
        self._text_encoder.free()
