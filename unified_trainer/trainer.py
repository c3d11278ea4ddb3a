"""The loop: it names no method and no family."""

import os
import shlex
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from unified_trainer.checkpoint import dcp as checkpoint
from unified_trainer.checkpoint import manifest
from unified_trainer.checkpoint.init_from import initialise
from unified_trainer.checkpoint.manager import Saver
from unified_trainer.data.loader import Loader
from unified_trainer.methods.base import Loss, Method, Stateful
from unified_trainer.parallel.device import peak_memory
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.rewards.hacking_monitor import HackingMonitor, HackingMonitorConfig
from unified_trainer.roles.role import Trainable
from unified_trainer.roles.weight_copy import WeightCopy
from unified_trainer.tracking import Means, Stopwatch, Tracker
from unified_trainer.validation import Validation

# What a second request to stop does, even to a process that was started with the first one ignored, as shells do in
# the background.
AT_ONCE = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class Trainer:
    """Accumulates a method's losses, moves the roles they name, validates, saves and resumes."""

    def __init__(
        self,
        method: Method,
        roles: Mapping[str, Trainable],
        loader: Loader,
        mesh: Mesh,
        *,
        weight_copies: Mapping[str, WeightCopy] | None = None,
        seed: int,
        contract: Mapping[str, Any] | None = None,
        hacking_monitor: HackingMonitor | None = None,
    ) -> None:
        """`contract` is the sampler that the student is trained for, if for one: it goes into the checkpoints.

        `hacking_monitor` watches the reward, if the method trains on one.
        """
        self.method, self.roles, self.loader, self.mesh, self.seed = method, roles, loader, mesh, seed
        self.weight_copies, self.contract = weight_copies or {}, contract
        self.hacking_monitor = hacking_monitor or HackingMonitor(HackingMonitorConfig(action="off"), ())
        self.words: dict[str, None] = {}  # what the last step had to say, in order
        self._stateful: dict[str, Stateful] = {**roles, **self.weight_copies, "loader": loader}
        if isinstance(method, Stateful):
            self._stateful["method"] = method

    def step(self, step: int) -> dict[str, float]:
        """One training step: the method's micro_batches in lockstep, one graph alive at a time."""
        self.words = {}
        parts = self.method.micro_batches(self.loader.batch(step))
        micro_batches = [self.method.step(part, step, Streams(self.seed, step), self.mesh) for part in parts]
        means = Means()
        while (loss := self._round(micro_batches, means)) is not None:
            if loss.step_after:
                means.add(self.roles[loss.role].step())
        return means.over(self.mesh)

    def _round(self, micro_batches: list[Iterator[Loss]], means: Means) -> Loss | None:
        """The next loss of every generator, each backward at once; the last of them, or None when all have ended."""
        ended = object()
        told = set()
        loss = None
        for number, generator in enumerate(micro_batches, 1):
            loss = next(generator, ended)
            told.add(None if loss is ended else (loss.role, loss.step_after))
            if len(told) > 1:
                raise RuntimeError(f"{type(self.method).__name__}: micro-batches disagree on the next loss: {told}")
            if loss is not ended:
                last = loss.step_after and number == len(micro_batches)
                self.roles[loss.role].backward(loss.value / len(micro_batches), last=last)
                means.add(loss.metrics)
                self.words |= dict.fromkeys(loss.messages)
        loss = None if loss is ended else loss
        self.mesh.assert_same(
            f"loss of {loss.role}, which {'moves' if loss.step_after else 'stays'}" if loss else "end of the step"
        )
        return loss

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything a checkpoint holds."""
        return {
            f"{name}/{key}": value for name, kept in self._stateful.items() for key, value in kept.state_dict().items()
        }

    def resume(self, run: Path) -> tuple[int, list[str]]:
        """Continue from the newest whole checkpoint; the number of steps already done, and which were skipped why.

        A run that was stopped before its first checkpoint has done none.
        """
        if not manifest.folders(run / "checkpoints"):
            return 0, []
        folder, known, skipped = checkpoint.newest_sound(run, self.mesh)
        state = self.tensors()
        checkpoint.load(folder, state, self.mesh)
        for name, kept in self._stateful.items():
            prefix = f"{name}/"
            kept.load_state_dict(
                {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            )
        self.hacking_monitor.reference = dict(known.get("hacking_monitor", {}))
        return known["step"], skipped

    def init_from(self, spec: str) -> str:
        """Take the trained roles' weights from RUN[@step][:ema], all or none; what was carried, in words.

        Averages and weight_copies start anew from them.
        """
        said = initialise({name: role.weights for name, role in self.roles.items()}, spec, self.mesh)
        for role in self.roles.values():
            role.restart_ema()
        for weight_copy in self.weight_copies.values():
            weight_copy.update_from(self.roles["student"])
        return said

    def run(
        self,
        output: Path,
        tracker: Tracker,
        validation: Validation,
        saver: Saver,
        *,
        start: int,
        steps: int,
        checkpoint_every: int,
        validate_every: int,
    ) -> bool:
        """Steps `start` to `steps`; a first Ctrl-C or SIGTERM ends the step, saves and returns.

        So does a hacking_monitor that is to stop the run: True if it did.
        """

        def validate(step: int) -> tuple[dict[str, float], str | None]:
            metrics = validation.run(self.roles["student"], output / "validation" / f"step_{step}")
            short = {name.removeprefix("validation/"): value for name, value in metrics.items()}
            alarm = self.hacking_monitor.watch(short)
            tracker.log(
                step,
                metrics | ({"validation/hacking_monitor": float(alarm is not None)} if self.hacking_monitor.on else {}),
            )
            shown = {name: value for name, value in short.items() if "/" not in name}
            tracker.say(f"step {step}: " + "  ".join(f"{name} {value:.3f}" for name, value in shown.items()))
            if alarm is not None:
                tracker.say(f"warning: the reward looks hacked: {alarm}; see {output / 'validation'}")
            saver.keep.check_metric(short)
            return short, alarm

        with stop_signal() as asked:
            if validate_every and start == 0:
                validate(0)
            saver.forget(start)  # what a process that was killed had no time for
            watch = Stopwatch()
            for step in range(start, steps):
                metrics = self.step(step)
                done = step + 1
                self.hacking_monitor.note(metrics)
                metrics["samples_per_second"] = watch.rate(self.loader.samples)
                metrics["peak_memory_gib_max"] = self.mesh.max(peak_memory(self.mesh.device))
                tracker.log(done, {f"train/{name}": value for name, value in metrics.items()}, advance=True)
                for words in self.words:
                    tracker.say(f"step {done}: {words}")
                stop = self.mesh.any(bool(asked)) and done < steps
                saver.check()
                measured: dict[str, float] = {}
                alarm = None
                if validate_every and (done % validate_every == 0 or done == steps):
                    measured, alarm = validate(done)
                    watch.restart()
                hacked = self.hacking_monitor.stops and self.mesh.any(alarm is not None)
                stop = stop or hacked
                if stop or done == steps or (checkpoint_every and done % checkpoint_every == 0):
                    # after the step's validation, which a resumed run does not repeat
                    saver.save(done, self.tensors(), self.metadata(measured))
                if stop or done == steps:
                    saver.finish(done)
                if stop:
                    who = "stopped by the hacking_monitor" if hacked else "stopped"
                    tracker.say(f"{who} after step {done}; continue with:")
                    again = " --hacking_monitor.action warn" if hacked else ""
                    tracker.say(f"  python -m unified_trainer --resume {shlex.quote(str(output))}{again}")
                    return hacked
        return False

    def metadata(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        """What a checkpoint's manifest says of it."""
        name, reference = type(self.method).__name__, dict(self.hacking_monitor.reference)
        return {"method": name, "sampler": self.contract, "metrics": dict(metrics), "hacking_monitor": reference}


@contextmanager
def stop_signal() -> Iterator[list[int]]:
    """A list that fills when the process is asked to stop; the second request stops at once."""
    asked: list[int] = []

    def note(number: int, _frame: object) -> None:
        asked.append(number)
        signal.signal(number, AT_ONCE[number])
        os.write(2, b"\nends after this step and saves; asked once more, it stops at once\n")  # safe inside a handler

    previous = {number: signal.signal(number, note) for number in AT_ONCE}
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
