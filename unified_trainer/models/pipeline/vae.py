"""The VAE of a pipeline: tiles of one size for all classes, and what classes of diffusers leave to be fixed."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from diffusers import AutoencoderKLHunyuanVideo15
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.types import Latents, Video
from unified_trainer.models.pipeline.latents import FoundLatents


def tile(vae: Any, size: int, space: int) -> None:
    """Let the VAE work in tiles of `size` pixels a side that overlap by a quarter; a latent is `space` pixels a side.

    UserError for a size of which latents have no quarter, and for a VAE whose tiles have no size.
    """
    if size % (4 * space):
        raise UserError(f"encoders.vae_tile must be a multiple of {4 * space}, or 0, not {size}")
    given = dict.fromkeys(("tile_sample_min_height", "tile_sample_min_width", "tile_sample_min_size"), size)
    given |= dict.fromkeys(("tile_sample_stride_height", "tile_sample_stride_width"), size * 3 // 4)
    given |= dict.fromkeys(("tile_latent_min_height", "tile_latent_min_width"), size // space)
    taken = inspect.signature(vae.enable_tiling).parameters
    if not taken and "tile_latent_min_size" in vars(vae):  # those of images have attributes alone
        vae.tile_sample_min_size, vae.tile_latent_min_size, vae.tile_overlap_factor = size, size // space, 0.25
    elif not taken.keys() & given.keys():
        raise UserError(f"encoders.vae_tile: {type(vae).__name__} has tiles of one size; set it to 0")
    vae.enable_tiling(**{name: value for name, value in given.items() if name in taken})


def fix(vae: Any) -> None:
    """Give HunyuanVideo 1.5's VAE a mask for all samples, which diffusers writes row by row for one sample."""
    for part in (vae.encoder, vae.decoder) if isinstance(vae, AutoencoderKLHunyuanVideo15) else ():
        for attention in filter(None, part.mid_block.attentions):
            attention.prepare_causal_attention_mask = causal_mask


def decoded(vae: Any, raw: Latents, found: FoundLatents) -> Video:
    """Return the videos in [-1, 1] of latents in the VAE's own units, with the pipeline's arguments of its decode."""
    _check_reflection(vae, raw.shape[3:])
    raw = (raw[:, :, 0] if found.flat else raw).to(vae.dtype)
    words = {
        name: value.to(raw).expand(len(raw), *value.shape[1:]) if isinstance(value, Tensor) else value
        for name, value in found.decode.items()
    }
    with same_noise(vae.config, raw.device):
        video = vae.decode(raw, return_dict=False, **words)[0]
    return video[:, :, None] if found.flat else video


def _check_reflection(vae: Any, sides: Sequence[int]) -> None:
    """Raise UserError if a decoder that pads by reflection is given a last tile of one latent a side."""
    if vae.config.get("decoder_spatial_padding_mode") != "reflect" or not vae.use_tiling:
        return
    space, tile = vae.spatial_compression_ratio, vae.tile_sample_min_height
    for side in (space * latents for latents in sides):
        if max(sides) * space > tile and side % vae.tile_sample_stride_height == space:
            raise UserError(
                f"the VAE cannot pad {space} pixels by their reflection, the last of {side}: set another "
                f"encoders.vae_tile than {tile}, or 0"
            )


def causal_mask(frames: int, pixels: int, dtype: torch.dtype, device: torch.device, batch_size: int) -> Tensor:
    """Return what is added to the scores of attention, for all samples: each frame sees itself and earlier ones."""
    frame = torch.arange(frames, device=device).repeat_interleave(pixels)
    later = frame > frame[:, None]
    return torch.zeros(later.shape, dtype=dtype, device=device).masked_fill_(later, -torch.inf)


@contextmanager
def same_noise(config: Mapping[str, Any], device: torch.device) -> Iterator[None]:
    """Let a decoder that adds noise between its layers draw the same numbers in each call."""
    adds = any(config.get("decoder_inject_noise", ()))
    with torch.random.fork_rng([] if device.type in ("cpu", "meta") else [device]) if adds else nullcontext():
        if adds:
            torch.manual_seed(0)
        yield
