"""The Wan family: how a WanPipeline folder is opened, and what its configs say."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import read_as, read_json
from unified_trainer.models.base import ActionForm, Family, Shape
from unified_trainer.models.blueprint import Blueprint, codec_blueprint
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.sparse_attention import SparseAttentionConfig
from unified_trainer.models.wan.actions import ActingKind, form_of, with_actions
from unified_trainer.models.wan.causal import CausalWanModel
from unified_trainer.models.wan.causal_image import CausalFirstFrameWanModel, CausalImageChannelsWanModel
from unified_trainer.models.wan.causal_sparse import CausalSparseWanModel
from unified_trainer.models.wan.codec import WanCodec, latent_shape
from unified_trainer.models.wan.configs import (
    EXPERTS,
    INDEX,
    ModelIndex,
    check_folder,
    clip_shape,
    native_config,
    transformer_config,
    vae_config,
)
from unified_trainer.models.wan.flow_map import FlowMapWanModel, check_velocity
from unified_trainer.models.wan.image_model import FirstFrameWanModel, ImageChannelsWanModel
from unified_trainer.models.wan.lora import published_adapter, published_layer
from unified_trainer.models.wan.model import WanModel
from unified_trainer.models.wan.sparse import SparseWanModel, check_dense

M = TypeVar("M", bound=WanModel)
BIDIRECTIONAL = {(0, 0): WanModel, (0, 1): FirstFrameWanModel, (1, 1): ImageChannelsWanModel}  # by condition images
CAUSAL = {(0, 0): CausalWanModel, (0, 1): CausalFirstFrameWanModel, (1, 1): CausalImageChannelsWanModel}


def images(folder: Path) -> tuple[int, int]:
    """Return the fewest and the most condition images of a sample, read from configs.

    I2V reads channels of an image and needs one; TI2V may know its first frame. A folder without an index, such as an
    export that is being written, takes none.
    """
    network = transformer_config(folder)
    if network.in_channels != network.out_channels:
        return 1, 1
    index = folder / INDEX
    return 0, int(index.is_file() and read_as(ModelIndex, index).expand_timesteps)


def image_tensors(folder: Path, latent_shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what is encoded of an I2V network's image; nothing for TI2V, whose clips hold it."""
    network = transformer_config(folder)
    if network.in_channels == network.out_channels:
        return {}
    return {"image": latent_shape} | ({"clip": clip_shape(folder)} if network.image_dim else {})


def open_model(folder: Path, component: str, action_size: int = 0) -> WanModel:
    """Open a network of a folder, without weights: of text alone, or of text and an image.

    It takes actions if its folder holds their layer; with `action_size` it gets one.
    """
    check_dense(folder / component)
    check_velocity(folder / component)
    return _opened(BIDIRECTIONAL[images(folder)], folder, component, action_size)


def open_sparse(folder: Path, component: str, config: SparseAttentionConfig, causal: bool) -> SparseWanModel:
    """Open a network of a folder with sparse attention, without weights, as a causal one if asked."""
    return (CausalSparseWanModel if causal else SparseWanModel).open_with(folder, component, config)


def open_causal(folder: Path, component: str, action_size: int = 0) -> CausalWanModel:
    """Open a network as `open_model` does, as a causal one."""
    check_dense(folder / component)
    return _opened(CAUSAL[images(folder)], folder, component, action_size)


def _opened(kind: type[M], folder: Path, component: str, action_size: int) -> M:
    new = actions(folder, action_size) if action_size else None
    if new or form_of(folder / component):
        return with_actions(kind).open_with(folder / component, new)
    return kind.open(folder, component)


def open_acting(folder: Path, component: str, causal: bool, size: int) -> WanModel:
    """Open a network of a folder that gets a layer of actions of this size, unless it has one."""
    return open_causal(folder, component, size) if causal else open_model(folder, component, size)


def actions(folder: Path, size: int) -> ActionForm | None:
    """Return the actions that the folder's networks take: those of the first one's layer, or of a new one of this size.

    UserError for a layer that joins other numbers of pixel frames than the folder's VAE.
    """
    held = form_of(folder / EXPERTS[0])
    own = size or (held.size if held else 0)
    if not own:
        return None
    form = ActionForm(own, vae_config(folder).scale_factor_temporal)
    if held and held.ratio != form.ratio:
        raise UserError(
            f"{folder}: its layer of actions joins {held.ratio} pixel frames and its VAE {form.ratio}: they do not "
            "belong together, name the folder of an export"
        )
    return form


