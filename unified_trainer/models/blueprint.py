"""The parts of a model's folder as `plan` lays them out from configs alone, without weights."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unified_trainer.basics.input_files import read_json
from unified_trainer.models.base import ActionForm, VideoModel
from unified_trainer.models.diffusers_codec import DiffusersCodec

Config = str  # a config as JSON, which can be the key of a cache


class ModelKind(Protocol):
    """Makes models of networks; equal ones are one key of a cache."""

    @property
    def network_class(self) -> Any:
        """The class of the network."""

    def __call__(self, network: Any) -> VideoModel:
        """Return the model of a network."""


class VAEKind(Protocol):
    """Lays out and runs the VAE of a folder; equal ones are one key of a cache."""

    @property
    def vae_class(self) -> Any:
        """The class of the VAE."""

    @property
    def causal(self) -> bool:
        """Whether a decoded frame depends on no later latent."""

    def decoded(self, vae: Any, raw: Tensor) -> Tensor:
        """Return the video in [-1, 1] of latents, of which the video's are in the VAE's own units."""

    def tile(self, vae: Any, size: int) -> None:
        """Let the VAE work in tiles of `size` pixels a side."""


@dataclass(frozen=True)
class Blueprint:
    """The networks of a folder and the sizes of its prompts."""

    model: ModelKind
    vae: VAEKind
    text_shapes: Mapping[str, tuple[int, ...]]  # the largest shapes of the tensors of a prompt
    encode_flops: Callable[[], float]  # of one prompt, counted when they are asked for
    flow_map: ModelKind | None = None  # the model of a flow map; None: the family has none
    # The model of a network with a layer of actions, which is new or in the folder; None: the family has none.
    acting: Callable[[ActionForm, bool], ModelKind] | None = None


def codec_blueprint(
    folder: Path, model: ModelKind, codec: type[DiffusersCodec], flow_map: ModelKind | None = None
) -> Blueprint:
    """Return the blueprint of a folder whose family has classes for its model and its codec."""
    config = codec.text_class.config_class.from_dict(read_json(folder / "text_encoder" / "config.json"))
    file = folder / "tokenizer" / "tokenizer_config.json"
    given = read_json(file).get("model_max_length") if file.is_file() else None
    tokens = int(min(codec.longest_text, given or codec.longest_text))

    def encode_flops() -> float:
        """Count the products of linear layers, without attention scores."""
        with torch.device("meta"):
            encoder = codec.text_class(config)
        layers = (layer for layer in encoder.modules() if isinstance(layer, nn.Linear))
        return 2.0 * tokens * sum(layer.weight.numel() for layer in layers)

    width = config.get_text_config().hidden_size
    return Blueprint(model, codec, {"text": (tokens, width)}, encode_flops, flow_map)


def frozen_config(config: Mapping[str, Any]) -> Config:
    """Return a config as a key of a cache."""
    return json.dumps(config, sort_keys=True)
