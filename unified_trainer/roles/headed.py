"""A trained role with a head: one linear layer on the features of its network's middle block."""

from typing import ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from unified_trainer.basics.types import Condition, Latents, PerSample
from unified_trainer.models.base import VideoModel
from unified_trainer.parallel.fsdp import exchange_gradients, shard
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.experts import Expert, ExpertPair, Pick, by_expert, route
from unified_trainer.roles.role import Trainable, TrainableConfig


class Headed(Trainable):
    """A trainable velocity field with one more output per sample, trained with it.

    Each of two experts has a head of its own, on its own features.
    """

    head: ClassVar[str]  # name of the linear layer in checkpoints

    def __init__(self, name: str, networks: Backbone | ExpertPair, config: TrainableConfig) -> None:
        self._heads: dict[Expert, nn.Linear] = {
            expert: _zero_linear(network) for expert, network in by_expert(networks).items()
        }
        super().__init__(name, networks, config)

    @classmethod
    def head_shapes(cls, model: VideoModel) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the head's weights on a model, by their names in checkpoints."""
        return {f"{cls.head}.weight": (1, model.feature_size), f"{cls.head}.bias": (1,)}

    def _own_weights(self, expert: Expert) -> dict[str, nn.Parameter]:
        head = {f"{self.head}.{key}": p for key, p in self._heads[expert].named_parameters()}
        return super()._own_weights(expert) | head

    def _exchange_gradients(self, expert: Expert, *, last: bool) -> None:
        exchange_gradients(self._heads[expert], last=last, mesh=self._mesh)
        super()._exchange_gradients(expert, last=last)

    def velocity_and_head(self, x_t: Latents, sigma: PerSample, cond: Condition) -> tuple[Latents, Float[Tensor, " b"]]:
        """Return the velocity and, from the same pass, the output of the head for each sample."""

        def call(expert: Expert, pick: Pick) -> tuple[Latents, Float[Tensor, " m"]]:
            with self.running(expert) as model, model.features() as seen:
                velocity = model.velocity(pick(x_t), pick(sigma), cond.map(pick))
            return velocity, self._head(expert, seen[-1])

        velocity, output = route(self._row_masks(sigma), call)
        return velocity, output

    def head_alone(self, x_t: Latents, sigma: PerSample, cond: Condition) -> Float[Tensor, " b"]:
        """Return the output of the head for each sample, from a pass that ends at the features."""

        def call(expert: Expert, pick: Pick) -> tuple[Float[Tensor, " m"]]:
            with self.running(expert):
                features = self.backbones[expert].features(pick(x_t), pick(sigma), cond.map(pick))
            return (self._head(expert, features),)

        (output,) = route(self._row_masks(sigma), call)
        return output

    def _head(self, expert: Expert, features: Float[Tensor, "m n d"]) -> Float[Tensor, " m"]:
        return self._heads[expert](features.float().mean(1))[:, 0]


def _zero_linear(backbone: Backbone) -> nn.Linear:
    """A linear layer that starts at zero, so that its output is 0 for every sample."""
    linear = nn.Linear(backbone.model.feature_size, 1, device=backbone.mesh.device)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    shard(linear, (), backbone.mesh)
    return linear
