"""Wan's text encoder (UMT5) and VAE as a `Codec`.

A condition is `text` [b, n, d], zero behind the last token of each prompt.
"""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import torch
import transformers
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from jaxtyping import Float
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, UMT5EncoderModel

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import read_as
from unified_trainer.basics.suggestions import multiples_near
from unified_trainer.basics.types import DTYPES, Condition, Latents, Video
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.folder import check_described, fingerprint, load_strictly, read_tokenizer
from unified_trainer.models.frozen_network import FrozenNetwork, channels_last
from unified_trainer.models.prompt_embeddings import PromptEmbeddings
from unified_trainer.models.wan.configs import TextEncoderConfig, vae_outline
from unified_trainer.parallel.device import rounds_products
from unified_trainer.parallel.mesh import Mesh

MAX_TEXT_TOKENS = 512  # what Wan was trained with; a tokenizer may say less


class WanCodec:
    """UMT5 and AutoencoderKLWan, both frozen; latents, videos and conditions are float32 on the device."""

    def __init__(
        self,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        text_encoder: FrozenNetwork,
        vae: FrozenNetwork,
        device: torch.device,
        config: EncoderConfig,
    ) -> None:
        self.folder = folder
        self._tokenizer, self._text_encoder, self._vae, self._device = tokenizer, text_encoder, vae, device
        self._outline = vae_outline(folder)
        self._text_tokens = min(MAX_TEXT_TOKENS, tokenizer.model_max_length)
        self._text_precision = config.text_precision
        self._vae_settings = config.vae_precision + (f" tiles {config.vae_tile}" if config.vae_tile else "")
        settings: tuple[str | int, ...] = (config.text_precision, device.type, self._text_tokens)
        settings += ("tf32",) if rounds_products() and config.text_precision == "fp32" else ()
        encoder = f"{_identity(folder)} {settings}"
        self.text_width = read_as(TextEncoderConfig, folder / "text_encoder" / "config.json").d_model
        self._embeddings = PromptEmbeddings(self._embed, encoder, self.text_width, config)
        statistics = [self._outline.config.latents_mean, self._outline.config.latents_std]
        self._mean, self._std = torch.tensor(statistics).view(2, 1, -1, 1, 1, 1).to(device)

    @classmethod
    def load(cls, folder: Path, device: torch.device, config: EncoderConfig) -> "WanCodec":
        """Open a WanPipeline folder and read the VAE; raise UserError for a folder that is not whole.

        The text encoder is read when a prompt has no embedding yet.
        """
        embedded = read_as(TextEncoderConfig, folder / "text_encoder" / "config.json").vocab_size
        check_described(UMT5EncoderModel, folder / "text_encoder", "model", schema=TextEncoderConfig)

        def text_encoder() -> UMT5EncoderModel:
            how = {"dtype": DTYPES[config.text_precision], "schema": TextEncoderConfig}
            return load_strictly(UMT5EncoderModel, folder / "text_encoder", "model", **how)

        def vae() -> AutoencoderKLWan:
            network = load_strictly(AutoencoderKLWan, folder / "vae", dtype=DTYPES[config.vae_precision])
            if config.vae_slicing:
                network.enable_slicing()
            if config.vae_tile:
                network.enable_tiling(*[config.vae_tile] * 2, *[config.vae_tile * 3 // 4] * 2)
            return channels_last(network) if config.vae_channels_last else network

        codec = cls(
            folder,
            read_tokenizer(AutoTokenizer, folder / "tokenizer", embedded),
            FrozenNetwork(text_encoder, device, offload=config.offload, pinned=False),
            FrozenNetwork(vae, device, offload=config.offload),
            device,
            config,
        )
        codec._vae.load()
        return codec

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        return latent_shape(self._outline, frames, height, width)

    @cached_property
    def text_fingerprint(self) -> str:
        files = fingerprint(self.folder / "text_encoder", self.folder / "tokenizer")
        return f"wan {self._text_precision} {self._text_tokens} tokens {files}"

    @cached_property
    def video_fingerprint(self) -> str:
        return f"wan {self._vae_settings} {fingerprint(self.folder / 'vae')}"

    @property
    def text_tokens(self) -> int:
        return self._text_tokens

    def embeddings(self, prompts: Sequence[str]) -> list[Float[Tensor, "n d"]]:
        return [row.float() for row in self._embeddings.rows([prompt_clean(prompt) for prompt in prompts])]

    def remember(self, prompt: str, embedding: Float[Tensor, "n d"]) -> None:
        self._embeddings.store(prompt_clean(prompt), embedding)

    def encode_text(self, prompts: Sequence[str]) -> Condition:
        return self.text_condition(self.embeddings(prompts))

    def text_condition(self, embeddings: Sequence[Tensor]) -> Condition:
        longest = max(map(len, embeddings))
        if longest > self._text_tokens:
            raise UserError(f"a text embedding has {longest} tokens, but this model takes {self._text_tokens}")
        if other := {row.shape[1] for row in embeddings} - {self.text_width}:
            raise UserError(f"a text embedding has {min(other)} channels, but this model takes {self.text_width}")
        text = torch.zeros(len(embeddings), self._text_tokens, self.text_width, device=embeddings[0].device)
        for padded, row in zip(text, embeddings, strict=True):
            padded[: len(row)] = row
        return Condition({"text": text.to(self._device, non_blocking=True)})

    def text_difference(self, prompt: str, embedding: Tensor) -> float:
        own = self.embeddings([prompt])[0]
        stored, padding = embedding[: len(own)], embedding[len(own) :]
        if stored.shape != own.shape or bool(padding.any()):
            return math.inf
        return float((stored - own).norm() / own.norm())

    def encode_ahead(self, prompts: Sequence[str], mesh: Mesh) -> str:
        distinct = list(dict.fromkeys(prompt_clean(prompt) for prompt in prompts))
        counts = self._embeddings.encode_ahead(distinct, mesh)
        self._text_encoder.free()
        said = f"text encoder: {len(distinct)} distinct prompts, {counts.found} encoded before, {counts.encoded} now"
        rest = f"{counts.left} when they are drawn" if counts.left else "not in memory"
        return f"{said}, {rest}; embeddings in {self._embeddings.place}"

    @torch.no_grad()
    def _embed(self, prompts: Sequence[str]) -> Generator[Tensor, None, None]:
        """Encode prompts one by one, because the rounding of a row can depend on the other rows of a batch."""
        with self._text_encoder.in_use() as encoder:
            for prompt in prompts:
                tokens = self._tokenizer(
                    [prompt], padding="max_length", max_length=self._text_tokens, truncation=True, return_tensors="pt"
                ).to(self._device)
                text = encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
                yield text[0, tokens.attention_mask[0].bool()].cpu()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        with self._vae.in_use():
            yield

    def encode(self, video: Video) -> Latents:
        return self.normalise(self.encode_raw(video))

    @torch.no_grad()
    def encode_raw(self, video: Video) -> Latents:
        with self._vae.in_use() as vae:
            return vae.encode((video.to(self._device) * 2 - 1).to(vae.dtype)).latent_dist.mean.float()

    def normalise(self, raw: Latents) -> Latents:
        return (raw.to(self._mean) - self._mean) / self._std

    def decode(self, latents: Latents) -> Video:
        with self._vae.in_use() as vae:
            return (vae.decode(self._raw(latents).to(vae.dtype)).sample.float() / 2 + 0.5).clamp(0, 1)

    def decoder(self) -> Callable[[Latents], Video]:
        """Return a decoder of consecutive chunks, without gradient.

        It runs the VAE's own loop over latent frames and keeps the VAE's feature cache from call to call. Samples are
        decoded together and frames whole, whatever the settings of slices and tiles.
        """
        memory: list[Tensor | None] = []

        @torch.no_grad()
        def decode_next(latents: Latents) -> Video:
            parts = []
            with self._vae.in_use() as vae:
                if not memory:
                    memory.extend([None] * vae._cached_conv_counts["decoder"])
                for frame in vae.post_quant_conv(self._raw(latents).to(vae.dtype)).split(1, 2):
                    first = {"first_chunk": True} if memory[0] is None else {}
                    parts.append(vae.decoder(frame, feat_cache=memory, feat_idx=[0], **first))
            video = torch.cat(parts, 2).float()
            if self._outline.config.patch_size is not None:
                video = unpatchify(video, patch_size=self._outline.config.patch_size)
            return (video / 2 + 0.5).clamp(0, 1)

        return decode_next

    def _raw(self, latents: Latents) -> Latents:
        """Undo `normalise`, on the device."""
        return latents.to(self._mean) * self._std + self._mean


def _identity(folder: Path) -> str:
    """Return what the embeddings of a prompt depend on: names, sizes and times of the files, and library versions."""
    files = [file for part in ("text_encoder", "tokenizer") for file in (folder / part).rglob("*") if file.is_file()]
    facts = [(str(file.relative_to(folder)), file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(files)]
    return f"torch {torch.__version__}, transformers {transformers.__version__}, {facts}"


def latent_shape(
    vae: AutoencoderKLWan, frames: int, height: int, width: int, patch: tuple[int, int] = (1, 1)
) -> tuple[int, int, int, int]:
    """Return channels, latent frames, height and width of a video's latents.

    UserError, with the nearest good sizes, unless VAE and `patch`, latent height and width of one token, divide it.
    """
    config = vae.config
    time, space = config.scale_factor_temporal, config.scale_factor_spatial
    if frames < 1 or frames % time != 1:
        below = (frames - 1) // time * time + 1
        good = f"{below} or {below + time}" if frames > 1 else "1"
        raise UserError(f"video.frames must be {time}k + 1 for this VAE, not {frames}: set {good}")
    for name, size, unit in (("height", height, space * patch[0]), ("width", width, space * patch[1])):
        if size < unit or size % unit:
            parts = "VAE" if unit == space else f"VAE ({space}) and the transformer's patches ({unit // space})"
            good = multiples_near(size, unit)
            raise UserError(f"video.{name} must be a multiple of {unit} for this {parts}, not {size}: set {good}")
    return config.z_dim, frames // time + 1, height // space, width // space
