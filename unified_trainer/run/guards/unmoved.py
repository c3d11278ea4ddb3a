"""A look at whether training moves the trained weights, for a run whose settings let it train nothing."""

from collections.abc import Mapping

import torch
from torch import Tensor

from unified_trainer.parallel.fsdp import to_local
from unified_trainer.roles.role import Trainable

STEPS = 10  # training steps between two looks
VALUES = 64  # of each weight that are compared, evenly spaced in this rank's shard


class UnmovedWeights:
    """Compares some values of every trained weight with those of ten training steps before; no collective."""

    def __init__(self, roles: Mapping[str, Trainable], start: int, last: int) -> None:
        """`start` training steps of `last` are done."""
        self._roles, self._since, self._last, self._warned = roles, start, last, False
        self._before = self._look()

    def warning(self, step: int) -> str:
        """Return a warning if updates move no weight of a role, or if no role has one; "" otherwise, and once warned.

        `step` training steps are done.
        """
        if self._warned or not (step - self._since >= STEPS or step == self._last):
            return ""
        since, before = self._since, self._before
        self._since, self._before = step, self._look()
        still = [name for name, (values, _) in self._before.items() if torch.equal(before[name][0], values)]
        updates = {name: self._before[name][1] - before[name][1] for name in still}
        if not any(updates.values()) and len(still) < len(before):
            return ""
        self._warned = True
        why = "samples without an advantage and losses of 0 make none (see skipped_updates and not_finite_count)"
        if any(self._roles[name].trains_one_of_two for name in still):
            why += ", and so do noise levels of an expert that is not trained"
        if any(updates.values()):
            why = "look at learning_rate, max_grad_norm and precision"
        listed = ", ".join(f"{name} ({count} updates)" for name, count in updates.items())
        return f"warning: training steps {since + 1} to {step} changed no weight of {listed}: {why}"

    def _look(self) -> dict[str, tuple[Tensor, int]]:
        """Return some values of each role, and its number of updates."""
        return {
            name: (torch.cat([_some(weight) for weight in role.weights.values()]), role.updates)
            for name, role in self._roles.items()
        }


def _some(weight: Tensor) -> Tensor:
    values = to_local(weight.detach()).flatten()
    return values[:: max(1, len(values) // VALUES)][:VALUES].clone()
