"""The parts that all guards share: settings of the action, the alarm, and the protocol of a guard."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

from unified_trainer.basics.ranges import Count, Range

Action = Literal["off", "warn", "stop", "roll_back"]


@dataclass(frozen=True)
class GuardConfig:
    """Settings of every guard: what the run does when the guard's rule fires."""

    action: Action = "warn"
    """Response to an alarm: a line (warn), an end of the run with a saved step (stop), or a return to the last
    checkpoint from before the alarm's window, with the student's EMA weights and a lower learning rate (roll_back)."""
    max_rollbacks: Count = 2
    """Roll-backs of the run at most; the next alarm stops it."""
    rate_factor: Annotated[float, Range(0, 1, open_low=True, open_high=True)] = 0.5
    """Factor of the student's learning rate at each roll-back."""


@dataclass(frozen=True)
class Alarm:
    """An observation of a guard that its action is meant for."""

    guard: str  # its section of the settings: guard, hacking_monitor
    action: Action
    why: str
    first: int  # first training step of the window that fired, counted from 1


class Guard(Protocol):
    """A rule over the metrics of a run, and its state between steps."""

    name: str  # its section of the settings
    suspicion: str  # what an alarm means, in words

    @property
    def config(self) -> GuardConfig:
        """Return its settings."""

    @property
    def state(self) -> dict[str, Any]:
        """Return all that its next decision depends on, as metadata of a checkpoint."""

    def load_state(self, metadata: Mapping[str, Any]) -> None:
        """Continue from the metadata of a checkpoint; what they lack is empty."""

    @property
    def window_starts(self) -> tuple[int, ...]:
        """Return the first training steps, counted from 1, of the windows that its next alarms may name."""

    @property
    def verdict(self) -> dict[str, float]:
        """Return its metric after the last step or validation, 1 for an alarm and 0 for none; empty if undecided."""

    def after_step(self, step: int, metrics: Mapping[str, float]) -> Alarm | None:
        """Add the metrics of training step `step`, counted from 1."""

    def after_validation(self, step: int, metrics: Mapping[str, float]) -> Alarm | None:
        """Add the metrics of the validation after `step` training steps, without the prefix validation/."""
