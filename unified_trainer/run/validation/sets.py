"""Validations of several sets of prompts: each set is measured by itself, under its name."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from unified_trainer.roles.role import Trainable
from unified_trainer.run.validation.report import ValidationResult, ValidationSource

PREFIX = "validation/"


class ValidationSets:
    """A validation of the run's prompts, and after it one of each further set.

    Guards, the best checkpoint's `best_metric` and trackers of samples see the run's own prompts as without sets. The
    metrics of a set are validation/sets/NAME/..., and its samples and videos lie in a folder NAME below the others.
    """

    def __init__(self, own: ValidationSource, sets: Mapping[str, ValidationSource]) -> None:
        self.ema, self._own, self._sets = own.ema, own, dict(sets)

    def start(self, student: Trainable, step: int) -> None:
        """Make and measure the samples of all sets."""
        for source in (self._own, *self._sets.values()):
            source.start(student, step)

    def finish(self, folder: Path, step: int) -> ValidationResult:
        """Return the result of the run's prompts with the metrics of the sets, and the first warning of them."""
        result = self._own.finish(folder, step)
        metrics, warning = dict(result.metrics), result.warning
        for name, source in self._sets.items():
            of_set = source.finish(folder / name, step)
            metrics |= {f"{PREFIX}sets/{name}/{key.removeprefix(PREFIX)}": v for key, v in of_set.metrics.items()}
            warning = warning or of_set.warning
        return replace(result, metrics=metrics, warning=warning)
