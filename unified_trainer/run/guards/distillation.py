"""The guard of distillation: its rule over the critic's error, sample power, and the looks of student and teacher.

A student that is moved by a critic which does not know it is destroyed while its loss falls (docs/methods/dmd2.md). In
the tiny world the looks are its exact measures, which the hacking monitor reads too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Count, Positive, at_least
from unified_trainer.data.tiny_world_measures import DISTANCES
from unified_trainer.run.guards.base import Alarm, GuardConfig

ERROR, POWER = "critic_to_teacher_error", "sample_power"  # metrics of training
LOOKS = ("power", "saturation", "motion", "diversity")  # of the samples: the student's value over the teacher's
Bounds = tuple[Positive, Positive]
Window = Sequence[tuple[int, float]]  # training step and value


@dataclass(frozen=True)
class DistillationGuardConfig(GuardConfig):
    window: Annotated[int, at_least(2, 1000)] = 8
    """Student updates whose mean critic_to_teacher_error is compared; sample_power is averaged over their steps."""
    critic_error: Positive = 1.0
    """Mean of critic_to_teacher_error above which the critic knows the student's samples worse than the teacher."""
    power: Bounds = (0.33, 3.0)
    """Range of the mean sample_power over that of the run's first window, and of the student's over the teacher's."""
    saturation: Bounds = (0.5, 2.0)
    """Range of the saturation of the student's samples over that of the teacher's."""
    motion: Bounds = (0.5, 2.0)
    """Range of the motion energy of the student's samples over that of the teacher's."""
    diversity: Bounds = (0.5, 3.0)
    """Range of the diversity of the student's samples of one prompt over that of the teacher's.

    In the tiny world it is world/diversity, else that of pixels.

    A healthy causal student that does not follow its prompts yet has been measured at more than twice its teacher's.
    """
    departure: Positive = 1.0
    """Largest excess of a distance of the student's samples from the law of the tiny world over the teacher's, in std
    of real clips; it is in place of saturation and motion."""
    teacher_prompts: Count = 4
    """Prompts, the first of validation, whose samples are compared with the teacher's at every validation."""
    samples_per_prompt: Annotated[int, at_least(2, 1000)] = 2
    """Samples of each of them."""
    teacher_steps: Annotated[int, at_least(1, 1000)] = 20
    """Network calls of each of the teacher's samples, which are made once; they have the guidance of training."""

    def check(self) -> None:
        """Raise UserError, naming the key, for a range that is empty or that a student like the teacher leaves."""
        for name in LOOKS:
            low, high = self.bounds(name)
            if not low < 1 < high:
                raise UserError(f"guard.{name} must be a range around 1, the teacher's own value, not {low:g} {high:g}")

    def bounds(self, name: str) -> Bounds:
        """Return the range of one of LOOKS, a ratio, or of DISTANCES, a difference."""
        if name in DISTANCES:
            return -math.inf, self.departure
        return {
            "power": self.power,
            "saturation": self.saturation,
            "motion": self.motion,
            "diversity": self.diversity,
        }[name]


