"""dance_grpo on samples of older weights, in one process: a method of its own file, for scripts/compare.py.

    python -m unified_trainer --method scripts/lagged.py:LaggedDanceGRPO --recipe scripts/two_steps.yaml \\
        --algorithm.ahead 3 --algorithm.correction decoupled

Samples of training step k come from the weights after max(0, k - ahead) steps: these are the numbers that workers give
which make samples that far ahead. The older weights are in no checkpoint: a resumed run starts with a lag of 0.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from unified_trainer.basics.ranges import at_least
from unified_trainer.basics.types import Batch
from unified_trainer.methods.dance_grpo import DanceGRPO, DanceGRPOConfig
from unified_trainer.methods.rl.rollouts import Check, Rollouts, ScoredSamples
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.role import Trainable
from unified_trainer.sampling.solver import SamplerConfig


@dataclass(frozen=True)
class LaggedConfig(DanceGRPOConfig):
    ahead: Annotated[int, at_least(0, 1000)] = 0
    """Training steps that samples are made ahead of the weights that they train."""


class LaggedRollouts:
    """Makes the samples of training step k with the weights after max(0, k - ahead) steps."""

    uniform = True
    check: Check | None = None

    def __init__(self, rollouts: Rollouts, student: Trainable, ahead: int) -> None:
        self.ahead = ahead
        self._rollouts, self._student = rollouts, student
        self._weights: dict[int, dict[str, Tensor]] = {}  # by the number of training steps behind them
        self._newest = 0  # version of the newest weights that made samples

    def samples(self, batch: Batch, step: int, rng: Streams) -> ScoredSamples:
        if step not in self._weights:
            self._weights[step] = {key: weight.detach().clone() for key, weight in self._student.weights.items()}
        self._newest = max(self._newest, step - self.ahead, min(self._weights))
        self._weights = {version: kept for version, kept in self._weights.items() if version >= self._newest}
        with self._with(self._weights[self._newest]):
            samples = self._rollouts.samples(batch, step, rng)
        return replace(samples, versions=torch.full_like(samples.versions, self._newest))

    def metrics(self) -> dict[str, float]:
        return self._rollouts.metrics()

    def lower_ahead(self) -> None:
        self.ahead = max(0, self.ahead - 1)

    @contextmanager
    def _with(self, weights: dict[str, Tensor]) -> Iterator[None]:
        """Give the student other weights for a while."""
        present = {key: weight.detach().clone() for key, weight in self._student.weights.items()}
        self._load(weights)
        try:
            yield
        finally:
            self._load(present)

    @torch.no_grad()
    def _load(self, weights: dict[str, Tensor]) -> None:
        for key, weight in self._student.weights.items():
            weight.copy_(weights[key])


class LaggedDanceGRPO(DanceGRPO):
    """DanceGRPO whose samples lag by `ahead` training steps."""

    config_class = LaggedConfig

    def __init__(self, config: LaggedConfig, sampler: SamplerConfig, **parts: Any) -> None:
        super().__init__(config, sampler, **parts)
        self.sample_from(LaggedRollouts(self.rollouts, self.student, config.ahead))
