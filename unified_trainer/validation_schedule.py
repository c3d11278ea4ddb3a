"""The validations of a run: when one starts, when its result takes effect, and what a checkpoint holds of it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from unified_trainer.checkpoint import manifest
from unified_trainer.checkpoint.manager import Saver
from unified_trainer.errors import working_on
from unified_trainer.guards.responses import Guards, Response
from unified_trainer.meter import Meter
from unified_trainer.parallel.fsdp import cpu_copy
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.roles.ema import exchanged
from unified_trainer.roles.role import Trainable
from unified_trainer.tracking.tracker import Tracker
from unified_trainer.validation import ValidationSource

KIND = "validation/student"  # kind of state: the weights that it samples with


@dataclass(frozen=True)
class Started:
    """A validation whose result has not taken effect yet."""

    step: int
    looks: dict[str, float]  # how its samples compare with the teacher's
    weights: dict[str, Tensor]  # this rank's part of the weights that it samples with, in CPU memory

    def due(self, step: int, lag: int) -> bool:
        """Return whether the result takes effect after `step` training steps."""
        return step >= self.step + lag

    @property
    def metadata(self) -> dict[str, Any]:
        """The entry of it in a checkpoint's manifest."""
        return {"step": self.step, "looks": self.looks}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of it in a checkpoint."""
        return {f"{KIND}/{name}": weight for name, weight in self.weights.items()}

    @classmethod
    def empty(cls, metadata: Mapping[str, Any], student: Trainable) -> "Started | None":
        """Return the validation that a checkpoint's manifest tells of, with weights that are still to be filled."""
        held = metadata.get(manifest.VALIDATION_STARTED)
        return None if held is None else cls(held["step"], held["looks"], cpu_copy(student.weights))


class Validations:
    """Starts validations of a run, and hands their results to guards, trackers and the terminal."""

    def __init__(
        self,
        source: ValidationSource,
        student: Trainable,
        guards: Guards,
        mesh: Mesh,
        output: Path,
        tracker: Tracker,
        saver: Saver,
        *,
        lag: int,
    ) -> None:
        """A result takes effect `lag` training steps after the start, at once if it is 0.

        Training goes on meanwhile, and waits for the result when it is due: what guards and checkpoints decide is a
        function of the settings.
        """
        self.lag = lag
        self._source, self._student, self._guards, self._mesh = source, student, guards, mesh
        self._output, self._tracker, self._saver = output, tracker, saver
        self._seconds = 0.0

    def start(self, step: int) -> Started:
        """Start the validation after `step` training steps; comparisons with the teacher are made at once."""
        self._seconds = 0.0
        with self._measured(step):
            with self._student.sampling_weights(ema=self._source.ema):
                weights = cpu_copy(self._student.weights) if self.lag else {}
                self._source.start(self._student, step)
            return Started(step, self._guards.compare_samples(), weights)

    def restart(self, started: Started) -> None:
        """Start a validation again that was cut off, of a run that goes on from a checkpoint."""
        with self._measured(started.step), exchanged(self._student.weights, started.weights):
            self._source.start(self._student, started.step)

    def finish(self, started: Started) -> tuple[dict[str, float], Response | None]:
        """Wait for the result and let it take effect; return its metrics, and what the guards do.

        The first validation is what later ones are compared with: no guard changes the course of the run by it.
        """
        step, say = started.step, self._tracker.say
        with self._measured(step):
            result = self._source.finish(self._output / "validation" / f"step_{step}", step)
        short = {name.removeprefix("validation/"): value for name, value in result.metrics.items()} | started.looks
        alarm = self._guards.after_validation(step, short)
        measured = short | self._guards.verdicts | dict(result.costs) | {"seconds": self._seconds}
        self._tracker.log(step, {f"validation/{name}": value for name, value in measured.items()})
        self._tracker.log_samples(step, result.samples, result.contact_sheet)
        if result.warning is not None:
            say(f"warning: {result.warning}; the run goes on")
        shown = [] if "reward" in short else ["no reward is measured"]
        shown += [f"{name} {value:.3f}" for name, value in short.items() if "/" not in name]
        say(f"step {step}: validation: {'  '.join(shown)}")
        response = self._guards.respond(alarm, self._output, self._saver, say)
        self._saver.keep.check_metric(short)
        return short, response if step else None

    @contextmanager
    def _measured(self, step: int) -> Iterator[None]:
        """Add the time of what runs inside to that of the validation of `step`."""
        meter = Meter(self._mesh.device, lambda label: self._tracker.show_phase(f"validation: {label}"))
        with working_on(f"the validation of step {step}"), meter.measure():
            yield
        self._seconds += sum(meter.seconds().values())
