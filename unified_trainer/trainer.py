"""The training loop: losses in, optimizer steps, validation and checkpoints out. It names no method and no family."""

import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unified_trainer.checkpoint import dcp, manifest
from unified_trainer.checkpoint.init_from import UNDER_WAY, initialise
from unified_trainer.checkpoint.manager import Saver
from unified_trainer.data.loader import Loader
from unified_trainer.errors import working_on
from unified_trainer.guards.responses import Guards, Response
from unified_trainer.meter import Meter, detail, phase
from unified_trainer.methods.base import Loss, Method
from unified_trainer.numerics import philox
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.rl.rollouts import Rollouts
from unified_trainer.roles.role import Trainable
from unified_trainer.roles.weight_copy import WeightCopy
from unified_trainer.step_cost import step_cost
from unified_trainer.stop_signal import stop_signal
from unified_trainer.tracking.tracker import Means, Tracker
from unified_trainer.types import Stateful
from unified_trainer.validation import ValidationSource
from unified_trainer.validation_schedule import Started, Validations

ENDED = object()  # in place of a loss, when a generator has no more


class Trainer:
    """Accumulates a method's losses, steps the roles they name, validates, saves and resumes."""

    def __init__(
        self,
        method: Method,
        roles: Mapping[str, Trainable],
        loader: Loader,
        mesh: Mesh,
        *,
        copies: Mapping[str, tuple[WeightCopy, str]] | None = None,
        seed: int,
        trained_sampler: Mapping[str, Any] | None = None,
        guards: Guards | None = None,
        rollouts: Rollouts | None = None,
    ) -> None:
        """`copies` are roles that copy weights, each with the name of the role it copies.

        `trained_sampler` is the sampler that the student is trained for, if any: it goes into the checkpoints.
        `guards` watch the run; by default none does. `rollouts` make the method's samples, if it asks for some.
        """
        self.method, self.roles, self.loader, self.mesh, self.seed = method, roles, loader, mesh, seed
        self.copies, self.trained_sampler = copies or {}, trained_sampler
        self.guards = guards or Guards((), roles["student"], mesh)
        self.messages: dict[str, None] = {}  # messages of the last step, in order
        self.validation_pending = False  # whether the loaded checkpoint was saved and its validation cut off
        self.warnings: list[str] = []  # of the checkpoint that the run continues from
        self.validation_started: Started | None = None  # of an earlier step, whose result has not taken effect yet
        copied = {name: role for name, (role, _) in self.copies.items()}
        self._stateful: dict[str, Stateful] = {**roles, **copied, "loader": loader, "method": method}
        if isinstance(rollouts, Stateful):  # workers that make them ahead of training
            self._stateful[UNDER_WAY] = rollouts

    def step(self, step: int) -> dict[str, float]:
        """Run one training step: the method's generators in lockstep, with one graph alive at a time."""
        self.messages = {}
        with working_on(f"method {type(self.method).__name__}, training step {step + 1}"):
            with phase("data"):
                parts = self.method.micro_batches(self.loader.batch(step))
            streams = partial(Streams, self.seed, step, self.mesh.device)
            generators = [self.method.step(part, step, streams(), self.mesh) for part in parts]
            means, updates, losses = Means(), 0, 0
            while True:
                loss, losses = None, losses + 1
                with phase("update", *self._update_shown(updates + 1)):
                    for number, generator in enumerate(generators, 1):
                        detail(f"loss {losses}")
                        last_loss, loss = loss, next(generator, ENDED)
                        self._check_lockstep(last_loss, loss)
                        if loss is not ENDED:
                            self._backward(loss, len(generators), means, last=number == len(generators))
                self._check_ranks(loss)
                if loss is ENDED:
                    return means.over(self.mesh)
                if loss.step_after:
                    with phase("optimizer"):
                        means.add(self.roles[loss.role].step())
                    updates, losses = updates + 1, 0

    def _update_shown(self, number: int) -> tuple[int, int]:
        """Return the number of an update of this step and the number of all; 0 is not shown.

        The batch plan knows one role's updates; a method that trains several roles makes more.
        """
        total = self.loader.updates
        if total > 1:
            return (number, total) if number <= total else (0, 0)  # after the last one
        return (number, 0) if number > 1 else (0, 0)

    def _backward(self, loss: Loss, generators: int, means: Means, *, last: bool) -> None:
        self.roles[loss.role].backward(loss.value / generators, last=last and loss.step_after)
        means.add(loss.metrics)
        self.messages |= dict.fromkeys(loss.messages)

    def _check_lockstep(self, before: Loss | object | None, loss: Loss | object) -> None:
        """Raise RuntimeError if two micro-batches of a step yield different losses."""
        if before is not None and _kind(before) != _kind(loss):
            name = type(self.method).__name__
            raise RuntimeError(f"{name}: micro-batches disagree on the next loss: {_kind(before)}, {_kind(loss)}")

    def _check_ranks(self, loss: Loss | object) -> None:
        self.mesh.assert_same(_kind(loss))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return everything a checkpoint holds; TypeError names a state that is no tensor."""
        found = {}
        for name, stateful in self._stateful.items():
            for key, value in stateful.state_dict().items():
                if not isinstance(value, torch.Tensor):
                    kind = type(stateful).__name__
                    raise TypeError(f"{kind}.state_dict: {key} is a {type(value).__name__}, checkpoints hold tensors")
                found[f"{name}/{key}"] = value
        return found if self.validation_started is None else found | self.validation_started.tensors

    def resume(self, run: Path) -> tuple[int, list[str]]:
        """Load the newest whole checkpoint; return the steps already done and which checkpoints were skipped, and why.

        A run that was stopped before its first checkpoint has done none.
        """
        if not manifest.folders(run / "checkpoints"):
            return 0, []
        folder, metadata, skipped = manifest.newest_sound(run, self.mesh)
        self._load(folder, metadata)
        self.validation_pending = metadata.get(manifest.VALIDATION_PENDING, False)
        if metadata.get(manifest.NOISE) != philox.NAME:
            self.warnings.append(
                f"warning: {folder} is of a version with another noise generator: the run goes on with noise of "
                f"{philox.NAME}, and not as it would have without the update"
            )
        return metadata["step"], skipped

    def _load(self, folder: Path, metadata: Mapping[str, Any]) -> None:
        """Set everything that a checkpoint holds to what it was there."""
        self.validation_started = Started.empty(metadata, self.roles["student"])
        state = self.tensors()
        dcp.load(folder, state, self.mesh)
        for name, stateful in self._stateful.items():
            prefix = f"{name}/"
            own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            stateful.load_state_dict(own)
        self.guards.load_state(metadata)

    def init_from(self, spec: str) -> str:
        """Load the trained roles' weights from RUN[@step][:ema], all or none; return what was loaded, in words.

        EMA and copies of weights start anew from them.
        """
        said = initialise({name: role.weights for name, role in self.roles.items()}, spec, self.mesh)
        for role in self.roles.values():
            role.restart_ema()
        for copy, source in self.copies.values():
            copy.update_from(self.roles[source])
        return said

    def run(
        self,
        output: Path,
        tracker: Tracker,
        validation: ValidationSource | None,
        saver: Saver,
        *,
        start: int,
        steps: int,
        checkpoint_every: int,
        validate_every: int,
        validation_lag: int,
    ) -> str | None:
        """Run training steps `start` to `steps`; return the guard that stopped the run, by its section, or None.

        A first Ctrl-C or SIGTERM finishes the step, saves and returns. A step is saved before it is validated, so that
        a validation that fails loses no step; what it measured is then added to the checkpoint. Its result takes effect
        `validation_lag` steps later, at the latest when the next validation starts or the run ends.
        """
        parts = (validation, self.roles["student"], self.guards, self.mesh, output, tracker, saver)
        validations = None if validation is None else Validations(*parts, lag=validation_lag)

        def is_due(step: int, *, last: bool) -> bool:
            """Return whether the result of the started validation takes effect now; after the last step it does."""
            started = self.validation_started
            return started is not None and (last or started.due(step, validation_lag))

        def take_effect(step: int, *, saved: bool, stopping: Response | None = None) -> Response | None:
            """Wait for the result of the validation, add it to its checkpoint, and return the response of the guards.

            A response `stopping` to the training step takes precedence.
            """
            started, self.validation_started = self.validation_started, None
            if started.step < step:
                saver.wait()  # what is written now still keeps the checkpoint that this validation is added to
            saver.needed_before = self._needed_before
            measured, response = validations.finish(started)
            response = stopping or response
            if started.step < step:
                saver.rate(started.step, measured)  # its guards are not yet those of the present step
            elif saved:
                saver.record(step, self.metadata(measured, response=response))
            elif response is not None and response.stops:
                saver.save(step, self.tensors(), self.metadata(measured, response=response))
            return response

        def go_back(response: Response, step: int) -> int:
            """Continue from an earlier checkpoint and return its step."""
            before, (folder, metadata) = self.guards.rollbacks, response.checkpoint
            self._load(folder, metadata)
            self.validation_started = None  # it took effect before
            to = metadata["step"]
            self.guards.rolled_back(response.alarm, step, to, before)
            saver.remove_after(to)
            tracker.rewind(to)
            return to

        def end(step: int, response: Response | None, *, stopped: bool) -> str | None:
            saver.finish(step)
            tracker.finish(step)
            guard = None if response is None else response.alarm.guard
            if stopped or guard:
                by = f" by the {guard.replace('_', ' ')}" if guard else ""
                tracker.say(f"stopped{by} after step {step}; continue with:")
                again = f" --{guard.replace('_', '-')}.action warn" if guard else ""
                tracker.say(f"  python -m unified_trainer --resume {shlex.quote(str(output))}{again}")
            if (left := self.validation_started) is not None:
                tracker.say(f"the validation of step {left.step} has no result yet: --resume starts it again")
            return guard

        with stop_signal() as asked:
            if validation is None:
                self.validation_started = None
            elif self.validation_started is not None:
                validations.restart(self.validation_started)
            elif self.validation_pending or start == 0:
                self.validation_started = validations.start(start)
            saver.needed_before = self._needed_before
            saver.forget(start)  # what a process that was killed had no time for
            saver.look_for_room(self.tensors())
            done = start
            if is_due(start, last=start == steps):
                response = take_effect(start, saved=start > 0)
                if response is not None and response.checkpoint is not None:
                    done = go_back(response, done)
                elif response is not None or start == steps:
                    return end(start, response, stopped=False)
            while done < steps:
                meter = Meter(self.mesh.device, tracker.show_phase)
                with meter.measure():
                    metrics = self.step(done)
                done += 1
                alarm = self.guards.after_step(done, metrics)
                metrics |= self.guards.verdicts | self.guards.metrics | step_cost(meter, self.mesh, self.loader.samples)
                tracker.log(done, {f"train/{name}": value for name, value in metrics.items()}, advance=True)
                for message in self.messages:
                    tracker.say(f"step {done}: {message}")
                stop = self.mesh.any(bool(asked)) and done < steps
                saver.check()
                saver.needed_before = self._needed_before
                response = self.guards.respond(alarm, output, saver, tracker.say)
                if response is None or response.stops:
                    validating = validation is not None and (done % validate_every == 0 or done == steps)
                    if is_due(done, last=validating):
                        response = take_effect(done, saved=False, stopping=response)
                    saving = stop or done == steps or bool(checkpoint_every and done % checkpoint_every == 0)
                    saving = saving or response is not None
                    if saving:
                        tracker.show_phase("checkpoint")
                        about = self.metadata({}, validation_pending=validating, response=response)
                        final = stop or done == steps or (response is not None and response.stops)
                        saver.save(done, self.tensors(), about, last=final)
                    ends = stop or response is not None
                    if validating and (done == steps or not (ends and validation_lag)):  # else --resume starts it
                        self.validation_started = validations.start(done)
                        if is_due(done, last=done == steps):
                            response = take_effect(done, saved=saving, stopping=response)
                if response is not None and response.checkpoint is not None:
                    done, response = go_back(response, done), None
                if stop or response is not None or done == steps:
                    return end(done, response, stopped=stop)
        return None

    @property
    def _needed_before(self) -> tuple[int, ...]:
        """Steps before which a checkpoint must stay: guards may go back to it, or a validation is still added to it."""
        started = self.validation_started
        return (*self.guards.window_starts, *([started.step + 1] if started is not None else []))

    def metadata(
        self, metrics: Mapping[str, float], *, validation_pending: bool = False, response: Response | None = None
    ) -> dict[str, Any]:
        """Return what a checkpoint's manifest says of the run and of this step.

        `validation_pending` says that the step's validation is still to come: a resumed run then begins with it.
        `response` is what the guards do after the step.
        """
        return {
            "method": type(self.method).__name__,
            "sampler": self.trained_sampler,
            "metrics": dict(metrics),
            manifest.VALIDATION_PENDING: validation_pending,
            manifest.NOISE: philox.NAME,
            manifest.VALIDATION_STARTED: self.validation_started.metadata if self.validation_started else None,
            manifest.STOPPED_BY: response.alarm.guard if response is not None and response.stops else None,
            **self.guards.state,
        }


def _kind(loss: Loss | object) -> str:
    """Say which loss comes next, to compare micro-batches and ranks."""
    if loss is ENDED:
        return "end of the step"
    return f"loss of {loss.role}, with{'' if loss.step_after else 'out'} a step after it"
