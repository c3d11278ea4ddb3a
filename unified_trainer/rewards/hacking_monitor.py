"""Detection of reward hacking: the reward rises while held-out scorers fall."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

DIVERSITY = "pixels/diversity"
IN_TRAINING = f"train/{DIVERSITY}"


@dataclass(frozen=True)
class HackingMonitorConfig:
    action: Literal["off", "warn", "stop"] = "warn"  # when the reward looks hacked; stop saves and exits with code 3
    rise: float = 0.3  # standard deviations that the reward must have risen since the first validation, and meanwhile
    fall: float = 0.3  # standard deviations from which on it counts that the judge or a held-out scorer fell
    drift: float = 1.5  # standard deviations from which on it counts that a statistic of the pixels moved, either way
    collapse: float = 0.5  # share of the first diversity within groups below which samples count as alike

    def check(self) -> None:
        """Raise ValueError, naming the key, for what cannot be."""
        if min(self.rise, self.fall, self.drift) <= 0 or not 0 <= self.collapse < 1:
            raise ValueError(
                "hacking_monitor.rise, hacking_monitor.fall and hacking_monitor.drift must be above 0 and hacking_monitor.collapse in [0, 1)"
            )


class HackingMonitor:
    """Compares every validation with the run's first; its reference goes into the checkpoints."""

    def __init__(self, config: HackingMonitorConfig, held_out: tuple[str, ...]) -> None:
        """`held_out` are the validation metrics that must not fall, as far as they are measured."""
        config.check()
        self.config, self._held_out = config, held_out
        self.reference: dict[str, float] = {}  # the first value of everything watched
        self._lately: list[float] = []  # diversity in training since the last validation

    @property
    def on(self) -> bool:
        return self.config.action != "off"

    @property
    def stops(self) -> bool:
        return self.config.action == "stop"

    def note(self, metrics: Mapping[str, float]) -> None:
        """A training step's metrics."""
        if DIVERSITY in metrics:
            self.reference.setdefault(IN_TRAINING, metrics[DIVERSITY])
            self._lately.append(metrics[DIVERSITY])

    def watch(self, metrics: Mapping[str, float]) -> str | None:
        """A validation's metrics: what speaks for a hacked reward, in words, or None."""
        seen = dict(metrics)
        if self._lately:
            seen[IN_TRAINING] = sum(self._lately) / len(self._lately)
        self._lately = []
        for name in ("reward", *self._held_out, *(name for name in seen if name.startswith("pixels/"))):
            for key in (name, f"{name}_std"):
                if key in seen:
                    self.reference.setdefault(key, seen[key])
        if not self.on or not self._moved("reward", seen) >= self.config.rise:
            return None
        found = [self._words(name, seen, "fell") for name in self._held_out if self._fell(name, seen)]
        found += [self._words(name, seen, "went") for name in sorted(seen) if self._drifted(name, seen)]
        found += [self._words(name, seen, "fell") for name in (DIVERSITY, IN_TRAINING) if self._collapsed(name, seen)]
        return f"{self._words('reward', seen, 'rose')} while {', '.join(found)}" if found else None

    def _fell(self, name: str, seen: Mapping[str, float]) -> bool:
        return name in seen and self._moved(name, seen) <= -self.config.fall

    def _drifted(self, name: str, seen: Mapping[str, float]) -> bool:
        measured = name.startswith("pixels/") and f"{name}_std" in seen
        return measured and abs(self._moved(name, seen)) >= self.config.drift

    def _collapsed(self, name: str, seen: Mapping[str, float]) -> bool:
        return name in seen and seen[name] < self.config.collapse * self.reference[name]

    def _moved(self, name: str, seen: Mapping[str, float]) -> float:
        """Cohen's d: the change of the mean over the pooled standard deviation of samples, then and now."""
        change = seen[name] - self.reference[name]
        std = math.sqrt((seen[f"{name}_std"] ** 2 + self.reference[f"{name}_std"] ** 2) / 2)
        if std == 0:
            return math.copysign(math.inf, change) if change else 0.0
        return change / std

    def _words(self, name: str, seen: Mapping[str, float], verb: str) -> str:
        by = f" ({self._moved(name, seen):+.1f} std)" if f"{name}_std" in seen else ""
        return f"{name} {verb} {self.reference[name]:.3g} -> {seen[name]:.3g}{by}"