class DistillationGuard:
    """Compares means of training metrics with limits, and every validation's samples with the teacher's."""

    name = "guard"
    suspicion = "collapse"

    def __init__(self, config: DistillationGuardConfig) -> None:
        self.config = config
        self._errors: list[tuple[int, float]] = []  # of the last `window` student updates
        self._powers: list[tuple[int, float]] = []  # from the step of the first of them on
        self._first_power: float | None = None  # mean of the first full window
        self._first_looks: dict[str, float] = {}  # of the first validation
        self._silent_at = 0  # the last validation whose samples were like the teacher's
        self._outside = False  # whether the last window was outside, so that it is said once
        self.verdict: dict[str, float] = {}

    @property
    def state(self) -> dict[str, Any]:
        return {
            "guard": {
                "errors": [list(row) for row in self._errors],
                "powers": [list(row) for row in self._powers],
                "first_power": self._first_power,
                "first_looks": dict(self._first_looks),
                "silent_at": self._silent_at,
                "told": self._outside,
            }
        }

    def load_state(self, metadata: Mapping[str, Any]) -> None:
        held = metadata.get("guard", {})
        self._errors = [(step, value) for step, value in held.get("errors", [])]
        self._powers = [(step, value) for step, value in held.get("powers", [])]
        self._first_power = held.get("first_power")
        self._first_looks = dict(held.get("first_looks", {}))
        self._silent_at = held.get("silent_at", 0)
        self._outside = held.get("told", False)

    @property
    def window_starts(self) -> tuple[int, ...]:
        return (self._silent_at + 1, *(step for step, _ in self._errors[:1]))

    def after_step(self, step: int, metrics: Mapping[str, float]) -> Alarm | None:
        """Add the metrics of a training step; a full window that leaves a limit is an alarm.

        The mean of the last `window` values of critic_to_teacher_error must not be above `critic_error`, and the mean
        of sample_power over the same steps must stay in the range `power` around that of the first such window. With
        the action warn, the alarm comes once, and again after a window without one.
        """
        self.verdict = {}
        if POWER in metrics:
            self._powers.append((step, metrics[POWER]))
        if ERROR not in metrics:
            return None
        self._errors = [*self._errors, (step, metrics[ERROR])][-self.config.window :]
        if len(self._errors) < self.config.window:
            return None
        first = self._errors[0][0]
        self._powers = [row for row in self._powers if row[0] >= first]
        why = ", ".join(filter(None, (self._critic_fault(), self._power_fault())))
        told, self._outside, self.verdict = self._outside, bool(why), {"guard_alarm": float(bool(why))}
        if not why or (told and self.config.action == "warn"):
            return None
        return Alarm(self.name, self.config.action, why, first)

    def after_validation(self, step: int, metrics: Mapping[str, float]) -> Alarm | None:
        """Compare the samples of a validation with the teacher's: metrics power_to_teacher and so on.

        A ratio, or a difference of DISTANCES, is outside if it leaves its range. A student that starts outside, as one
        of few steps may, must not go further: the first validation widens the range. The window of an alarm begins
        after the last silent validation.
        """
        seen = {name: metrics[f"{name}_to_teacher"] for name in (*LOOKS, *DISTANCES) if f"{name}_to_teacher" in metrics}
        for name, value in seen.items():
            self._first_looks.setdefault(name, value)
        faults = [words for name, value in seen.items() if (words := self._look_fault(name, value))]
        self.verdict = {"guard_alarm": float(bool(faults))} if seen else {}
        if not faults:
            self._silent_at = step
            return None
        return Alarm(self.name, self.config.action, ", ".join(faults), self._silent_at + 1)

    def _critic_fault(self) -> str:
        error, limit = _mean(self._errors), self.config.critic_error
        if error <= limit:
            return ""
        return f"{ERROR} {error:.4g} on average over {len(self._errors)} student updates, above {limit:g}"

    def _power_fault(self) -> str:
        if not self._powers:
            return ""
        power, (low, high) = _mean(self._powers), self.config.power
        if self._first_power is None:
            self._first_power = power
        if low * self._first_power <= power <= high * self._first_power:
            return ""
        return f"{POWER} {self._first_power:.3g} -> {power:.3g}, outside {low:g} to {high:g} times its first mean"

    def _look_fault(self, name: str, value: float) -> str:
        first = self._first_looks[name]
        low, high = self.config.bounds(name)
        if min(low, first) <= value <= max(high, first):
            return ""
        if name in DISTANCES:
            return f"{name} of the samples {value:+.3g} from the teacher's, {first:+.3g} at first, at most {high:g}"
        return f"{name} of the samples {value:.3g} times the teacher's, {first:.3g} at first, range {low:g} to {high:g}"


def _mean(rows: Window) -> float:
    return math.fsum(value for _, value in rows) / len(rows)
