"""The critic: learns the score of the student's samples, and may learn to tell them from real clips."""

from jaxtyping import Float
from torch import Tensor, nn

from unified_trainer.parallel.fsdp import exchange_gradients, shard
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.experts import Expert, ExpertPair, Rows, by_expert, route
from unified_trainer.roles.role import Trainable, TrainableConfig
from unified_trainer.types import Condition, Latents, PerSample


class Critic(Trainable):
    """A trainable velocity field with a discriminator: one linear layer on the features of its middle block.

    Each of two experts has a discriminator of its own, on its own features.
    """

    def __init__(self, name: str, networks: Backbone | ExpertPair, config: TrainableConfig) -> None:
        self._discriminators: dict[Expert, nn.Linear] = {
            expert: _discriminator(network) for expert, network in by_expert(networks).items()
        }
        super().__init__(name, networks, config)

    def _own_weights(self, expert: Expert) -> dict[str, nn.Parameter]:
        head = {f"discriminator.{key}": p for key, p in self._discriminators[expert].named_parameters()}
        return super()._own_weights(expert) | head

    def _exchange_gradients(self, expert: Expert, *, last: bool) -> None:
        exchange_gradients(self._discriminators[expert], last=last, mesh=self._mesh)
        super()._exchange_gradients(expert, last=last)

    def velocity_and_logits(
        self, x_t: Latents, sigma: PerSample, cond: Condition
    ) -> tuple[Latents, Float[Tensor, " b"]]:
        """Return the velocity and, from the same pass, the logit that each noisy sample is real."""

        def call(expert: Expert, rows: Rows) -> tuple[Latents, Float[Tensor, " m"]]:
            with self.running(expert) as model, model.features() as seen:
                velocity = model.velocity(x_t[rows], sigma[rows], cond.map(lambda x: x[rows]))
            return velocity, self._discriminators[expert](seen[-1].float().mean(1))[:, 0]

        velocity, logits = route(self._row_masks(sigma), call)
        return velocity, logits


def _discriminator(backbone: Backbone) -> nn.Linear:
    """A linear layer that starts at zero, so that it gives every sample the logit 0."""
    linear = nn.Linear(backbone.model.feature_size, 1, device=backbone.mesh.device)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    shard(linear, (), backbone.mesh)
    return linear
