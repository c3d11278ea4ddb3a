"""Metrics and messages: metrics.jsonl, the terminal, and the trackers that the user asks for."""

import json
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task
from rich.table import Column, Table
from rich.text import Text
from torch import Tensor

from unified_trainer.basics.errors import working_on
from unified_trainer.basics.input_files import read_json
from unified_trainer.basics.own_files import write
from unified_trainer.basics.terminal import console, printable
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.run.settings.config import TrackingConfig
from unified_trainer.run.tracking.external import ExternalTracker, RunInfo, tracker_classes
from unified_trainer.run.tracking.metrics_file import METRICS, MetricsFile, is_validation
from unified_trainer.run.validation.report import Shown, ValidationSample, listed_samples

SHOWN = {  # in the terminal: training metric -> its name there
    "reward": "reward",
    "loss": "loss",
    "critic_loss": "critic loss",
    "critic_to_teacher_error": "critic error",
    "log_ratio": "log-ratio",
    "student/grad_norm": "grad",
    "student/not_finite_count": "skipped",
    "samples_per_second": "samples/s",
}


TAKEN = "trackers.json"  # in the run directory: how many lines of metrics.jsonl each tracker has
PHASE_WIDTH = 23  # characters, so that the numbers behind it stay in place
SKIPPED = "/not_finite_count"  # ends the names of metrics of skipped updates
SMOOTHED = 10  # training steps whose mean the progress bar shows
VALIDATED = {"validation/reward": "reward", "validation/accuracy": "accuracy", "validation/frechet": "Frechet"}


class _Status(ProgressColumn):
    """The time left, the phase and the numbers on one line, which a narrow terminal cuts off at its end."""

    def render(self, task: Task) -> Text:
        words = f"{task.fields['left']:<8}{task.fields['phase']:<{PHASE_WIDTH}} {task.fields['numbers']}"
        return Text(words, no_wrap=True, overflow="ellipsis")


