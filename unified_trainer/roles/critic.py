"""The critic: follows the student's samples, and may learn to tell them from real ones."""

from jaxtyping import Float
from torch import Tensor, nn

from unified_trainer.parallel.fsdp import exchange_gradients, shard
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.role import Trainable, TrainableConfig
from unified_trainer.types import Condition, Latents, PerSample


class Critic(Trainable):
    """A trainable velocity field with a discriminator: one linear layer on the features of its middle block."""

    def __init__(self, name: str, backbone: Backbone, config: TrainableConfig) -> None:
        self._discriminator = nn.Linear(backbone.model.feature_size, 1, device=backbone.mesh.device)
        nn.init.zeros_(self._discriminator.weight)
        nn.init.zeros_(self._discriminator.bias)
        shard(self._discriminator, nn.ModuleList(), backbone.mesh)
        super().__init__(name, backbone, config)

    def _own_weights(self) -> dict[str, nn.Parameter]:
        head = {f"discriminator.{key}": p for key, p in self._discriminator.named_parameters()}
        return super()._own_weights() | head

    def backward(self, loss: Tensor, *, last: bool) -> None:
        exchange_gradients(self._discriminator, last=last, mesh=self._backbone.mesh)
        super().backward(loss, last=last)

    def velocity_and_logits(
        self, x_t: Latents, sigma: PerSample, cond: Condition
    ) -> tuple[Latents, Float[Tensor, " b"]]:
        """The velocity and, from the same pass, how real each noisy sample looks (above 0: real)."""
        with self.running() as model, model.features() as seen:
            velocity = model.velocity(x_t, sigma, cond)
        return velocity, self._discriminator(seen[-1].float().mean(1))[:, 0]
