"""When a checkpoint is written, which ones stay, and what happens when one cannot be written."""

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from torch import Tensor
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from unified_trainer.checkpoint import dcp as checkpoint
from unified_trainer.checkpoint import manifest
from unified_trainer.checkpoint.dcp import CheckpointError, DiskFull
from unified_trainer.parallel.mesh import Mesh


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay."""

    last: int  # the newest so many
    best: int = 0  # besides, those with the best validation so many
    metric: str = "reward"  # what is best of them: a validation metric
    order: Literal["highest", "lowest"] = "highest"

    def check(self) -> None:
        """Raise ValueError, naming the key, for what cannot be."""
        if self.last < 1 or self.best < 0:
            raise ValueError(f"keep_last must be at least 1 and keep_best at least 0, not {self.last} and {self.best}")

    def check_metric(self, metrics: Mapping[str, float]) -> None:
        """Raise CheckpointError unless a validation measured what is to be best."""
        if self.best and self.metric not in metrics:
            raise CheckpointError(f"best_metric {self.metric} is not measured; have {', '.join(sorted(metrics))}")

    def staying(self, metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
        """The steps that stay, of those with their metrics; one without a validation of its own is never best."""
        newest = sorted(metrics)[-self.last :]
        sign = -1 if self.order == "highest" else 1
        rated = sorted((sign * row[self.metric], step) for step, row in metrics.items() if self.metric in row)
        return {*newest, *(step for _, step in rated[: self.best])}


class Saver:
    """Writes checkpoints into a folder, in the way of the training or beside it, one at a time."""

    def __init__(self, root: Path, mesh: Mesh, keep: Keep, say: Callable[[str], None], *, asynchronous: bool) -> None:
        self._root, self.keep, self._say = root, keep, say
        self._asynchronous = asynchronous
        self._train_mesh, self._mesh = mesh, mesh.for_thread() if asynchronous else mesh
        self._stager = BlockingAsyncStager(cache_staged_state_dict=mesh.device.type != "cpu")
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A save that is under way is finished, whatever ends the run but a second Ctrl-C."""
        self._thread.shutdown(wait=kind is not KeyboardInterrupt)

    def save(self, step: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        """Save, or begin to. A full disk is said, and the run goes on; another fault is raised here or by `check`."""
        self.wait()
        if self._asynchronous:
            copied = self._stager.stage(dict(tensors))
            self._pending = self._thread.submit(self._save, step, copied, metadata)
        else:
            self._save(step, tensors, metadata)

    def check(self) -> None:
        """Raise, on all ranks at once, what a save beside the training failed with."""
        if self._asynchronous and self._train_mesh.any(self._pending is not None and self._failed(self._pending)):
            self.wait()

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being written beside the training."""
        return self._pending is not None and not self._pending.done()

    def wait(self) -> None:
        """Until nothing is being written; raises what the save failed with."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def finish(self, step: int) -> None:
        """Wait, and raise DiskFull unless this step, the run's last, is saved."""
        self.wait()
        if not (self._root / f"step_{step}").is_dir():
            raise DiskFull(
                f"step {step} could not be saved: free space below {self._root}, then --resume {self._root.parent}"
            )

    def _failed(self, pending: Future[None]) -> bool:
        return pending.done() and pending.exception() is not None

    def _save(self, step: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        try:
            checkpoint.save(self._root, step, tensors, self._mesh, metadata)
        except DiskFull as full:
            self._say(f"warning: step {step} is not saved: {full}. Training goes on; earlier checkpoints are untouched")
            return
        self.forget(step)

    def forget(self, step: int) -> None:
        """Remove what need not stay, of this step and those before: a later one is damaged, and not ours to count."""
        if not self._mesh.is_main:
            return
        metrics: dict[int, dict[str, float]] = {}
        for folder in manifest.folders(self._root):
            if manifest.step_of(folder) <= step:
                metadata, fault = manifest.read(folder)
                if fault:
                    shutil.rmtree(folder)
                else:
                    metrics[metadata["step"]] = metadata.get("metrics", {})
        for gone in metrics.keys() - self.keep.staying(metrics):
            shutil.rmtree(self._root / f"step_{gone}")
