"""The Wan family from a diffusers folder: Wan2.1 T2V, and the tiny world in the same layout."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoTokenizer, PreTrainedTokenizerBase, UMT5EncoderModel

from unified_trainer.models.base import CheckpointContexts
from unified_trainer.models.folder import load_strictly, outline, read_weights
from unified_trainer.models.wan.ulysses import SharedTokens
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.types import Latents, PerSample, Video

MAX_TEXT_TOKENS = 512  # what Wan was trained with; a tokenizer may say less
EXPERTS = ("transformer", "transformer_2")  # of high and of low noise; a folder of one network has the first alone
TIME_SCALE = 1000  # the network's time is 1000 sigma, and stays fractional


@dataclass(frozen=True)
class WanCondition:
    """UMT5 embeddings, zero behind each prompt's last token."""

    text: Float[Tensor, "b n d"]

    def __len__(self) -> int:
        return len(self.text)

    def map(self, fn: Callable[[Tensor], Tensor]) -> "WanCondition":
        return WanCondition(fn(self.text))

    def cat(self, other: "WanCondition") -> "WanCondition":
        return WanCondition(torch.cat([self.text, other.text]))


class WanModel:
    """WanTransformer3DModel as a velocity field."""

    adapter_layers = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")

    def __init__(self, network: WanTransformer3DModel, folder: Path | None = None) -> None:
        self.network = network
        self._folder = folder  # of the weights, while the network is an outline
        self._shared: SharedTokens | None = None

    @classmethod
    def open(cls, folder: Path, component: str = "transformer") -> "WanModel":
        """A transformer of the folder in float32, whose weights `read` will bring."""
        return cls(outline(WanTransformer3DModel, folder / component), folder / component)

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> "WanModel":
        """The same with its weights, in this process alone."""
        model = cls.open(folder)
        model.read(Mesh(device))
        return model

    def read(self, mesh: Mesh) -> None:
        if self._folder is not None:
            read_weights(self.network, self._folder, mesh)
            self._folder = None
            for table in self.network.buffers():
                table.data = table.to(mesh.device)

    def share_tokens(self, mesh: Mesh) -> None:
        self._shared = SharedTokens(self.network, mesh)

    def velocity(self, x_t: Latents, sigma: PerSample, cond: WanCondition) -> Latents:
        time = (TIME_SCALE * sigma.double()).to(device=x_t.device, dtype=torch.float32)
        return self._predict(x_t, time, cond)

    def _predict(self, x_t: Latents, time: Tensor, cond: WanCondition) -> Latents:
        if self._shared:
            x_t = self._shared.whole_gradient(x_t)
        return self.network(x_t, time, cond.text, return_dict=False)[0].float()

    @property
    def blocks(self) -> nn.ModuleList:
        return self.network.blocks

    @property
    def feature_size(self) -> int:
        config = self.network.config
        return config.num_attention_heads * config.attention_head_dim

    @contextmanager
    def features(self) -> Iterator[list[Tensor]]:
        seen: list[Tensor] = []
        middle = self.blocks[len(self.blocks) // 2]
        whole = self._shared.gather if self._shared else lambda x: x
        handle = middle.register_forward_hook(lambda _module, _inputs, output: seen.append(whole(output)))
        try:
            yield seen
        finally:
            handle.remove()

    def example(self) -> tuple[Latents, PerSample, WanCondition]:
        config = self.network.config
        time, height, width = (2 * size for size in config.patch_size)
        draw = torch.Generator().manual_seed(0)
        x_t = torch.randn(1, config.in_channels, time, height, width, generator=draw)
        text = torch.randn(1, 4, config.text_dim, generator=draw)
        device = next(self.network.parameters()).device
        return x_t.to(device), torch.full((1,), 0.5, device=device), WanCondition(text.to(device))

    def save(self, folder: Path, component: str, dtype: torch.dtype, max_shard_size: str) -> None:
        whole = self.network._keep_in_fp32_modules  # which diffusers does not load in half precision either
        for key, weight in self.network.named_parameters():
            if not set(whole) & set(key.split(".")):
                weight.data = weight.data.to(dtype)
        self.network.register_to_config(_name_or_path="")
        self.network.save_pretrained(folder / component, max_shard_size=max_shard_size)
        self.network.float()

    def checkpoint_activations(self, contexts: CheckpointContexts) -> None:
        self.network.enable_gradient_checkpointing(
            lambda block, *inputs: checkpoint(block, *inputs, use_reentrant=False, context_fn=contexts)
        )


class WanCodec:
    """UMT5 and AutoencoderKLWan, frozen."""

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
        """Everything of a WanPipeline folder but the transformer, in float32."""
        if not any((folder / "tokenizer" / name).is_file() for name in ("tokenizer.json", "spiece.model")):
            raise FileNotFoundError(f"{folder / 'tokenizer'} holds neither tokenizer.json nor spiece.model")
        return cls(
            folder,
            AutoTokenizer.from_pretrained(folder / "tokenizer"),
            load_strictly(UMT5EncoderModel, folder / "text_encoder", "model").to(device),
            load_strictly(AutoencoderKLWan, folder / "vae").to(device),
        )

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        config = self._vae.config
        time, space = config.scale_factor_temporal, config.scale_factor_spatial
        if frames < 1 or frames % time != 1:
            raise ValueError(f"video.frames must be {time}k + 1 for this VAE, not {frames}")
        for name, size in (("height", height), ("width", width)):
            if size < space or size % space:
                raise ValueError(f"video.{name} must be a multiple of {space} for this VAE, not {size}")
        return config.z_dim, frames // time + 1, height // space, width // space

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
        """The VAE's own loop over latent frames, whose memory of the frames before is kept from call to call."""
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


def latent_channels(folder: Path) -> int:
    """How many channels the transformer of this folder works on, from its config alone."""
    return _config(folder)["in_channels"]


def attention_heads(folder: Path) -> int:
    """How many heads the transformer of this folder attends with, from its config alone."""
    return _config(folder)["num_attention_heads"]


def networks(folder: Path) -> tuple[tuple[str, ...], float | None]:
    """The folder's transformers, of high noise first, and the noise level at which two meet, if it says one.

    ValueError or FileNotFoundError when one of two is absent or differs from the other in more than its weights.
    """
    index = json.loads((folder / "model_index.json").read_text())
    boundary = index.get("boundary_ratio")
    entry = index.get(EXPERTS[1]) or [None]
    if entry[0] is None:
        if boundary is not None:
            raise ValueError(
                f"{folder / 'model_index.json'}: boundary_ratio is {boundary}, but no {EXPERTS[1]} is named"
            )
        return EXPERTS[:1], None
    if boundary is not None and not 0 < boundary < 1:
        raise ValueError(f"{folder / 'model_index.json'}: boundary_ratio must be in (0, 1), not {boundary}")
    high, low = (_config(folder, component) for component in EXPERTS)
    for key in sorted(high.keys() | low.keys()):
        if not key.startswith("_") and high.get(key) != low.get(key):
            raise ValueError(
                f"{folder}: its two transformers must be of one shape, but {key} is {high.get(key)} and {low.get(key)}"
            )
    return EXPERTS, boundary


def _config(folder: Path, component: str = "transformer") -> dict[str, Any]:
    file = folder / component / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: not a whole diffusers folder")
    return json.loads(file.read_text())
