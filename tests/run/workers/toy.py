"""Workers without a model, for tests of the scheduler: they import neither torch nor the product's models."""

import os
import signal
import threading
from pathlib import Path

import numpy as np

from unified_trainer.run.workers.scheduler import ValidationBatch, WorkItem


def rollout_of(item: WorkItem, weights: float) -> dict[str, np.ndarray]:
    """The samples of a work item: a function of the item and of the weights."""
    ids = np.array(item.sample_ids, dtype=np.float64)
    return {"x0": np.sin(1000 * item.step + ids) * weights}


def scores_of(item: WorkItem, rollout: dict[str, np.ndarray]) -> np.ndarray:
    return rollout["x0"] ** 2 + len(item.prompts[0])


class ToyWorker:
    """Follows a script: a file NAME-STEP in `faults` is used up by the first worker that makes an item of that step.

    `die` ends its process, `hang` never answers, `raise` raises; `always-die` is not used up. A file `start` that says
    `fail` makes every later start fail.
    """

    def __init__(self, faults: str) -> None:
        self._faults = Path(faults)
        if (self._faults / "start").exists():
            raise RuntimeError("the weights cannot be read")

    def ready(self) -> tuple[tuple, str]:
        return (), "here"

    def make(self, item: WorkItem, *weights: float):
        self._follow("make", item.step)
        return ("here", {"calls": 1.0}), rollout_of(item, sum(weights))

    def score(self, item: WorkItem, rollout: dict[str, np.ndarray]):
        self._follow("score", item.step)
        return {"calls": 1.0}, scores_of(item, rollout)

    def measure(self, item: ValidationBatch, *weights: float):
        self._follow("measure", item.step)
        return {"calls": 1.0}, sum(weights) * np.arange(item.start, item.stop)

    def pid(self) -> int:
        return os.getpid()

    def _follow(self, name: str, step: int) -> None:
        file = self._faults / f"{name}-{step}"
        try:
            fault = file.read_text()
            if not fault.startswith("always"):
                file.unlink()
        except FileNotFoundError:  # no fault, or one that another worker has just used up
            return
        if fault.endswith("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hang":
            threading.Event().wait()
        raise ArithmeticError(f"{name} of step {step}")