def blueprint(folder: Path) -> Blueprint:
    """Return the parts of a folder, whose network takes a text, or a text and an image as channels."""
    model = ImageChannelsWanModel if images(folder)[0] else WanModel
    return replace(codec_blueprint(folder, model, WanCodec, FlowMapWanModel), acting=partial(ActingKind, model))


def load_codec(folder: Path, device: torch.device, config: EncoderConfig) -> WanCodec:
    """Open text encoder and VAE of a folder, and what encodes condition images if it takes some."""
    if not images(folder)[1]:
        return WanCodec.load(folder, device, config)
    from unified_trainer.models.wan.image_codec import ImageWanCodec

    return ImageWanCodec.load(folder, device, config)


def latent_channels(folder: Path) -> int:
    """Return the number of latent channels, read from the transformer's config."""
    return transformer_config(folder).out_channels


def patched_latent_shape(folder: Path, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
    """Return the shape of a video's latents, from configs; UserError unless the transformer's patches divide it."""
    config = transformer_config(folder)
    _, *patch = config.patch_size  # all Wan transformers take latent frames one by one
    shape = latent_shape(vae_config(folder), frames, height, width, (patch[0], patch[1]))
    longest = max(size // part for size, part in zip(shape[1:], config.patch_size, strict=True))
    if longest > config.rope_max_seq_len:
        raise UserError(
            f"{folder / EXPERTS[0] / 'config.json'}: rope_max_seq_len is {config.rope_max_seq_len}, but a video of "
            f"{frames} x {height} x {width} has {longest} tokens along one axis: take a smaller video"
        )
    return shape


def tokens(folder: Path, latent_shape: tuple[int, int, int, int]) -> int:
    """Return the tokens that the transformer makes of one sample's latents, read from its config."""
    patches = zip(latent_shape[1:], transformer_config(folder).patch_size, strict=True)
    return math.prod(size // patch for size, patch in patches)


def attention_heads(folder: Path) -> int:
    """Return the number of attention heads, read from the transformer's config."""
    return transformer_config(folder).num_attention_heads


def networks(folder: Path) -> tuple[tuple[str, ...], float | None]:
    """Return the folder's transformers, of high noise first, and the noise level at which two meet, if it names one.

    Raise UserError for a config that cannot be, and when one of two is absent or differs from the other in more than
    its weights.
    """
    index = read_as(ModelIndex, folder / INDEX)
    boundary = index.boundary_ratio
    check_folder(folder)
    if not index.transformer_2 or index.transformer_2[0] is None:
        if boundary is not None:
            raise UserError(f"{folder / INDEX}: boundary_ratio is {boundary}, but no {EXPERTS[1]} is named")
        return EXPERTS[:1], None
    for component in EXPERTS:
        transformer_config(folder, component)
    high, low = (read_json(folder / component / "config.json") for component in EXPERTS)
    for key in sorted(high.keys() | low.keys()):
        if not key.startswith("_") and high.get(key) != low.get(key):
            raise UserError(
                f"{folder}: its two transformers must be of one shape, but {key} is {high.get(key)} and {low.get(key)}"
            )
    return EXPERTS, boundary


WAN = Family(
    pipelines=("WanPipeline", "WanImageToVideoPipeline"),
    model=open_model,
    codec=load_codec,
    causal=open_causal,
    images=images,
    latents_hold_image=lambda folder: images(folder) == (0, 1),
    image_tensors=image_tensors,
    latent_channels=latent_channels,
    latent_shape=patched_latent_shape,
    tokens=tokens,
    attention_heads=attention_heads,
    blueprint=blueprint,
    networks=networks,
    experts=EXPERTS,
    published_adapter=published_adapter,
    published_layer=published_layer,
    native=("wan", native_config),
    adapter_files=("high_noise_model", "low_noise_model"),  # as Wan2.2-Lightning names them
    exported_pipeline=Path(__file__).with_name("exported_pipeline.py"),
    sparse=open_sparse,
    flow_map=FlowMapWanModel.open,
    actions=actions,
    acting=open_acting,
)
