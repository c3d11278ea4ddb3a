"""One training step: losses in, optimizer steps out. And what a checkpoint holds. It names no method and no family."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unified_trainer.basics.errors import working_on, writing
from unified_trainer.basics.own_files import without_link
from unified_trainer.basics.types import Stateful
from unified_trainer.data.batch_plan import Position
from unified_trainer.data.loader import Loader
from unified_trainer.methods.base import Loss, Method
from unified_trainer.methods.rl.buffer import ExperienceBuffer
from unified_trainer.methods.rl.rollouts import Rollouts
from unified_trainer.numerics import philox
from unified_trainer.parallel.fsdp import cpu_copy
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.meter import detail, phase
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.role import Trainable
from unified_trainer.roles.weight_copy import WeightCopy
from unified_trainer.run.checkpoint import dcp, manifest
from unified_trainer.run.checkpoint.init_from import UNDER_WAY, initialise
from unified_trainer.run.guards.responses import Guards, Response
from unified_trainer.run.settings.config import RunConfig
from unified_trainer.run.tracking.tracker import Means

ENDED = object()  # in place of a loss, when a generator has no more


@dataclass(frozen=True)
class PendingValidation:
    """A validation that was started after `step` training steps."""

    step: int
    looks: dict[str, float]  # how its samples compare with the teacher's
    weights: dict[str, Tensor]  # this rank's part of the weights that it samples with, in CPU memory

    @property
    def metadata(self) -> dict[str, Any]:
        """Its entry in a checkpoint's manifest."""
        return {"step": self.step, "looks": self.looks}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its tensors in a checkpoint."""
        return {f"validation/student/{name}": weight for name, weight in self.weights.items()}

    @classmethod
    def of_checkpoint(cls, metadata: Mapping[str, Any], student: Trainable) -> "PendingValidation | None":
        """Return the pending validation of a checkpoint's manifest, if any; its weights are still to be loaded."""
        held = metadata.get(manifest.VALIDATION_STARTED)
        return None if held is None else cls(held["step"], held["looks"], cpu_copy(student.weights))


