"""How an adapter is put on a network. peft takes seconds to import: import this module where it is used."""

import warnings

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear, LoraLayer
from torch import Tensor, nn

from unified_trainer.basics.errors import UserError
from unified_trainer.models.aware_linear import AwareLinear
from unified_trainer.models.base import VideoModel
from unified_trainer.parallel.random import generator
from unified_trainer.roles.adapter import AdapterConfig


def inject(model: VideoModel, name: str, config: AdapterConfig, device: torch.device) -> None:
    """Add adapter layers to a model: A from a random stream of its own, equal on every rank, and B zero."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(int(generator("adapter", name).integers(2**62)))
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # several adapters are the point
        try:
            inject_adapter_in_model(lora_config(model, config), model.network, name)
        except ValueError as error:
            raise UserError(f"{name}.adapter cannot be put on this model: {error}") from error
        for module in layers_of(model.network):  # a model on the meta device creates adapters on the meta device
            if name in module.lora_A:
                for layers in (module.lora_A, module.lora_B):
                    layers[name].to_empty(device=device)
                module.reset_lora_parameters(name, True)


def lora_config(model: VideoModel, config: AdapterConfig) -> LoraConfig:
    """Return peft's settings of an adapter on this model."""
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha or config.rank,
        target_modules=list(config.layers or model.adapter_layers),
    )
    # Without a class for all, peft would import other packages, such as torchao, to ask them for theirs.
    settings._register_custom_module({AwareLinear: _AwareAdapted, nn.Linear: Linear})
    return settings


class _AwareAdapted(Linear):
    """An adapter on a layer that rounds: the sum of weight and adapter is rounded, as in an export."""

    def forward(self, x: Tensor) -> Tensor:
        base = self.get_base_layer()
        with torch.autocast(x.device.type, enabled=False):
            changes = [self.get_delta_weight(name) for name in self.active_adapters if name in self.lora_A]
            weight = sum(changes, base.weight.float())
        return base.rounded(x, weight)


def layers_of(network: nn.Module) -> list[LoraLayer]:
    """Return the layers of a network that have adapters."""
    return [module for module in network.modules() if isinstance(module, LoraLayer)]
