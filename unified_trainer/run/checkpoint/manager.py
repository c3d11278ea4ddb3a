"""When a checkpoint is written, which ones are kept, and what happens if one cannot be written."""

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from unified_trainer.basics.errors import NotFiniteError, UserError
from unified_trainer.parallel.fsdp import to_local
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.run.checkpoint import dcp as checkpoint
from unified_trainer.run.checkpoint import manifest
from unified_trainer.run.checkpoint.dcp import CheckpointError, DiskFull

Metrics = dict[str, float]  # of a validation
Due = Callable[[int], bool]  # training steps done -> whether the present one is saved; all ranks ask after every step


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
        """Return the steps to keep of those with their metrics."""
        return {*sorted(metrics)[-self.last :], *self.ranked(metrics)}

    def ranked(self, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
        """Return the best steps of those with their metrics; a step without validation is never among them."""
        sign = -1 if self.order == "highest" else 1
        rated = sorted((sign * row[self.metric], step) for step, row in metrics.items() if self.metric in row)
        return [step for _, step in rated[: self.best]]


class Saver:
    """Writes checkpoints into a folder, one at a time, and removes those that need not be kept."""

    def __init__(self, root: Path, mesh: Mesh, keep: Keep, say: Callable[[str], None], *, asynchronous: bool) -> None:
        """`say` prints a line. With `asynchronous`, a thread writes a copy while training continues."""
        self._root, self.keep, self._say = root, keep, say
        self.needed_before: tuple[int, ...] = ()  # of each, the newest checkpoint of fewer steps stays besides
        self._asynchronous = asynchronous
        self._train_mesh, self._mesh = mesh, mesh.for_thread() if asynchronous else mesh
        self._stager = BlockingAsyncStager(cache_staged_state_dict=mesh.device.type != "cpu")
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: list[Future[None]] = []  # asynchronous writes, in order
        self._unsaved: set[int] = set()  # steps for which there was no space
        self._named: set[str] = set()  # checkpoints left alone, each said once

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Wait for the write in progress, unless KeyboardInterrupt (a second Ctrl-C) ends the run."""
        self._thread.shutdown(wait=kind is not KeyboardInterrupt)

    def save(
        self, step: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], *, last: bool = False
    ) -> None:
        """Write a checkpoint, or start to write a copy of the tensors; no step follows the `last`, and `finish` does.

        A full disk is a printed warning, and training continues. Other failures are raised here, or by `check` and
        `wait` if the write is asynchronous. If a tensor holds NaN or inf on any rank, nothing is written and all ranks
        raise NotFiniteError.
        """
        self.wait()
        self._check_finite(step, tensors)
        if self._asynchronous:
            tensors = self._staged(tensors)
        self._do(self._save, step, tensors, metadata, last)

    def record(self, step: int, metadata: Mapping[str, Any]) -> None:
        """Replace metadata of a checkpoint, after its write; then remove what need not be kept.

        A failure is a printed warning: without its validation the checkpoint is whole.
        """
        self._do(self._record, step, metadata)

    def rate(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a validation to the checkpoint of an earlier step, if there is one, as `record` does."""
        self._do(self._rate, step, metrics)

    def check(self) -> None:
        """Raise on all ranks the exception of an asynchronous write that has failed (a collective)."""
        if self._asynchronous and self._train_mesh.any(any(save.done() and save.exception() for save in self._pending)):
            self.wait()

    def wait(self) -> None:
        """Wait for the asynchronous writes and raise the first exception, if any."""
        pending, self._pending = self._pending, []
        for save in pending:
            save.result()

    def has(self, step: int) -> bool:
        """Whether there is a checkpoint of this step once asynchronous writes are done (a collective)."""
        self.wait()
        return self._train_mesh.any(self._train_mesh.is_main and (self._root / f"step_{step}").is_dir())

    def look_for_room(self, tensors: Mapping[str, Tensor]) -> None:
        """Say a warning if there is no space for a checkpoint of these tensors now; a shared disk may be freed."""
        place = next(path for path in (self._root, *self._root.parents) if path.is_dir())
        free, needed = shutil.disk_usage(place).free, checkpoint.bytes_needed(tensors)
        if free < needed:
            self._say(
                f"warning: no space for a checkpoint in {self._root}: it takes {needed / 2**20:.1f} MiB, "
                f"{free / 2**20:.1f} MiB are free. Without more space no step of this run is saved"
            )

    def finish(self, step: int) -> None:
        """Wait for the write of the run's last step; raise DiskFull if it could not be saved."""
        self.wait()
        if (self._root / f"step_{step}").is_dir():
            return
        run, earlier = self._root.parent, manifest.folders(self._root)[-1:]
        way_out = (
            f"then --resume {run}, which goes on from step {manifest.step_of(earlier[0])}"
            if earlier
            else f"then --resume {run}, which has no checkpoint and starts over"
        )
        raise DiskFull(f"step {step} could not be saved: free space in {self._root}, {way_out}")

    def _staged(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return a copy in CPU memory; on an accelerator the next save of tensors of the same names uses it again."""
        held = self._stager.state_dict_cache
        if held is not None and held.keys() != tensors.keys():  # a validation under way adds its weights
            self._stager.state_dict_cache = None
        return self._stager.stage(dict(tensors))

    def _do(self, work: Callable[..., None], *arguments: Any) -> None:
        if self._asynchronous:
            self._pending.append(self._thread.submit(work, *arguments))
        else:
            work(*arguments)

    def _check_finite(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        bad = next((key for key, tensor in tensors.items() if not _finite(tensor)), None)
        if not self._train_mesh.any(bad is not None):
            return
        newest = manifest.folders(self._root)[-1:]
        saved = f"the newest checkpoint is {newest[0]}" if newest else "there is no checkpoint yet"
        raise NotFiniteError(
            f"step {step} is not saved: {bad or 'a tensor of another rank'} holds NaN or inf; {saved}. Lower the "
            "learning rate of its role, or look at the last batches"
        )

    def _save(self, step: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], last: bool) -> None:
        try:
            checkpoint.save(self._root, step, tensors, self._mesh, metadata)
        except DiskFull as full:
            goes_on = "" if last else ". Training continues; earlier checkpoints are kept"
            self._say(f"warning: step {step} is not saved: {full}{goes_on}")
            self._unsaved.add(step)
            return
        self.forget(step)

    def _record(self, step: int, metadata: Mapping[str, Any]) -> None:
        if step in self._unsaved:
            return
        try:
            checkpoint.record(self._root, step, metadata, self._mesh)
        except CheckpointError as error:
            self._say(f"warning: the checkpoint of step {step} lacks its validation, which --resume repeats: {error}")
            return
        self.forget(step)

    def _rate(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._mesh.any(self._mesh.is_main and (self._root / f"step_{step}").is_dir()):
            self._record(step, {"metrics": dict(metrics)})

    def forget(self, step: int) -> None:
        """Remove the checkpoints up to this step that need not be kept, and those whose manifest shows a torn write.

        What a killed process was writing or removing goes first.

        Each removal of a torn one is said; one of the best is not removed. A checkpoint whose manifest cannot be read
        stays, and is named once. Later steps are ignored: a resumed run skipped them as damaged, and will write them
        again.
        """
        if not self._mesh.is_main:
            return
        manifest.remove_litter(manifest.unfinished(self._root))
        metrics, torn, unreadable = _read_up_to(step, self._root)
        for folder, fault in unreadable.items():
            self._name(folder, f"warning: {folder} is left as it is: {fault}")
        best = self.keep.ranked(metrics | {number: row for number, (row, _) in torn.items()})
        for number, (_, fault) in torn.items():
            folder = self._root / f"step_{number}"
            if number in best:
                self._name(folder, f"warning: {folder} is among the best and is left as it is: {fault}")
            else:
                checkpoint.remove(folder)
                self._say(f"removed {folder}, which was not written to its end: {fault}")
        needed = {max((number for number in metrics if number < one), default=-1) for one in self.needed_before}
        for number in metrics.keys() - self.keep.staying(metrics) - needed:
            checkpoint.remove(self._root / f"step_{number}")

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, newest first; all ranks must call it.

        A run that is killed meanwhile resumes from one of them, and comes to the same decision again.
        """
        self.wait()
        if self._train_mesh.is_main:
            for folder in reversed(manifest.folders(self._root)):
                if manifest.step_of(folder) > step:
                    checkpoint.remove(folder)
        self._train_mesh.barrier()

    def _name(self, folder: Path, line: str) -> None:
        """Say a line about a checkpoint once."""
        if folder.name not in self._named:
            self._named.add(folder.name)
            self._say(line)


class NoSaver(Saver):
    """A saver that writes nothing, for a run without checkpoints; it still refuses tensors that are not finite."""

    def look_for_room(self, tensors: Mapping[str, Tensor]) -> None:
        """Do nothing: no room is needed."""

    def finish(self, step: int) -> None:
        """Do nothing: the last step is not saved."""

    def _do(self, work: Callable[..., None], *arguments: Any) -> None:
        """Leave the work out."""


def to_remove(root: Path, keep: Keep) -> bool:
    """Whether a killed process left a checkpoint that the rule does not keep, or one that shows a torn write."""
    metrics, torn, _ = _read_up_to(sys.maxsize, root)
    return bool(torn or metrics.keys() - keep.staying(metrics))


def _read_up_to(step: int, root: Path) -> tuple[dict[int, Metrics], dict[int, tuple[Metrics, str]], dict[Path, str]]:
    """Return the metrics of checkpoints by step, the same and the fault of torn ones, and why others are unreadable."""
    metrics: dict[int, Metrics] = {}
    torn: dict[int, tuple[Metrics, str]] = {}
    unreadable: dict[Path, str] = {}
    for folder in manifest.folders(root):
        if (number := manifest.step_of(folder)) <= step:
            metadata, fault = manifest.read(folder)
            if fault is None:
                metrics[number] = metadata.get("metrics", {})
            elif metadata:
                torn[number] = metadata.get("metrics", {}), fault
            else:
                unreadable[folder] = fault
    return metrics, torn, unreadable


def _finite(tensor: Tensor) -> bool:
    own = to_local(tensor.detach())
    return not own.is_floating_point() or not own.numel() or bool(torch.stack(own.aminmax()).isfinite().all())


def due(steps: int, minutes: float, mesh: Mesh) -> Due:
    """Return when checkpoints are due; 0 steps or -1 are never, and with 0 minutes no clock is read."""

    def by_steps(step: int) -> bool:
        return steps > 0 and step % steps == 0

    return ByMinutes(by_steps, minutes, mesh) if minutes else by_steps


class ByMinutes:
    """Due as another rule says, and when so many minutes have passed since the last checkpoint on the main rank."""

    def __init__(self, rule: Due, minutes: float, mesh: Mesh, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._rule, self._seconds, self._mesh, self._clock = rule, 60 * minutes, mesh, clock
        self._last = clock()

    def __call__(self, step: int) -> bool:
        """Return whether the step is saved; the ranks agree (a collective)."""
        late = self._mesh.is_main and self._clock() - self._last >= self._seconds
        is_due = self._mesh.any(late) or self._rule(step)
        if is_due:
            self._last = self._clock()
        return is_due


def at_risk(steps: int, minutes: float) -> str:
    """Return in words how much work a failure may cost."""
    most = f"{steps} steps or {minutes:g} minutes, whichever is less" if steps else f"{minutes:g} minutes"
    return f"a failure costs at most {most}, and the step under way"