class Trainer:
    """Accumulates a method's losses and steps the roles they name; gathers and restores the state of a run."""

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
        buffer: ExperienceBuffer | None = None,
    ) -> None:
        """`copies` are roles that copy weights, each with the name of the role it copies.

        `trained_sampler` is the sampler that the student is trained for, if any: it goes into the checkpoints.
        `guards` watch the run; by default none does. `rollouts` make the method's samples, if it asks for some;
        `buffer` stores them.
        """
        self.method, self.roles, self.loader, self.mesh, self.seed = method, roles, loader, mesh, seed
        self.copies, self.trained_sampler = copies or {}, trained_sampler
        self.guards = guards or Guards((), roles["student"], mesh)
        self.done = 0  # training steps
        self.messages: dict[str, None] = {}  # messages of the last step, in order
        self.owes_validation = False  # whether the loaded checkpoint has no validation yet: run it first
        self.warnings: list[str] = []  # of the checkpoint that the run continues from
        self.pending_validation: PendingValidation | None = None
        copied = {name: role for name, (role, _) in self.copies.items()}
        self._stateful: dict[str, Stateful] = {**roles, **copied, "loader": loader, "method": method}
        if isinstance(rollouts, Stateful):  # workers that make them ahead of training
            self._stateful[UNDER_WAY] = rollouts
        self._buffer = buffer
        if buffer is not None:
            self._stateful["buffer"] = buffer

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
                loss: Loss | object | None = None
                losses += 1
                with phase("update", *self._update_shown(updates + 1)):
                    for number, generator in enumerate(generators, 1):
                        detail(f"loss {losses}")
                        last_loss, loss = loss, next(generator, ENDED)
                        self._check_lockstep(last_loss, loss)
                        if isinstance(loss, Loss):
                            last = number == len(generators) and loss.step_after
                            self.roles[loss.role].backward(loss.value / len(generators), last=last)
                            means.add(loss.metrics)
                            self.messages |= dict.fromkeys(loss.messages)
                self.mesh.assert_same(_kind(loss))
                if not isinstance(loss, Loss):
                    self.done = step + 1
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

    def _check_lockstep(self, previous: Loss | object | None, loss: Loss | object) -> None:
        """Raise RuntimeError if two micro-batches of a step yield different losses."""
        if previous is not None and _kind(previous) != _kind(loss):
            name = type(self.method).__name__
            raise RuntimeError(f"{name}: micro-batches disagree on the next loss: {_kind(previous)}, {_kind(loss)}")

    def tensors(self) -> dict[str, Tensor]:
        """Return everything a checkpoint holds; TypeError names a state that is no tensor."""
        tensors = {}
        for name, stateful in self._stateful.items():
            for key, value in stateful.state_dict().items():
                if not isinstance(value, Tensor):
                    kind = type(stateful).__name__
                    raise TypeError(f"{kind}.state_dict: {key} is a {type(value).__name__}, checkpoints hold tensors")
                tensors[f"{name}/{key}"] = value
        return tensors if self.pending_validation is None else tensors | self.pending_validation.tensors

    def resume(self, run: Path) -> tuple[int, list[str]]:
        """Load the newest whole checkpoint; return the steps already done and which checkpoints were skipped, and why.

        A run that was stopped before its first checkpoint has done none.
        """
        if not manifest.folders(run / "checkpoints"):
            return 0, []
        folder, metadata, skipped = manifest.newest_sound(run, self.mesh)
        self.load(folder, metadata)
        self.owes_validation = metadata.get(manifest.VALIDATION_PENDING, False)
        if metadata.get(manifest.NOISE) != philox.NAME:
            self.warnings.append(
                f"warning: {folder} is of a version with another noise generator: the run goes on with noise of "
                f"{philox.NAME}, and not as it would have without the update"
            )
        return metadata["step"], skipped

    def load(self, folder: Path, metadata: Mapping[str, Any]) -> None:
        """Set everything that a checkpoint holds to what it was there."""
        self.pending_validation = PendingValidation.of_checkpoint(metadata, self.roles["student"])
        if self._buffer is not None:
            self._buffer.allocate(dcp.shapes(folder, "buffer/columns"))
        state = self.tensors()
        dcp.load(folder, state, self.mesh)
        for name, stateful in self._stateful.items():
            prefix = f"{name}/"
            own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            stateful.load_state_dict(own)
        self.done = metadata["step"]
        if held := metadata.get(manifest.POSITION):
            self.loader.go_on(Position(**held))
        self.guards.load_state(metadata)

    def init_from(self, spec: str) -> str:
        """Load the trained roles' weights from RUN[@step][:ema], all or none; return what was loaded, in words.

        EMA and copies of weights start anew from them.
        """
        line = initialise({name: role.weights for name, role in self.roles.items()}, spec, self.mesh)
        for role in self.roles.values():
            role.restart_ema()
        for copy, source in self.copies.values():
            copy.update_from(self.roles[source])
        return line

    def metadata(
        self, metrics: Mapping[str, float], *, owes_validation: bool = False, response: Response | None = None
    ) -> dict[str, Any]:
        """Return what a checkpoint's manifest says of the run and of this step.

        With `owes_validation` the step's validation is still to come: a resumed run begins with it. `response` is the
        change of course after the step.
        """
        return {
            "method": type(self.method).__name__,
            "sampler": self.trained_sampler,
            "metrics": dict(metrics),
            manifest.VALIDATION_PENDING: owes_validation,
            manifest.NOISE: philox.NAME,
            manifest.POSITION: dataclasses.asdict(self.loader.position(self.done)),
            manifest.VALIDATION_STARTED: self.pending_validation.metadata if self.pending_validation else None,
            manifest.STOPPED_BY: response.alarm.guard if response is not None and response.stops else None,
            **self.guards.state,
        }


def _kind(loss: Loss | object) -> str:
    """Say which loss comes next, to compare micro-batches and ranks."""
    if not isinstance(loss, Loss):
        return "end of the step"
    return f"loss of {loss.role}, with{'' if loss.step_after else 'out'} a step after it"


class ProfiledTrainer(Trainer):
    """A trainer of which torch's profiler traces one step, on each rank: RUN/profile/step_N_rank_R.json.

    It is step `profile_step` after the run was started or resumed, or the last one where fewer are left.
    """

    def __init__(self, *parts: Any, run: RunConfig, folder: Path, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._left, self._last, self._folder = run.profile_step, run.steps, folder / "profile"

    def step(self, step: int) -> dict[str, float]:
        self._left -= 1
        if self._left and not (self._left > 0 and step + 1 == self._last):
            return super().step(step)
        self._left = 0
        with torch.profiler.profile() as profiler:  # of the CPU, and of an accelerator that it knows
            metrics = super().step(step)
        with writing(self._folder):
            self._folder.mkdir(exist_ok=True)
            name = f"step_{step + 1}_rank_{self.mesh.rank}.json"
            profiler.export_chrome_trace(str(without_link(self._folder / name)))
        return metrics
