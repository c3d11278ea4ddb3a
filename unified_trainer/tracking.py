"""Metrics and messages: metrics.jsonl, the terminal, and optionally TensorBoard and Weights & Biases."""

import errno
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor

from unified_trainer.config import TrackingConfig
from unified_trainer.errors import UserError
from unified_trainer.parallel.mesh import Mesh

SHOWN = {  # on the progress bar: training metric -> its name there
    "reward": "reward",
    "loss": "loss",
    "critic_loss": "critic loss",
    "critic_to_teacher_error": "critic error",
    "log_ratio": "log-ratio",
    "student/grad_norm": "grad",
    "samples_per_second": "samples/s",
}


class Tracker:
    """Writes metrics and messages of a run; on ranks other than the main one it does nothing."""

    def __init__(
        self, run: Path, config: TrackingConfig, settings: dict[str, Any], steps: int, start: int, active: bool
    ) -> None:
        """`start` is the number of steps already done; lines of metrics.jsonl after it are dropped.

        `settings` goes to Weights & Biases. Raises UserError if a package is missing or metrics.jsonl is damaged.
        """
        self._active = active
        self.console = Console(quiet=not active)
        self._progress = Progress(
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=self.console,
            disable=not active,
        )
        self._task = self._progress.add_task("train", total=steps, completed=start, numbers="")
        self._sinks: list[Any] = []
        if not active:
            return
        self._file = run / "metrics.jsonl"
        _drop_after(self._file, start)
        self._jsonl = self._file.open("ab", buffering=0)
        self._unwritten = b""  # lines that did not fit on a full disk
        if config.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise _missing_package("tensorboard") from error
            self._board = SummaryWriter(str(run / "tensorboard"), purge_step=start + 1)
            self._sinks.append(self._to_board)
        if config.wandb != "off":
            try:
                import wandb
            except ImportError as error:
                raise _missing_package("wandb") from error
            try:
                self._wandb = wandb.init(
                    project=config.wandb_project, dir=str(run), mode=config.wandb, config=settings, name=run.name
                )
            except wandb.Error as error:
                raise UserError(f"--tracking.wandb {config.wandb}: {error}") from error
            self._sinks.append(self._to_wandb)

    def __enter__(self) -> "Tracker":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        if not self._active:
            return
        self._write("")
        self._jsonl.close()
        for sink in self._sinks:
            sink(None, {})

    def log(self, step: int, metrics: dict[str, float], *, advance: bool = False) -> None:
        """Write the metrics, with `step`, as one line of metrics.jsonl and to the other trackers.

        With `advance`, the progress bar moves to `step` and shows those of the metrics that SHOWN names.
        """
        if not self._active:
            return
        self._write(json.dumps({"step": step, **metrics}) + "\n")
        for sink in self._sinks:
            sink(step, metrics)
        if advance:
            shown = {short: metrics.get(f"train/{name}") for name, short in SHOWN.items()}
            numbers = " ".join(f"{short} {value:.3g}" for short, value in shown.items() if value is not None)
            self._progress.update(self._task, completed=step, numbers=numbers)

    def _write(self, lines: str) -> None:
        """Append to metrics.jsonl; lines that do not fit on a full disk are written with the next ones."""
        self._unwritten += lines.encode()
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._jsonl.write(self._unwritten) :]
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self.say(f"warning: no space for {self._file}; its lines are kept in memory until there is")

    def say(self, message: str) -> None:
        """Print a message as it is: text in brackets is no markup."""
        self.console.print(message, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def table(self, title: str, rows: dict[str, Any]) -> None:
        """Print names and values as a table."""
        table = Table(title=Text(title), show_header=False)
        for name, value in rows.items():
            table.add_row(Text(name), Text(str(value)))
        self.console.print(table)

    def _to_board(self, step: int | None, metrics: dict[str, float]) -> None:
        if step is None:
            self._board.close()
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)

    def _to_wandb(self, step: int | None, metrics: dict[str, float]) -> None:
        if step is None:
            self._wandb.finish()
        else:
            self._wandb.log(metrics | {"step": step})


def _drop_after(file: Path, step: int) -> None:
    """Remove the lines after `step`, which the continued run writes again; at step 0 all lines."""
    if not file.is_file():
        return
    try:
        lines = file.read_text().splitlines(keepends=True) if step else []
        kept = [
            line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step
        ]  # may end in a cut line
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged ({error!r}): remove it, or its damaged lines") from error
    building = file.with_suffix(".tmp")
    building.write_text("".join(kept))
    os.replace(building, file)


def _missing_package(name: str) -> UserError:
    return UserError(f"--tracking.{name} needs the package {name}: pip install '.[{name}]'")


class Stopwatch:
    """Measures samples per second between readings."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start the measured time again."""
        self._last = time.monotonic()

    def rate(self, samples: int) -> float:
        """Return samples per second since the last reading, and start again."""
        now = time.monotonic()
        spent, self._last = now - self._last, now
        return samples / spent


class Means:
    """Means of metrics by name: a number counts once, a vector once per element; names ending in _max are maxima."""

    def __init__(self) -> None:
        self._totals: dict[str, tuple[float, float]] = {}  # sum and count, or maximum and 1

    def add(self, metrics: Mapping[str, float | Tensor]) -> None:
        """Add values; a vector may be empty."""
        for name, value in metrics.items():
            values = torch.as_tensor(value, dtype=torch.float64).detach().flatten()
            if name.endswith("_max"):
                self._totals[name] = (max(values.max().item(), self._totals.get(name, (-math.inf, 1.0))[0]), 1.0)
            else:
                total, count = self._totals.get(name, (0.0, 0.0))
                self._totals[name] = (total + values.sum().item(), count + len(values))

    def over(self, mesh: Mesh) -> dict[str, float]:
        """Return the means over all ranks (a collective); names without any value are left out.

        All ranks must have added the same names in the same order.
        """
        rows = mesh.gather(torch.tensor([list(self._totals.values())], dtype=torch.float64, device=mesh.device)).cpu()
        result = {}
        for i, name in enumerate(self._totals):
            if name.endswith("_max"):
                result[name] = rows[:, i, 0].max().item()
            elif count := rows[:, i, 1].sum().item():
                result[name] = rows[:, i, 0].sum().item() / count
        return result
