"""A run whose updates change nothing says so once; one that trains says nothing."""

import pytest
import torch

from unified_trainer.roles.role import Trainable
from unified_trainer.run.guards.unmoved import STEPS, UnmovedWeights


class Moving(Trainable):
    """A role of two weights, of which an update moves one value by `by`."""

    weights, updates = {}, 0

    def __init__(self, by: float) -> None:
        self.weights, self.updates, self._by = {"a": torch.zeros(3), "b": torch.zeros(200, 5)}, 0, by

    def update(self) -> None:
        self.weights["b"][0, 0] += self._by
        self.updates += 1


def warnings(roles: dict, steps: int, every: int = 1) -> dict[int, str]:
    """Train, the student each `every` steps, and return the warnings by step."""
    unmoved, found = UnmovedWeights(roles, 0, steps), {}
    for step in range(1, steps + 1):
        for name, role in roles.items():
            if name != "student" or step % every == 0:
                role.update()
        if said := unmoved.warning(step):
            found[step] = said
    return found


@pytest.mark.parametrize("every", [1, 5, STEPS, 3 * STEPS, 1000])
def test_weights_that_move_are_no_warning(every):
    """Nor is a student that waits for its critic, however long."""
    assert warnings({"student": Moving(1e-6), "critic": Moving(1.0)}, 4 * STEPS, every) == {}


@pytest.mark.parametrize("steps", [1, STEPS, 3 * STEPS])
def test_a_role_whose_updates_change_nothing_is_named_once(steps):
    found = warnings({"student": Moving(0.0), "critic": Moving(1.0)}, steps)
    first = min(steps, STEPS)
    assert list(found) == [first]
    assert (
        f"training steps 1 to {first} changed no weight of student ({first} updates): look at learning_rate"
        in (found[first])
    )


def test_a_run_without_updates_is_named():
    found = warnings({"student": Moving(1.0)}, 5, every=1000)
    assert list(found) == [5] and "changed no weight of student (0 updates): samples without an advantage" in found[5]
