"""The loop: it names no method and no family."""

import shlex
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from unified_trainer import checkpoint
from unified_trainer.data.feed import Feed
from unified_trainer.methods.base import Loss, Method
from unified_trainer.parallel.device import peak_memory
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.role import Trainable
from unified_trainer.tracking import Means, Stopwatch, Tracker
from unified_trainer.validation import Validation


class Trainer:
    """Accumulates a method's losses, moves the roles they name, validates, saves and resumes."""

    def __init__(
        self,
        method: Method,
        roles: Mapping[str, Trainable],
        feed: Feed,
        mesh: Mesh,
        *,
        seed: int,
    ) -> None:
        self.method, self.roles, self.feed, self.mesh, self.seed = method, roles, feed, mesh, seed

    def step(self, step: int) -> dict[str, float]:
        """One training step: the method's generators in lockstep, one graph alive at a time."""
        parts = self.method.generators(self.feed.batch(step))
        generators = [self.method.step(part, step, Streams(self.seed, step), self.mesh) for part in parts]
        means = Means()
        while (loss := self._round(generators, means)) is not None:
            if loss.moves:
                means.add(self.roles[loss.role].step())
        return means.over(self.mesh)

    def _round(self, generators: list[Iterator[Loss]], means: Means) -> Loss | None:
        """The next loss of every generator, each backward at once; the last of them, or None when all have ended."""
        ended = object()
        told = set()
        loss = None
        for number, generator in enumerate(generators, 1):
            loss = next(generator, ended)
            told.add(None if loss is ended else (loss.role, loss.moves))
            if len(told) > 1:
                raise RuntimeError(f"{type(self.method).__name__}: micro-batches disagree on the next loss: {told}")
            if loss is not ended:
                last = loss.moves and number == len(generators)
                self.roles[loss.role].backward(loss.value / len(generators), last=last)
                means.add(loss.metrics)
        loss = None if loss is ended else loss
        self.mesh.agree(
            f"loss of {loss.role}, which {'moves' if loss.moves else 'stays'}" if loss else "end of the step"
        )
        return loss

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything a checkpoint holds."""
        return {f"{name}/{key}": value for name, role in self.roles.items() for key, value in role.state_dict().items()}

    def resume(self, run: Path) -> int:
        """Continue from the newest complete checkpoint; the number of steps already done."""
        folder, manifest = checkpoint.newest(run)
        state = self.tensors()
        checkpoint.load(folder, state, self.mesh)
        for name, role in self.roles.items():
            role.after_load({"updates": state[f"{name}/updates"]})
        return manifest["step"]

    def init_from(self, run: Path) -> str:
        """Take the trained roles' weights from another run; what was carried, in words."""
        folder, _ = checkpoint.newest(run)
        weights = {key: value for key, value in self.tensors().items() if "/weights/" in key}
        checkpoint.load(folder, weights, self.mesh)
        for role in self.roles.values():
            role.restart_average()
        return f"{', '.join(self.roles)} from {folder}"

    def run(
        self,
        output: Path,
        tracker: Tracker,
        validation: Validation,
        *,
        start: int,
        steps: int,
        checkpoint_every: int,
        keep_last: int,
        validate_every: int,
    ) -> None:
        """Steps `start` to `steps`; a first Ctrl-C or SIGTERM ends the step, saves and returns."""

        def validate(step: int) -> None:
            metrics = validation.run(self.roles["student"], output / "validation" / f"step_{step}")
            tracker.log(step, metrics)
            tracker.say(f"step {step}: " + "  ".join(f"{k.split('/')[1]} {v:.3f}" for k, v in metrics.items()))

        def save(step: int) -> None:
            checkpoint.save(output / "checkpoints", step, self.tensors(), self.mesh, keep_last)

        with _stop_signal() as asked:
            if validate_every and start == 0:
                validate(0)
            watch = Stopwatch()
            for step in range(start, steps):
                metrics = self.step(step)
                done = step + 1
                metrics["samples_per_second"] = watch.rate(self.feed.samples)
                metrics["peak_memory_gib_max"] = self.mesh.largest(peak_memory(self.mesh.device))
                tracker.log(done, {f"train/{name}": value for name, value in metrics.items()}, advance=True)
                stop = self.mesh.any(bool(asked)) and done < steps
                if validate_every and (done % validate_every == 0 or done == steps):
                    validate(done)
                    watch.restart()
                if stop or done == steps or (checkpoint_every and done % checkpoint_every == 0):
                    save(done)  # after the step's validation, which a resumed run does not repeat
                if stop:
                    tracker.say(f"stopped after step {done}; continue with:")
                    tracker.say(f"  python -m unified_trainer --resume {shlex.quote(str(output))}")
                    return


@contextmanager
def _stop_signal() -> Iterator[list[int]]:
    """A list that fills when the process is asked to stop; the second request stops at once."""
    asked: list[int] = []

    def note(number: int, _frame: object) -> None:
        asked.append(number)
        signal.signal(number, previous[number])

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
