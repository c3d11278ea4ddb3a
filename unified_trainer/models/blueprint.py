"""A family's classes, by which `plan` lays out networks, VAE and text encoders from configs alone, without a folder."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from unified_trainer.models.diffusers_codec import DiffusersCodec
from unified_trainer.models.diffusers_model import DiffusersModel


@dataclass(frozen=True)
class Blueprint:
    """The classes of a family's components; a config is what config.json holds."""

    model: Callable[[Mapping[str, Any]], type[DiffusersModel]]  # config of a transformer -> class of its model
    codec: type[DiffusersCodec]
    # config of a transformer -> heads of self-attention, which sequence ranks divide; 1 refuses sequence ranks
    heads: Callable[[Mapping[str, Any]], int] = lambda config: 1
    images: bool = False  # whether all its videos have one frame
