"""A trace of one training step by torch's profiler, for --profile."""

from pathlib import Path
from typing import Any

import torch

from unified_trainer.basics.errors import writing
from unified_trainer.basics.own_files import without_link
from unified_trainer.run.settings.config import RunConfig
from unified_trainer.run.trainer import Trainer


class ProfiledTrainer(Trainer):
    """A trainer of which torch's profiler traces one step, on each rank: RUN/profile/step_N_rank_R.json.

    It is step `profile_step` after the run was started or resumed, or the last one where fewer are left.
    """

    def __init__(self, *parts: Any, run: RunConfig, folder: Path, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._left, self._last, self._folder = run.profile_step, run.steps, folder / "profile"

    def step(self, step: int) -> dict[str, float]:
        self._left -= 1
        if self._left and not (self._left > 0 and step + 1 == self._last):
            return super().step(step)
        self._left = 0
        with torch.profiler.profile() as profiler:  # of the CPU, and of an accelerator that it knows
            metrics = super().step(step)
        with writing(self._folder):
            self._folder.mkdir(exist_ok=True)
            name = f"step_{step + 1}_rank_{self.mesh.rank}.json"
            profiler.export_chrome_trace(str(without_link(self._folder / name)))
        return metrics
