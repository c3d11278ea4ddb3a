"""The Wan family: how a WanPipeline folder is opened, and what its configs say."""

import math
from pathlib import Path
from typing import Any

from diffusers import AutoencoderKLWan

from unified_trainer.errors import MissingFileError, UserError
from unified_trainer.models.base import Family
from unified_trainer.models.folder import outline, read_json
from unified_trainer.models.wan import exported_pipeline
from unified_trainer.models.wan.causal import CausalWanModel
from unified_trainer.models.wan.codec import WanCodec, latent_shape
from unified_trainer.models.wan.lora import published_adapter, published_layer
from unified_trainer.models.wan.model import WanModel

INDEX = "model_index.json"
EXPERTS = ("transformer", "transformer_2")  # of high and of low noise; a folder of one network has the first alone


def latent_channels(folder: Path) -> int:
    """Return the number of latent channels, read from the transformer's config."""
    return _setting(folder, "in_channels")


def latent_shape_of(folder: Path, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
    """Return the shape of a video's latents, from the VAE's config; its weights are not read."""
    return latent_shape(outline(AutoencoderKLWan, folder / "vae"), frames, height, width)


def patched_latent_shape(folder: Path, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
    """Return the shape of a video's latents, from configs; UserError unless the transformer's patches divide it."""
    _, *patch = _setting(folder, "patch_size")  # all Wan transformers take latent frames one by one
    return latent_shape(outline(AutoencoderKLWan, folder / "vae"), frames, height, width, tuple(patch))


def tokens(folder: Path, latent_shape: tuple[int, int, int, int]) -> int:
    """Return the tokens that the transformer makes of one sample's latents, read from its config."""
    patches = zip(latent_shape[1:], _setting(folder, "patch_size"), strict=True)
    return math.prod(size // patch for size, patch in patches)


def attention_heads(folder: Path) -> int:
    """Return the number of attention heads, read from the transformer's config."""
    return _setting(folder, "num_attention_heads")


def networks(folder: Path) -> tuple[tuple[str, ...], float | None]:
    """Return the folder's transformers, of high noise first, and the noise level at which two meet, if it names one.

    Raise UserError when one of two is absent or differs from the other in more than its weights.
    """
    index = read_json(folder / INDEX)
    boundary = index.get("boundary_ratio")
    entry = index.get(EXPERTS[1]) or [None]
    if entry[0] is None:
        if boundary is not None:
            raise UserError(f"{folder / INDEX}: boundary_ratio is {boundary}, but no {EXPERTS[1]} is named")
        return EXPERTS[:1], None
    if boundary is not None and not 0 < boundary < 1:
        raise UserError(f"{folder / INDEX}: boundary_ratio must be in (0, 1), not {boundary}")
    high, low = (_config(folder, component) for component in EXPERTS)
    for key in sorted(high.keys() | low.keys()):
        if not key.startswith("_") and high.get(key) != low.get(key):
            raise UserError(
                f"{folder}: its two transformers must be of one shape, but {key} is {high.get(key)} and {low.get(key)}"
            )
    return EXPERTS, boundary


def _config(folder: Path, component: str) -> dict[str, Any]:
    file = folder / component / "config.json"
    if not file.is_file():
        raise MissingFileError(f"{file} is missing: not a whole diffusers folder")
    return read_json(file)


def _setting(folder: Path, key: str) -> Any:
    config = _config(folder, EXPERTS[0])
    if key not in config:
        raise UserError(f"{folder / EXPERTS[0] / 'config.json'}: {key} is missing; this is no Wan transformer")
    return config[key]


WAN = Family(
    pipeline="WanPipeline",
    model=WanModel.open,
    codec=WanCodec.load,
    causal=CausalWanModel.open,
    latent_channels=latent_channels,
    latent_shape=patched_latent_shape,
    tokens=tokens,
    attention_heads=attention_heads,
    networks=networks,
    experts=EXPERTS,
    published_adapter=published_adapter,
    published_layer=published_layer,
    adapter_files=("high_noise_model", "low_noise_model"),  # as Wan2.2-Lightning names them
    exported_pipeline=Path(exported_pipeline.__file__),
)
