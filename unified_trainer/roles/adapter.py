"""The adapter of a role: its settings, and how it is put on a network."""

import warnings
from dataclasses import dataclass, field
from typing import Annotated

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import at_least
from unified_trainer.models.base import VideoModel
from unified_trainer.parallel.random import generator


@dataclass(frozen=True)
class ExpertFileConfig:
    path: str = ""
    """Adapter made elsewhere, for this expert; empty takes the role's."""


@dataclass(frozen=True)
class FrozenExpertConfig:
    adapter: ExpertFileConfig = field(default_factory=ExpertFileConfig)


@dataclass(frozen=True, kw_only=True)
class AdapterFileConfig:
    path: str = ""
    """Adapter made elsewhere: a folder or a safetensors file in one of the layouts of docs/weights.md. It is merged
    into the weights before the first step."""
    sha256: str = ""
    """SHA-256 of the adapter's files. A run writes it into its config.yaml; other content is refused."""


@dataclass(frozen=True)
class AdapterConfig(AdapterFileConfig):
    rank: Annotated[int, at_least(0, 8192)] = 0
    """Rank of the LoRA adapter that is trained in place of the weights; 0 takes that of an adapter made elsewhere, and
    without one trains the weights themselves."""
    alpha: Annotated[float, at_least(0, 1e6)] = 0.0
    """The adapter's output is scaled by alpha / rank; 0 takes that of an adapter made elsewhere, else the rank."""
    layers: tuple[str, ...] = ()
    """Names of the linear layers that get an adapter; empty takes those of an adapter made elsewhere, else the family's
    usual ones."""
    path: str = field(default="", kw_only=True)
    """Adapter made elsewhere: a folder or a safetensors file in one of the layouts of docs/weights.md. It is trained
    on, unless `merge` is set."""
    merge: bool = field(default=False, kw_only=True)
    """Merge the adapter of `path` into the weights before the first step; with a rank, a new one is then trained."""


def inject(model: VideoModel, name: str, config: AdapterConfig, device: torch.device) -> None:
    """Add adapter layers to a model: A from a random stream of its own, equal on every rank, and B zero."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(int(generator("adapter", name).integers(2**62)))
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # several adapters are the point
        try:
            inject_adapter_in_model(lora_config(model, config), model.network, name)
        except ValueError as error:
            raise UserError(f"{name}.adapter cannot be put on this model: {error}") from error
        for module in model.network.modules():  # a model on the meta device creates adapters on the meta device
            if isinstance(module, LoraLayer) and name in module.lora_A:
                for layers in (module.lora_A, module.lora_B):
                    layers[name].to_empty(device=device)
                module.reset_lora_parameters(name, True)


def lora_config(model: VideoModel, config: AdapterConfig) -> LoraConfig:
    """Return peft's settings of an adapter on this model."""
    return LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha or config.rank,
        target_modules=list(config.layers or model.adapter_layers),
    )
