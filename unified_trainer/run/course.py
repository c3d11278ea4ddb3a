"""The course of a run: when it validates, saves, goes back and stops. The trainer makes the steps."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from unified_trainer.basics.errors import working_on
from unified_trainer.parallel.fsdp import cpu_copy
from unified_trainer.parallel.meter import Meter, step_cost
from unified_trainer.roles.ema import exchanged
from unified_trainer.run.checkpoint.manager import Saver, due
from unified_trainer.run.guards.base import Alarm
from unified_trainer.run.guards.responses import Response
from unified_trainer.run.guards.unmoved import UnmovedWeights
from unified_trainer.run.settings.config import RunConfig
from unified_trainer.run.stop_signal import StepDropped, stop_signal, too_slow_to_stop
from unified_trainer.run.tracking.tracker import Tracker
from unified_trainer.run.trainer import PendingValidation, Trainer
from unified_trainer.run.validation.report import ValidationSource


class Course:
    """A run from its first step to its last: a step is saved before it is validated, so a failure loses no step.

    `run` makes all steps; a caller from Python makes them one by one, after `begin`, and leaves with `end`.

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
        """`start` training steps are done. Without a `validation` the run has none; one alone is seen by no guard."""
        self.trainer, self.settings, self.output = trainer, run, output
        self.tracker, self.saver, self.mesh = tracker, saver, trainer.mesh
        self.guards = trainer.guards.observers() if run.validate_only else trainer.guards
        self.step = start  # training steps done
        self.response: Response | None = None  # of a guard that stopped the run
        self.stopping = False  # somebody asked for the end
        self.measured: tuple[int, dict[str, float]] = (-1, {})  # the last validation: its step and what it measured
        self.compiles = any(role.compiled for role in trainer.roles.values())  # in the next step
        self.save_due = due(run.checkpoint_every, run.checkpoint_minutes, self.mesh)
        self.unmoved = UnmovedWeights(trainer.roles, start, run.steps)
        self.warned: set[str] = set()  # what the run was warned of, once each
        self.validation, self.student = validation, trainer.roles["student"]
        self.lag = 0 if run.validate_only else run.validation_lag  # above 0, training goes on meanwhile
        self.validation_seconds = 0.0

    def run(self) -> str | None:
        """Run the training steps that are left; return the guard that stopped the run, by its section, or None.

        A first Ctrl-C, SIGTERM or SIGHUP finishes the step, or drops one that has changed nothing, saves and returns.
        A run that only validates measures the weights after `start` steps as others do, and ends.
        """
        if self.settings.validate_only:
            self._finish_validation(self._start_validation())
            self.tracker.finish(self.step)
            return None
        with stop_signal() as asked:
            self.begin()
            while self.step < self.settings.steps and not self.stopping and self.response is None:
                try:
                    self.next(asked)
                except StepDropped:
                    why = f"step {self.step + 1} was dropped before it changed anything"
                    self.tracker.say(f"{why}: --resume makes it again")
                    self.stopping = True
                    if self.step and not self.saver.has(self.step):  # all states are still those of its end
                        self.save()
            if self.step:
                self.saver.finish(self.step)
            self.end()
            return self.stopped_by

    @property
    def stopped_by(self) -> str | None:
        """The guard that stopped the run, by its section of the settings, or None."""
        return None if self.response is None else self.response.alarm.guard

    def next(self, asked: Sequence[int] = ()) -> dict[str, float]:
        """Make the next training step and return its metrics; save, validate and change the course as it is time.

        `asked` fills when the run is to stop. StepDropped if it does before the step changed anything.
        """
        metrics, alarm = self._train()
        self.stopping = self.mesh.any(bool(asked)) and self.step < self.settings.steps
        self.response = self._respond(alarm)
        return metrics

    def validate(self) -> dict[str, float]:
        """Validate the present weights unless that is done; return what was measured, under the names validation/..."""
        while self.measured[0] != self.step:  # also after one beside training, and after a roll-back
            pending = self.trainer.pending_validation or self._start_validation()
            response = self._take_effect(pending, self.response, saved=self.saver.has(self.step))
            self.response = self._go_back(response)
        return {f"validation/{name}": value for name, value in self.measured[1].items()}

    def save(self) -> None:
        """Write a checkpoint of the present step, also in place of one; DiskFull if there is no space for it."""
        step, metrics = self.measured
        about = self.trainer.metadata(metrics if step == self.step else {}, response=self.response)
        self.saver.save(self.step, self.trainer.tensors(), about, last=True)
        self.saver.finish(self.step)

    def begin(self) -> None:
        """Start the validation that the run owes, and remove what a killed process left behind."""
        pending = self.trainer.pending_validation
        if self.validation is None:
            self.trainer.pending_validation = None
        elif pending is not None:  # it was cut off
            with self._measured(pending.step), exchanged(self.student.weights, pending.weights):
                self.validation.start(self.student, pending.step)
        elif self.trainer.owes_validation or self.step == 0:
            self.trainer.pending_validation = self._start_validation()
        self.saver.needed_before = self._needed_before()
        self.saver.forget(self.step)
        self.saver.look_for_room(self.trainer.tensors())
        if (due := self._due(at_once=self.step == self.settings.steps)) is not None:
            self.response = self._go_back(self._take_effect(due, None, saved=self.step > 0))

    def _train(self) -> tuple[dict[str, float], Alarm | None]:
        """Make one training step and log it; return its metrics and the gravest alarm of the guards."""
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
        return metrics, alarm

    def _warn(self, topic: str, warning: str) -> None:
        """Print a warning, the first of its topic."""
        if warning and topic not in self.warned:
            self.warned.add(topic)
            self.tracker.say(warning)

    def _respond(self, alarm: Alarm | None) -> Response | None:
        """Save and validate if it is time, and change the course if guards ask for it."""
        self.saver.check()
        self.saver.needed_before = self._needed_before()
        response = self.guards.respond(alarm, self.output, self.saver, self.tracker.say)
        if response is None or response.stops:
            response = self._save_and_validate(response)
        return self._go_back(response)

    def _save_and_validate(self, response: Response | None) -> Response | None:
        is_last = self.step == self.settings.steps
        every = self.settings.validate_every if self.validation is not None else 0
        validates = every > 0 and (is_last or self.step % every == 0)
        if (due := self._due(at_once=validates)) is not None:
            response = self._take_effect(due, response, saved=False)
        ends = is_last or self.stopping or response is not None
        saves = ends or self.save_due(self.step)
        if saves:
            self.tracker.show_phase("checkpoint")
            about = self.trainer.metadata({}, owes_validation=validates, response=response)
            self.saver.save(self.step, self.trainer.tensors(), about, last=ends)
        if validates and (is_last or not (ends and self.lag)):  # else --resume starts it
            self.trainer.pending_validation = self._start_validation()
            if (due := self._due(at_once=is_last)) is not None:
                response = self._take_effect(due, response, saved=saves)
        return response

    def _due(self, *, at_once: bool) -> PendingValidation | None:
        """Return the pending validation if its result takes effect now."""
        pending = self.trainer.pending_validation
        if pending is None or not (at_once or self.step >= pending.step + self.lag):
            return None
        return pending

    def _take_effect(self, pending: PendingValidation, response: Response | None, *, saved: bool) -> Response | None:
        """Wait for the result of a validation, add it to its checkpoint, and return the response of the guards.

        A `response` to the training step takes precedence. `saved`: the present step has a checkpoint.
        """
        trainer, saver = self.trainer, self.saver
        trainer.pending_validation = None
        if pending.step < self.step:
            saver.wait()  # a write in progress still keeps the checkpoint that this validation is added to
        saver.needed_before = self._needed_before()
        measured, after = self._finish_validation(pending)
        self.measured = (pending.step, measured)
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
        left, self.step, self.measured = self.step, metadata["step"], (-1, {})
        self.guards.rolled_back(response.alarm, left, self.step, rollbacks)
        self.saver.remove_after(self.step)
        self.tracker.rewind(self.step)
        return None

    def end(self) -> None:
        """Say how far the run came, and how it is continued."""
        self.tracker.finish(self.step)
        guard = self.stopped_by
        if self.stopping or guard:
            by = f" by the {guard.replace('_', ' ')}" if guard else ""
            again = f" --{guard.replace('_', '-')}.action warn" if guard else ""
            self.tracker.say(f"stopped{by} after step {self.step}; continue with:")
            self.tracker.say(f"  python -m unified_trainer --resume {shlex.quote(str(self.output))}{again}")
        if (pending := self.trainer.pending_validation) is not None:
            self.tracker.say(f"the validation of step {pending.step} has no result yet: --resume starts it again")

    def _needed_before(self) -> tuple[int, ...]:
        """Steps before which a checkpoint must stay: guards may go back to it, or a result is still added to it."""
        pending = self.trainer.pending_validation
        return (*self.guards.window_starts, *([pending.step + 1] if pending is not None else []))

    def _start_validation(self) -> PendingValidation:
        """Start the validation of the present step; comparisons with the teacher are made at once."""
        assert self.validation is not None  # otherwise none is due
        self.validation_seconds = 0.0
        with self._measured(self.step):
            with self.student.sampling_weights(ema=self.validation.ema):
                weights = cpu_copy(self.student.weights) if self.lag else {}
                self.validation.start(self.student, self.step)
            return PendingValidation(self.step, self.guards.compare_samples(), weights)

    def _finish_validation(self, pending: PendingValidation) -> tuple[dict[str, float], Response | None]:
        """Wait for the result and let it take effect; return its metrics and the response of the guards.

        The first validation is the baseline. Guards never act on it.
        """
        assert self.validation is not None  # one is pending
        step, say = pending.step, self.tracker.say
        with self._measured(step):
            result = self.validation.finish(self.output / "validation" / f"step_{step}", step)
        metrics = {name.removeprefix("validation/"): value for name, value in result.metrics.items()} | pending.looks
        alarm = self.guards.after_validation(step, metrics)
        logged = metrics | self.guards.verdicts | dict(result.costs) | {"seconds": self.validation_seconds}
        shown = (result.samples, result.contact_sheet)
        self.tracker.log(step, {f"validation/{name}": value for name, value in logged.items()}, shown)
        if result.warning is not None:
            say(f"warning: {result.warning}; the run goes on")
        words = [] if "reward" in metrics else ["no reward is measured"]
        words += [f"{name} {value:.3f}" for name, value in metrics.items() if "/" not in name]
        say(f"step {step}: validation: {'  '.join(words)}")
        response = self.guards.respond(alarm, self.output, self.saver, say)
        self.saver.keep.check_metric(metrics)
        return metrics, response if step else None

    @contextmanager
    def _measured(self, step: int) -> Iterator[None]:
        """Add the time of what runs inside to that of the validation of `step`."""
        meter = Meter(self.mesh.device, lambda label: self.tracker.show_phase(f"validation: {label}"))
        with working_on(f"the validation of step {step}"), meter.measure():
            yield
        self.validation_seconds += sum(meter.seconds().values())
