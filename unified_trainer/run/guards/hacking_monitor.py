"""Detection of reward hacking: the reward rises while held-out metrics fall or the samples change.

How samples change is known exactly in the tiny world, by their distances from its law, and elsewhere by statistics of
their pixels.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unified_trainer.basics.ranges import Decay, Positive
from unified_trainer.data import tiny_world_measures
from unified_trainer.data.tiny_world_measures import DISTANCES
from unified_trainer.run.guards.base import Alarm, GuardConfig

DIVERSITY = "pixels/diversity"
IN_TRAINING = f"train/{DIVERSITY}"


@dataclass(frozen=True)
class HackingMonitorConfig(GuardConfig):
    rise: Positive = 0.3
    """Rise of the reward since the first validation from which other metrics are compared, in std of samples."""
    fall: Positive = 0.3
    """Fall of the accuracy or a held-out scorer that counts as hacking, in std of samples."""
    drift: Positive = 1.5
    """Change of a pixel statistic, up or down, that counts as hacking, in std of samples; not in the tiny world."""
    departure: Positive = 0.3
    """Rise of a distance from the law of the tiny world that counts as hacking, in its unit: std of real clips."""
    collapse: Decay = 0.5
    """Fraction of the first diversity within groups; diversity below it counts as hacking."""


class HackingMonitor:
    """Compares every validation with the first one of the run; `state` belongs into the checkpoints."""

    name = "hacking_monitor"
    suspicion = "reward hacking"

    def __init__(self, config: HackingMonitorConfig, held_out: tuple[str, ...]) -> None:
        """`held_out` names the validation metrics that must not fall; metrics that are not measured are ignored."""
        self.config, self._held_out = config, held_out
        self.reference: dict[str, float] = {}  # the first value of every metric that is compared
        self._diversity: list[float] = []  # of the training steps since the last validation
        self._silent_at = 0  # the last validation without signs of hacking
        self.verdict: dict[str, float] = {}

    @property
    def state(self) -> dict[str, Any]:
        """All that the next decision depends on, as metadata of a checkpoint."""
        return {
            "hacking_monitor": dict(self.reference),
            "hacking_monitor_recent": list(self._diversity),
            "hacking_monitor_silent_at": self._silent_at,
        }

    def load_state(self, metadata: Mapping[str, Any]) -> None:
        """Continue from the metadata of a checkpoint; those of earlier versions lack a part, which is then empty."""
        self.reference = dict(metadata.get("hacking_monitor", {}))
        self._diversity = list(metadata.get("hacking_monitor_recent", []))
        self._silent_at = metadata.get("hacking_monitor_silent_at", 0)

    @property
    def on(self) -> bool:
        """Whether hacking is reported."""
        return self.config.action != "off"

    @property
    def window_starts(self) -> tuple[int, ...]:
        return (self._silent_at + 1,)

    def after_step(self, step: int, metrics: Mapping[str, float]) -> Alarm | None:
        """Add the metrics of a training step; only a validation is an alarm."""
        self.note(metrics)
        self.verdict = {}
        return None

    def after_validation(self, step: int, metrics: Mapping[str, float]) -> Alarm | None:
        """Return what `watch` finds; the window of an alarm begins after the last validation without signs."""
        why = self.watch(metrics)
        self.verdict = {"reward_hacking": float(why is not None)} if self.on else {}
        if why is None:
            self._silent_at = step
            return None
        return Alarm(self.name, self.config.action, why, self._silent_at + 1)

    def note(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a training step."""
        if DIVERSITY in metrics:
            self.reference.setdefault(IN_TRAINING, metrics[DIVERSITY])
            self._diversity.append(metrics[DIVERSITY])

    def watch(self, metrics: Mapping[str, float]) -> str | None:
        """Add the metrics of a validation and return a description of the hacking they show, or None.

        A change is Cohen's d: the difference of the means, now and in the first validation, over the pooled standard
        deviation of samples. If the reward rose by `rise` or more, these count: a held-out metric fell by `fall`; a
        pixel statistic changed by `drift`, or in the tiny world, in place of these, a distance from its law rose by
        `departure`; the diversity within groups, in validation or in the training steps since the last one, is below
        `collapse` times its first value.
        """
        seen = dict(metrics)
        if self._diversity:
            seen[IN_TRAINING] = sum(self._diversity) / len(self._diversity)
        self._diversity = []
        for name in ("reward", *self._held_out, *(name for name in seen if name.startswith(("pixels/", "world/")))):
            for key in (name, f"{name}_std"):
                if key in seen:
                    self.reference.setdefault(key, seen[key])
        if not self.on or not self._moved("reward", seen) >= self.config.rise:
            return None
        world = [name for name in DISTANCES if name in seen]
        pixels = [name for name in sorted(seen) if name.startswith("pixels/") and f"{name}_std" in seen and not world]
        signs = {
            "fell": [name for name in self._held_out if name in seen and self._moved(name, seen) <= -self.config.fall],
            "changed": [name for name in pixels if abs(self._moved(name, seen)) >= self.config.drift],
            "rose": [name for name in world if seen[name] - self.reference[name] >= self.config.departure],
        }
        changes = [self._change(name, seen, verb) for verb, names in signs.items() for name in names]
        for name in (tiny_world_measures.DIVERSITY if world else DIVERSITY, IN_TRAINING):
            if name in seen and seen[name] < self.config.collapse * self.reference[name]:
                changes.append(self._change(name, seen, "fell"))
        return f"{self._change('reward', seen, 'rose')} while {', '.join(changes)}" if changes else None

    def _moved(self, name: str, seen: Mapping[str, float]) -> float:
        """Return Cohen's d of a metric against its first value; infinite if there is no spread."""
        change = seen[name] - self.reference[name]
        std = math.sqrt((seen[f"{name}_std"] ** 2 + self.reference[f"{name}_std"] ** 2) / 2)
        if std == 0:
            return math.copysign(math.inf, change) if change else 0.0
        return change / std

    def _change(self, name: str, seen: Mapping[str, float], verb: str) -> str:
        by = f" ({self._moved(name, seen):+.1f} std)" if f"{name}_std" in seen else ""
        return f"{name} {verb} {self.reference[name]:.3g} -> {seen[name]:.3g}{by}"