class Tracker:
    """Writes metrics and messages of a run; on ranks other than the main one it does nothing.

    A terminal shows a progress bar with the present phase. Elsewhere every training step is a line.
    """

    def __init__(
        self,
        run: Path,
        config: TrackingConfig,
        settings: dict[str, Any],
        steps: int,
        start: int,
        active: bool,
        *,
        unvalidated: int | None = None,
    ) -> None:
        """`start` is the number of steps already done; lines of metrics.jsonl after it are dropped.

        So are the validations of step `unvalidated` and later: they come again. `settings` go to the trackers.
        Raises UserError if a tracker cannot start.
        """
        self.active, self._run, self._start, self._steps = active, run, start, steps
        self._done = start
        self.console = console(quiet=not active)
        self._bar = active and self.console.is_terminal
        self._progress = Progress(
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            _Status(Column()),  # the only column that may shrink
            console=self.console,
            disable=not self._bar,
        )
        self._task = self._progress.add_task("train", total=steps, completed=start, left="", phase="", numbers="")
        self._recent: dict[str, deque[float]] = {}
        self._validations: list[tuple[int, dict[str, float]]] = []  # the first and the last of the run
        self._skipped = Counter[str]()  # updates of the run, by metric
        self._trackers: list[ExternalTracker] = []
        self._lines = 0  # of metrics.jsonl
        self._taken: dict[str, int] = {}  # by each tracker, and by those that failed
        self._began = time.monotonic()
        if not active:
            return
        self._metrics = MetricsFile(run / METRICS, start, self.say, unvalidated)
        for row in self._metrics.rows:
            self._note(row["step"], row)
        counted = (run / TAKEN).is_file()  # an earlier version did not: trackers have all
        self._taken = read_json(run / TAKEN) if counted else {}
        for kind in tracker_classes(config):
            with working_on(f"tracker {kind.__name__}"):
                tracker = kind(RunInfo(run, settings, config, start))
            if tracker.taken < 0:
                tracker.taken = self._taken.get(kind.__name__, 0 if counted else len(self._metrics.rows))
            self._trackers.append(tracker)
        self._rewound(start)

    def __enter__(self) -> "Tracker":
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._progress.stop()
        if not self.active:
            return
        self._metrics.close()
        self._each(lambda tracker: tracker.close(failed=kind is not None))

    def log(self, step: int, metrics: dict[str, float], shown: Shown = ((), None), *, advance: bool = False) -> None:
        """Write the metrics, with `step` and the time, as one line of metrics.jsonl and to the other trackers.

        `shown` are a validation's samples. With `advance` a training step is done: it moves the bar, or is a line.
        """
        if not self.active:
            return
        self._metrics.write({"step": step, "time": round(time.time(), 3), **metrics})
        self._lines += 1
        self._each(lambda tracker: _give(tracker, self._lines, step, metrics, shown))
        if self._trackers:
            self._note_taken()
        self._note(step, metrics)
        if advance:
            self._advance(step, metrics)
        elif step == self._start == self._done:
            self._began = time.monotonic()  # the time left is that of training steps and validations among them
        self._show_numbers()

    def log_rollouts(self, step: int, samples: Sequence[ValidationSample], contact_sheet: Path) -> None:
        """Give samples of the rollout of a training step, whose metrics follow, to the other trackers."""
        lacking = [tracker for tracker in self._trackers if tracker.taken <= self._lines]
        self._each(lambda tracker: tracker.log_rollouts(step, samples, contact_sheet), lacking)

    def add(self, tracker: ExternalTracker) -> None:
        """Let one more tracker get what the others get, before them."""
        self._trackers.insert(0, tracker)

    def show_phase(self, phase: str) -> None:
        """Show what the run does now, on the progress bar."""
        if self._bar:
            self._progress.update(self._task, phase=phase)

    def rewind(self, step: int) -> None:
        """Go back to `step`: lines of metrics.jsonl after it are dropped, because those steps come again."""
        if not self.active:
            return
        self._metrics.rewind(step)
        self._validations, self._skipped = [], Counter()
        for row in self._metrics.rows:
            self._note(row["step"], row)
        self._rewound(step)
        self._progress.update(self._task, completed=step)
        self._start, self._done, self._began = step, step, time.monotonic()  # the time left is estimated from here on

    def finish(self, step: int) -> None:
        """End the progress bar and print what the run came to: first and last validation, and where things are."""
        self._progress.update(self._task, left="", phase="done")
        self._progress.stop()
        parts = [f"{step}/{self._steps} steps done"]
        if self._validations:
            (first, before), (last, after) = self._validations[0], self._validations[-1]
            values = [
                f"{short} {before[name]:.3f} -> {after[name]:.3f}"
                for name, short in VALIDATED.items()
                if name in before and name in after
            ]
            parts += [f"validation of step {first} -> {last}: {', '.join(values)}"] if values else []
        for name, count in (+self._skipped).items():
            role = name.removeprefix("train/").removesuffix(SKIPPED)
            parts.append(f"{count:.0f} updates of {role} skipped, whose gradient was not finite")
        parts.append(f"metrics, checkpoints and videos in {self._run}")
        self.say("; ".join(parts))

    def _advance(self, step: int, metrics: dict[str, float]) -> None:
        shown = {short: metrics[f"train/{name}"] for name, short in SHOWN.items() if f"train/{name}" in metrics}
        for name, value in shown.items():
            self._recent.setdefault(name, deque(maxlen=SMOOTHED)).append(value)
        spent, self._done = time.monotonic() - self._began, step
        left = timedelta(seconds=round(spent / (step - self._start) * (self._steps - step)))
        self._progress.update(self._task, completed=step, left=str(left))
        if not self._bar:
            words = [f"{time.strftime('%Y-%m-%d %H:%M:%S')}", f"step {step}/{self._steps}"]
            words += [f"{name} {value:.4g}" for name, value in shown.items()]
            words += [f"{metrics['train/seconds']:.3g} s"] if "train/seconds" in metrics else []
            self.say("  ".join([*words, f"ETA {left}"]))

    def _show_numbers(self) -> None:
        """Show the last validation, which has no training noise, and means of the last training steps."""
        validated = self._validations[-1][1] if self._validations else {}
        values = [f"{short} {validated[name]:.3g}" for name, short in VALIDATED.items() if name in validated]
        means = [f"{name} {sum(recent) / len(recent):.3g}" for name, recent in self._recent.items()]
        groups = [" ".join(["val", *values])] if values else []
        self._progress.update(self._task, numbers="; ".join([*groups, " ".join(means)]))

    def _note(self, step: int, metrics: Mapping[str, float]) -> None:
        self._skipped.update({name: value for name, value in metrics.items() if name.endswith(SKIPPED)})
        if is_validation(metrics):
            self._validations = [*self._validations[:1], (step, dict(metrics))]

    def _rewound(self, step: int) -> None:
        """Let trackers have the lines of metrics.jsonl, which end after `step` training steps, and no others."""
        self._lines = len(self._metrics.rows)
        ahead = [tracker for tracker in self._trackers if tracker.taken > self._lines]
        self._each(lambda tracker: tracker.rewind(step, self._lines), ahead)
        self._each(self._catch_up)
        self._note_taken()

    def _catch_up(self, tracker: ExternalTracker) -> None:
        """Give a tracker the lines that it lacks, with the samples that are still in the run directory."""
        for number, row in enumerate(self._metrics.rows[max(0, tracker.taken) :], max(0, tracker.taken) + 1):
            step, metrics = row["step"], {name: row[name] for name in row if name not in ("step", "time")}
            validates = is_validation(metrics)
            for kind in () if validates else ("rollouts", "matching"):
                samples, sheet = listed_samples(self._run / kind / f"step_{step}")
                if samples and sheet is not None:
                    tracker.log_rollouts(step, samples, sheet)
            shown = listed_samples(self._run / "validation" / f"step_{step}") if validates else ((), None)
            _give(tracker, number, step, metrics, shown)

    def _note_taken(self) -> None:
        self._taken |= {type(tracker).__name__: tracker.taken for tracker in self._trackers}
        with suppress(OSError):  # a full disk: --resume gives some lines twice
            write(self._run / TAKEN, json.dumps(self._taken).encode())

    def _each(self, work: Callable[[ExternalTracker], None], some: Sequence[ExternalTracker] | None = None) -> None:
        """Let trackers, by default all, do something; one whose disk or connection fails is left out from then on."""
        for tracker in list(self._trackers if some is None else some):
            name = type(tracker).__name__
            try:
                with working_on(f"tracker {name}"):
                    work(tracker)
            except OSError as error:
                self._trackers.remove(tracker)
                self.say(f"warning: tracker {name} failed and gets nothing before --resume: {error}")

    def say(self, message: str) -> None:
        """Print a message as it is: text in brackets is no markup."""
        self.console.print(printable(message), soft_wrap=True)

    def table(self, title: str, rows: dict[str, Any]) -> None:
        """Print names and values as a table."""
        table = Table(title=Text(printable(title)), show_header=False)
        for name, value in rows.items():
            table.add_row(Text(printable(name)), Text(printable(str(value))))
        self.console.print(table)


