"""A family's classes, by which `plan` lays out networks, VAE and text encoders from configs alone, without a folder."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from unified_trainer.models.diffusers_codec import DiffusersCodec
from unified_trainer.models.diffusers_model import DiffusersModel


def heads_of(config: Mapping[str, Any]) -> int:
    """Return the heads of self-attention that the config of a diffusers transformer names."""
    return config["num_attention_heads"]


@dataclass(frozen=True)
class Blueprint:
    """The classes of a family's components; a config is what config.json holds."""

    model: Callable[[Mapping[str, Any]], type[DiffusersModel]]  # config of a transformer -> class of its model
    codec: type[DiffusersCodec]
    # config of a transformer -> heads of self-attention, which sequence ranks divide; 1 refuses sequence ranks
    heads: Callable[[Mapping[str, Any]], int] = lambda config: 1
    images: bool = False  # whether all its videos have one frame
    flow_map: type[DiffusersModel] | None = None  # class of the model of a flow map; None: the family has none
