"""When a checkpoint is written, which ones are kept, and what happens if one cannot be written."""

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
from unified_trainer.errors import UserError
from unified_trainer.parallel.mesh import Mesh


@dataclass(frozen=True)
class Keep:
    """The rule by which checkpoints are kept."""

    last: int  # number of newest checkpoints to keep
    best: int = 0  # number of best checkpoints to keep as well, of those saved after a validation
    metric: str = "reward"  # validation metric that ranks them
    order: Literal["highest", "lowest"] = "highest"  # which value of the metric is best

    def check_metric(self, metrics: Mapping[str, float]) -> None:
        """Raise UserError if the metric that ranks checkpoints is not among those of a validation."""
        if self.best and self.metric not in metrics:
            raise UserError(f"best_metric {self.metric} is not measured; have {', '.join(sorted(metrics))}")

    def staying(self, metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
        """Return the steps to keep of those with their metrics; a step without validation is never among the best."""
        newest = sorted(metrics)[-self.last :]
        sign = -1 if self.order == "highest" else 1
        rated = sorted((sign * row[self.metric], step) for step, row in metrics.items() if self.metric in row)
        return {*newest, *(step for _, step in rated[: self.best])}


class Saver:
    """Writes checkpoints into a folder, one at a time, and removes those that need not be kept."""

    def __init__(self, root: Path, mesh: Mesh, keep: Keep, say: Callable[[str], None], *, asynchronous: bool) -> None:
        """`say` prints a line. With `asynchronous`, a thread writes a copy while training continues."""
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
        """Wait for the write in progress, unless KeyboardInterrupt (a second Ctrl-C) ends the run."""
        self._thread.shutdown(wait=kind is not KeyboardInterrupt)

    def save(self, step: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        """Write a checkpoint, or start to write a copy of the tensors.

        A full disk is a printed warning, and training continues. Other failures are raised here, or by `check` and
        `wait` if the write is asynchronous.
        """
        self.wait()
        if self._asynchronous:
            copied = self._stager.stage(dict(tensors))
            self._pending = self._thread.submit(self._save, step, copied, metadata)
        else:
            self._save(step, tensors, metadata)

    def check(self) -> None:
        """Raise on all ranks the exception of an asynchronous write that has failed (a collective)."""
        if self._asynchronous and self._train_mesh.any(self._pending is not None and self._failed(self._pending)):
            self.wait()

    @property
    def saving(self) -> bool:
        """Whether an asynchronous write is in progress."""
        return self._pending is not None and not self._pending.done()

    def wait(self) -> None:
        """Wait for the asynchronous write and raise its exception, if any."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def finish(self, step: int) -> None:
        """Wait for the write of the run's last step; raise DiskFull if it could not be saved."""
        self.wait()
        if not (self._root / f"step_{step}").is_dir():
            raise DiskFull(
                f"step {step} could not be saved: free space in {self._root}, then --resume {self._root.parent}"
            )

    def _failed(self, pending: Future[None]) -> bool:
        return pending.done() and pending.exception() is not None

    def _save(self, step: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        try:
            checkpoint.save(self._root, step, tensors, self._mesh, metadata)
        except DiskFull as full:
            self._say(f"warning: step {step} is not saved: {full}. Training continues; earlier checkpoints are kept")
            return
        self.forget(step)

    def forget(self, step: int) -> None:
        """Remove the checkpoints up to this step that need not be kept, and incomplete ones.

        Later steps are ignored: a resumed run skipped them as damaged, and will write them again.
        """
        if not self._mesh.is_main:
            return
        metrics: dict[int, dict[str, float]] = {}
        for folder in manifest.folders(self._root):
            if manifest.step_of(folder) <= step:
                metadata, fault = manifest.read(folder)
                if fault:
                    _remove(folder)
                else:
                    metrics[metadata["step"]] = metadata.get("metrics", {})
        for step_gone in metrics.keys() - self.keep.staying(metrics):
            _remove(self._root / f"step_{step_gone}")


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder} cannot be removed ({error.strerror or error})") from error