def _give(tracker: ExternalTracker, number: int, step: int, metrics: Mapping[str, float], shown: Shown) -> None:
    """Log a line of metrics.jsonl, counted from 1, and the samples of its validation, unless the tracker has them."""
    if tracker.taken < number:
        tracker.log(step, metrics)
        if shown[0]:
            tracker.log_samples(step, *shown)
        tracker.taken = number


class Means:
    """Means of metrics by name: a number counts once, a vector once per element; names ending in _max are maxima.

    Those ending in _count are sums over the updates of a step, which all ranks make together.
    """

    def __init__(self) -> None:
        self._given: dict[str, list[Tensor]] = {}  # vectors, on the CPU or a device

    def add(self, metrics: Mapping[str, float | Tensor]) -> None:
        """Add values, without waiting for a device; a vector may be empty."""
        for name, value in metrics.items():
            own = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
            self._given.setdefault(name, []).append(own.flatten())

    def _totals(self) -> dict[str, tuple[float, float]]:
        """Return sum and count, or maximum and 1, by name; everything leaves a device in one copy."""
        given = [values for several in self._given.values() for values in several]
        away = [values.float() for values in given if values.device.type != "cpu"]
        here = iter(torch.cat(away).cpu().split([len(values) for values in away]) if away else ())
        on_cpu = iter([values if values.device.type == "cpu" else next(here) for values in given])
        totals = {}
        for name, several in self._given.items():
            values = torch.cat([next(on_cpu).double() for _ in several])
            if name.endswith("_max"):
                totals[name] = (values.max().item() if len(values) else -math.inf, 1.0)
            else:
                totals[name] = (math.fsum(values.tolist()), float(len(values)))
        return totals

    def over(self, mesh: Mesh) -> dict[str, float]:
        """Return the means over all ranks (a collective); names without any value are left out.

        All ranks must have added the same names in the same order.
        """
        totals = self._totals()
        rows = mesh.gather(torch.tensor([list(totals.values())], dtype=torch.float64))
        result = {}
        for i, name in enumerate(totals):
            if name.endswith(("_max", "_count")):
                result[name] = rows[:, i, 0].max().item()
            elif count := rows[:, i, 1].sum().item():
                result[name] = rows[:, i, 0].sum().item() / count
        return result
