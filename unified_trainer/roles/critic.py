"""The critic: follows the student's samples, and may learn to tell them from real ones."""

from jaxtyping import Float
from torch import Tensor, nn

from unified_trainer.parallel.fsdp import exchange_gradients, shard
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.experts import Experts, Rows, Side, ask
from unified_trainer.roles.role import Trainable, TrainableConfig
from unified_trainer.types import Condition, Latents, PerSample


class Critic(Trainable):
    """A trainable velocity field with a discriminator: one linear layer on the features of its middle block.

    Each of two experts has a discriminator of its own, on its own features.
    """

    def __init__(self, name: str, networks: Backbone | Experts, config: TrainableConfig) -> None:
        backbones = {"high": networks.high, "low": networks.low} if isinstance(networks, Experts) else {"": networks}
        self._discriminators: dict[Side, nn.Linear] = {side: _discriminator(one) for side, one in backbones.items()}
        super().__init__(name, networks, config)

    def _own_weights(self, side: Side) -> dict[str, nn.Parameter]:
        head = {f"discriminator.{key}": p for key, p in self._discriminators[side].named_parameters()}
        return super()._own_weights(side) | head

    def _exchange_gradients(self, side: Side, *, last: bool) -> None:
        exchange_gradients(self._discriminators[side], last=last, mesh=self._mesh)
        super()._exchange_gradients(side, last=last)

    def velocity_and_logits(
        self, x_t: Latents, sigma: PerSample, cond: Condition
    ) -> tuple[Latents, Float[Tensor, " b"]]:
        """The velocity and, from the same pass, how real each noisy sample looks (above 0: real)."""

        def of(side: Side, rows: Rows) -> tuple[Latents, Float[Tensor, " m"]]:
            with self.running(side) as model, model.features() as seen:
                velocity = model.velocity(x_t[rows], sigma[rows], cond.map(lambda x: x[rows]))
            return velocity, self._discriminators[side](seen[-1].float().mean(1))[:, 0]

        velocity, logits = ask(self._shares(sigma), of)
        return velocity, logits


def _discriminator(backbone: Backbone) -> nn.Linear:
    """Zero at its start, with nothing to say."""
    linear = nn.Linear(backbone.model.feature_size, 1, device=backbone.mesh.device)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    shard(linear, nn.ModuleList(), backbone.mesh)
    return linear
