"""When a step is saved besides the last one: every so many steps, and also every so many minutes."""

import time
from collections.abc import Callable

from unified_trainer.parallel.mesh import Mesh

Due = Callable[[int], bool]  # training steps done -> whether the present one is saved; all ranks ask after every step


def due(steps: int, minutes: float, mesh: Mesh) -> Due:
    """Return when checkpoints are due; 0 steps or -1 are never, and with 0 minutes no clock is read."""

    def by_steps(step: int) -> bool:
        return steps > 0 and step % steps == 0

    return ByMinutes(by_steps, minutes, mesh) if minutes else by_steps


class ByMinutes:
    """Due as another rule says, and when so many minutes have passed since the last checkpoint on the main rank."""

    def __init__(self, rule: Due, minutes: float, mesh: Mesh, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._rule, self._seconds, self._mesh, self._clock = rule, 60 * minutes, mesh, clock
        self._last = clock()

    def __call__(self, step: int) -> bool:
        """Return whether the step is saved; the ranks agree (a collective)."""
        late = self._mesh.is_main and self._clock() - self._last >= self._seconds
        is_due = self._mesh.any(late) or self._rule(step)
        if is_due:
            self._last = self._clock()
        return is_due


def at_risk(steps: int, minutes: float) -> str:
    """Return in words how much work a failure may cost."""
    most = f"{steps} steps or {minutes:g} minutes, whichever is less" if steps else f"{minutes:g} minutes"
    return f"a failure costs at most {most}, and the step under way"
