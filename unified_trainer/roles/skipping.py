"""Skipping updates whose gradient is not finite, in place of ending the run."""

import math
from collections.abc import Mapping

from torch import nn

from unified_trainer.parallel.mesh import Mesh
from unified_trainer.roles.learner import Learner, LearnerConfig


class SkippingLearner(Learner):
    """A learner that skips an update, on all ranks, if the gradient of any rank is not finite.

    Then the gradient is dropped, and weights, moments, EMA and the number of updates, which the learning rate follows,
    stay. After `skip_not_finite` skipped updates in succession, in this process, another one raises NotFiniteError.
    """

    def __init__(
        self, name: str, weights: Mapping[str, nn.Parameter], config: LearnerConfig, mesh: Mesh | None = None
    ) -> None:
        super().__init__(name, weights, config, mesh)
        self._any = bool if mesh is None else mesh.any
        self._skipped = 0  # in succession

    def gradient_norm(self) -> float:
        """Return the gradient norm, or NaN for a gradient to skip."""
        norm = self._norm()
        if not self._any(not math.isfinite(norm)):
            return norm
        if self._skipped == self.config.skip_not_finite:
            self._refuse()
        return math.nan

    def step(self, norm: float) -> dict[str, float]:
        """Update as `Learner.step`, or skip the update if its norm is NaN; the metrics count it."""
        counted = f"{self.name}/not_finite_count"
        if math.isnan(norm):
            self._skipped += 1
            self._clear()
            return {counted: 1.0}
        self._skipped = 0
        return {**super().step(norm), counted: 0.0}
