"""A role that nobody trains and that is not left alone either: a reference, or the policy that samples."""

from collections.abc import Mapping

import torch
from torch import Tensor

from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.experts import Experts
from unified_trainer.roles.role import Frozen, Trainable, TrainableConfig


class WeightCopy(Frozen):
    """A role with weights of its own that nobody trains: they are a trained role's of earlier, or their average."""

    def __init__(self, name: str, networks: Backbone | Experts, config: TrainableConfig) -> None:
        """`config` is that of the role it follows."""
        super().__init__(name, networks, config)
        self._weights = {
            f"{side}/{key}" if side else key: p
            for side in self.sides
            if not side or config.experts[side].trained
            for key, p in self._backbones[side].own_weights(self.key(name, side)).items()
        }

    @torch.no_grad()
    def update_from(self, source: Trainable, decay: float = 0.0) -> None:
        """weight <- decay weight + (1 - decay) of the source's weight; without decay a copy, bit for bit."""
        for key, weight in self._weights.items():
            weight.lerp_(source.weights[key].detach().to(weight.dtype), 1 - decay)

    def state_dict(self) -> dict[str, Tensor]:
        return {f"followed/{key}": weight.detach() for key, weight in self._weights.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Nothing is left to do: the tensors were filled in place."""
