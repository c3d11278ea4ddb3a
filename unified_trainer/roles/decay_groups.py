"""Weight decay of matrices alone: biases and the scales of norms, which are of one dimension, do not decay."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from unified_trainer.roles.optimizer import AdamW


class DecayGroups:
    """Two AdamW over one role's weights, as one: the first decays those of two and more dimensions, the other none.

    The state of a weight does not depend on its group, so that a resumed run may change `weight_decay_on`.
    """

    def __init__(
        self, weights: Mapping[str, nn.Parameter], *, kind: Callable[..., AdamW], weight_decay: float, **options: Any
    ) -> None:
        self._groups: list[tuple[dict[str, nn.Parameter], AdamW]] = []
        for decays in (True, False):
            own = {key: p for key, p in weights.items() if (p.dim() > 1) == decays}
            if own:
                self._groups.append((own, kind(own, weight_decay=weight_decay if decays else 0.0, **options)))

    def state(self) -> dict[str, Tensor]:
        """Return the state of all weights, by the names of `AdamW.state`."""
        return {key: value for _, optimizer in self._groups for key, value in optimizer.state().items()}

    @property
    def moments(self) -> list[Tensor]:
        """The moments of the weights that were updated or saved so far."""
        return [moment for _, optimizer in self._groups for moment in optimizer.moments]

    def step(self, learning_rate: float, update: int) -> None:
        """Update once the weights that have a gradient."""
        for weights, optimizer in self._groups:
            if any(p.grad is not None for p in weights.values()):
                optimizer.step(learning_rate, update)
