"""A role that keeps a copy of a trained role's weights: the reference of a KL, or the old policy that samples."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.types import Condition, Latents, PerSample
from unified_trainer.parallel.fsdp import to_local
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.experts import ExpertPair
from unified_trainer.roles.role import Frozen, Trainable, TrainableConfig


class WeightCopy(Frozen):
    """A role that is not trained and whose weights are a trained role's at an earlier step, or their EMA."""

    def __init__(self, name: str, networks: Backbone | ExpertPair, config: TrainableConfig) -> None:
        """Take the settings of the role it copies."""
        super().__init__(name, networks, config)
        self._weights = {
            f"{expert}/{key}" if expert else key: p
            for expert in self.experts
            if not expert or config.experts[expert].trained
            for key, p in self._backbones[expert].own_weights(self.key(name, expert)).items()
        }

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The copied weights, by the names that the trained role gives them."""
        return self._weights

    @torch.no_grad()
    def update_from(self, source: Trainable, decay: float = 0.0) -> None:
        """Set weight <- decay weight + (1 - decay) source weight; with decay 0 the copy is exact.

        Every weight is looked up once, and all of this rank's parts are averaged together.
        """
        weights, own = source.weights, self._weights
        parts = [to_local(weight) for weight in own.values()]
        others = [to_local(weights[key].detach()).to(part.dtype) for key, part in zip(own, parts, strict=True)]
        torch._foreach_lerp_(parts, others, 1 - decay)

    def state_dict(self) -> dict[str, Tensor]:
        return {f"copied/{key}": weight.detach() for key, weight in self._weights.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Do nothing: the tensors of `state_dict` were filled in place."""


class BranchedCopy(WeightCopy):
    """A copy on two halves of the ranks: one computes conditional velocities of all samples, one unconditional ones."""

    def branches(
        self, x_t: Latents, sigma: PerSample, cond: Condition, uncond: Condition
    ) -> Float[Tensor, "both c t h w"]:
        return self._mesh.gather(self.velocity(x_t, sigma, (cond, uncond)[self._mesh.data_rank]))
