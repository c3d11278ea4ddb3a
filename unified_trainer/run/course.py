"""The course of a run: when it validates, saves, goes back and stops. The trainer makes the steps."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unified_trainer.basics.errors import working_on
from unified_trainer.parallel.fsdp import cpu_copy
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.meter import Meter, step_cost
from unified_trainer.roles.ema import exchanged
from unified_trainer.roles.role import Trainable
from unified_trainer.run.checkpoint.due import due
from unified_trainer.run.checkpoint.manager import Saver
from unified_trainer.run.guards.base import Alarm
from unified_trainer.run.guards.responses import Guards, Response
from unified_trainer.run.guards.unmoved import UnmovedWeights
from unified_trainer.run.settings.config import RunConfig
from unified_trainer.run.stop_signal import StepDropped, stop_signal, too_slow_to_stop
from unified_trainer.run.tracking.tracker import Tracker
from unified_trainer.run.trainer import Trainer
from unified_trainer.run.validation.pending import PendingValidation
from unified_trainer.run.validation.report import ValidationSource


class Course:
    """A run from its first step to its last: a step is saved before it is validated, so a failure loses no step.

    A validation is pending from its start until its result takes effect: at once, or with evaluation workers
    `validation_lag` steps later. What guards and checkpoints decide is then still a function of the settings.
    """

    def __init__(
        self,
        trainer: Trainer,
        run: RunConfig,
        output: Path,
        tracker: Tracker,
        saver: Saver,
        validation: ValidationSource | None,
        *,
        start: int,
    ) -> None:
        """`start` training steps are done. Without a `validation` the run has none."""
        self.trainer, self.settings, self.output = trainer, run, output
        self.tracker, self.saver, self.guards, self.mesh = tracker, saver, trainer.guards, trainer.mesh
        self.step = start  # training steps done
        self.compiles = any(role.compiled for role in trainer.roles.values())  # in the next step
        self.save_due = due(run.checkpoint_every, run.checkpoint_minutes, self.mesh)
        self.unmoved = UnmovedWeights(trainer.roles, start, run.steps)
        self.warned: set[str] = set()  # what the run was warned of, once each
        self.validations: Validations | None = None
        if validation is not None:
            student = trainer.roles["student"]
            lag = run.validation_lag
            self.validations = Validations(validation, student, self.guards, self.mesh, output, tracker, saver, lag)

    def run(self) -> str | None:
        """Run the training steps that are left; return the guard that stopped the run, by its section, or None.

        A first Ctrl-C, SIGTERM or SIGHUP finishes the step, or drops one that has changed nothing, saves and returns.
        """
        with stop_signal() as asked:
            response, stopping = self._begin(), False
            while self.step < self.settings.steps and not stopping and response is None:
                try:
                    alarm = self._train()
                except StepDropped:
                    self._save_before_dropped()
                    return self._end(None, stopped=True)
                stopping = self.mesh.any(bool(asked)) and self.step < self.settings.steps
                response = self._respond(alarm, stopping)
            return self._end(response, stopping)

    def _save_before_dropped(self) -> None:
        """Save the step before one that was dropped, unless it is saved: all states are still those of its end."""
        self.tracker.say(f"step {self.step + 1} was dropped before it changed anything: --resume makes it again")
        if self.step and not self.saver.has(self.step):
            self.saver.save(self.step, self.trainer.tensors(), self.trainer.metadata({}), last=True)

    def _begin(self) -> Response | None:
        """Start the validation that the run owes, and remove what a killed process left behind."""
        pending = self.trainer.pending_validation
        if self.validations is None:
            self.trainer.pending_validation = None
        elif pending is not None:
            self.validations.restart(pending)
        elif self.trainer.owes_validation or self.step == 0:
            self.trainer.pending_validation = self.validations.start(self.step)
        self.saver.needed_before = self._needed_before()
        self.saver.forget(self.step)
        self.saver.look_for_room(self.trainer.tensors())
        response = None
        if (due := self._due(at_once=self.step == self.settings.steps)) is not None:
            response = self._take_effect(due, None, saved=self.step > 0)
        return self._go_back(response)

    def _train(self) -> Alarm | None:
        """Make one training step and log it; return the gravest alarm of the guards."""
        meter = Meter(self.mesh.device, self.tracker.show_phase)
        with meter.measure():
            metrics = self.trainer.step(self.step)
        self.step += 1
        alarm = self.guards.after_step(self.step, metrics)
        metrics |= self.guards.verdicts | self.guards.metrics
        metrics |= step_cost(meter, self.mesh, self.trainer.loader.samples_at(self.step - 1))
        self.tracker.log(self.step, {f"train/{name}": value for name, value in metrics.items()}, advance=True)
        for message in self.trainer.messages:
            self.tracker.say(f"step {self.step}: {message}")
        self._warn("unmoved", self.unmoved.warning(self.step))
        if self.compiles:
            seconds = metrics["seconds"]
            self._warn("compilation", f"step {self.step} took {seconds:.1f} s, with the compilation of blocks")
            self.compiles = False
        self._warn("slow to stop", too_slow_to_stop(metrics["seconds"]))
        return alarm

    def _warn(self, topic: str, warning: str) -> None:
        """Print a warning, the first of its topic."""
        if warning and topic not in self.warned:
            self.warned.add(topic)
            self.tracker.say(warning)

    def _respond(self, alarm: Alarm | None, stopping: bool) -> Response | None:
        """Save and validate if it is time, and change the course if guards ask for it."""
        self.saver.check()
        self.saver.needed_before = self._needed_before()
        response = self.guards.respond(alarm, self.output, self.saver, self.tracker.say)
        if response is None or response.stops:
            response = self._save_and_validate(response, stopping)
        return self._go_back(response)

    def _save_and_validate(self, response: Response | None, stopping: bool) -> Response | None:
        run, is_last = self.settings, self.step == self.settings.steps
        validations = self.validations if self._validates() else None
        if (due := self._due(at_once=validations is not None)) is not None:
            response = self._take_effect(due, response, saved=False)
        ends = is_last or stopping or response is not None
        saves = ends or self.save_due(self.step)
        if saves:
            self.tracker.show_phase("checkpoint")
            about = self.trainer.metadata({}, owes_validation=validations is not None, response=response)
            self.saver.save(self.step, self.trainer.tensors(), about, last=ends)
        if validations is not None and (is_last or not (ends and run.validation_lag)):  # else --resume starts it
            self.trainer.pending_validation = validations.start(self.step)
            if (due := self._due(at_once=is_last)) is not None:
                response = self._take_effect(due, response, saved=saves)
        return response

    def _validates(self) -> bool:
        every = self.settings.validate_every
        return bool(every) and (self.step == self.settings.steps or self.step % every == 0)

    def _due(self, *, at_once: bool) -> PendingValidation | None:
        """Return the pending validation if its result takes effect now."""
        pending = self.trainer.pending_validation
        if pending is None or not (at_once or self.step >= pending.step + self.settings.validation_lag):
            return None
        return pending

    def _take_effect(self, pending: PendingValidation, response: Response | None, *, saved: bool) -> Response | None:
        """Wait for the result of a validation, add it to its checkpoint, and return the response of the guards.

        A `response` to the training step takes precedence. `saved`: the present step has a checkpoint.
        """
        assert self.validations is not None  # one is pending
        trainer, saver = self.trainer, self.saver
        trainer.pending_validation = None
        if pending.step < self.step:
            saver.wait()  # a write in progress still keeps the checkpoint that this validation is added to
        saver.needed_before = self._needed_before()
        measured, after = self.validations.finish(pending)
        response = response or after
        if pending.step < self.step:
            saver.rate(pending.step, measured)  # the guards' state is that of the present step
        elif saved:
            saver.record(self.step, trainer.metadata(measured, response=response))
        elif response is not None and response.stops:
            saver.save(self.step, trainer.tensors(), trainer.metadata(measured, response=response))
        return response

    def _go_back(self, response: Response | None) -> Response | None:
        """Continue from the checkpoint of a response that goes back, and return None; return any other response."""
        if response is None or response.checkpoint is None:
            return response
        rollbacks, (folder, metadata) = self.guards.rollbacks, response.checkpoint
        self.trainer.load(folder, metadata)
        self.trainer.pending_validation = None  # its result took effect before
        left, self.step = self.step, metadata["step"]
        self.guards.rolled_back(response.alarm, left, self.step, rollbacks)
        self.saver.remove_after(self.step)
        self.tracker.rewind(self.step)
        return None

    def _end(self, response: Response | None, stopped: bool) -> str | None:
        if self.step:
            self.saver.finish(self.step)
        self.tracker.finish(self.step)
        guard = None if response is None else response.alarm.guard
        if stopped or guard:
            by = f" by the {guard.replace('_', ' ')}" if guard else ""
            again = f" --{guard.replace('_', '-')}.action warn" if guard else ""
            self.tracker.say(f"stopped{by} after step {self.step}; continue with:")
            self.tracker.say(f"  python -m unified_trainer --resume {shlex.quote(str(self.output))}{again}")
        if (pending := self.trainer.pending_validation) is not None:
            self.tracker.say(f"the validation of step {pending.step} has no result yet: --resume starts it again")
        return guard

    def _needed_before(self) -> tuple[int, ...]:
        """Steps before which a checkpoint must stay: guards may go back to it, or a result is still added to it."""
        pending = self.trainer.pending_validation
        return (*self.guards.window_starts, *([pending.step + 1] if pending is not None else []))


def validate_once(
    trainer: Trainer, output: Path, tracker: Tracker, saver: Saver, validation: ValidationSource, step: int
) -> None:
    """Validate the weights after `step` training steps as a run does, and end; no guard acts on the result."""
    guards = trainer.guards.observers()
    validations = Validations(validation, trainer.roles["student"], guards, trainer.mesh, output, tracker, saver, 0)
    validations.finish(validations.start(step))
    tracker.finish(step)


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
        lag: int,
    ) -> None:
        """With a `lag` above 0 training goes on meanwhile: the weights of a validation are then copied."""
        self.lag = lag
        self._source, self._student, self._guards, self._mesh = source, student, guards, mesh
        self._output, self._tracker, self._saver = output, tracker, saver
        self._seconds = 0.0

    def start(self, step: int) -> PendingValidation:
        """Start the validation after `step` training steps; comparisons with the teacher are made at once."""
        self._seconds = 0.0
        with self._measured(step):
            with self._student.sampling_weights(ema=self._source.ema):
                weights = cpu_copy(self._student.weights) if self.lag else {}
                self._source.start(self._student, step)
            return PendingValidation(step, self._guards.compare_samples(), weights)

    def restart(self, pending: PendingValidation) -> None:
        """Start a validation again that was cut off, of a run that continues from a checkpoint."""
        with self._measured(pending.step), exchanged(self._student.weights, pending.weights):
            self._source.start(self._student, pending.step)

    def finish(self, pending: PendingValidation) -> tuple[dict[str, float], Response | None]:
        """Wait for the result and let it take effect; return its metrics and the response of the guards.

        The first validation is the baseline. Guards never act on it.
        """
        step, say = pending.step, self._tracker.say
        with self._measured(step):
            result = self._source.finish(self._output / "validation" / f"step_{step}", step)
        metrics = {name.removeprefix("validation/"): value for name, value in result.metrics.items()} | pending.looks
        alarm = self._guards.after_validation(step, metrics)
        logged = metrics | self._guards.verdicts | dict(result.costs) | {"seconds": self._seconds}
        self._tracker.log(step, {f"validation/{name}": value for name, value in logged.items()})
        self._tracker.log_samples(step, result.samples, result.contact_sheet)
        if result.warning is not None:
            say(f"warning: {result.warning}; the run goes on")
        shown = [] if "reward" in metrics else ["no reward is measured"]
        shown += [f"{name} {value:.3f}" for name, value in metrics.items() if "/" not in name]
        say(f"step {step}: validation: {'  '.join(shown)}")
        response = self._guards.respond(alarm, self._output, self._saver, say)
        self._saver.keep.check_metric(metrics)
        return metrics, response if step else None

    @contextmanager
    def _measured(self, step: int) -> Iterator[None]:
        """Add the time of what runs inside to that of the validation of `step`."""
        meter = Meter(self._mesh.device, lambda label: self._tracker.show_phase(f"validation: {label}"))
        with working_on(f"the validation of step {step}"), meter.measure():
            yield
        self._seconds += sum(meter.seconds().values())
