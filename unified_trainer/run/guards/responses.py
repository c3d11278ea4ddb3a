"""The actions on the alarms of all guards: a line, an end of the run, or a return to a checkpoint."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unified_trainer.parallel.mesh import Mesh
from unified_trainer.roles.role import Trainable
from unified_trainer.run.checkpoint import manifest
from unified_trainer.run.checkpoint.manager import Saver
from unified_trainer.run.guards.base import Action, Alarm, Guard
from unified_trainer.run.guards.teacher_probe import TeacherProbe

SEVERITY: tuple[Action, ...] = ("off", "warn", "roll_back", "stop")


@dataclass(frozen=True)
class Response:
    """A change of course after an alarm that all ranks agree on: the run stops, or goes back to a checkpoint."""

    alarm: Alarm
    checkpoint: tuple[Path, manifest.Manifest] | None = None  # to go back to

    @property
    def stops(self) -> bool:
        """Whether the run ends."""
        return self.checkpoint is None


class Guards:
    """The guards of a run, the decision on their alarms, and the roll-backs so far."""

    def __init__(
        self, guards: Sequence[Guard], student: Trainable, mesh: Mesh, probe: TeacherProbe | None = None
    ) -> None:
        """`student` is the role that starts from its EMA weights, and whose learning rate falls, at a roll-back.

        `probe` compares its samples with the teacher's at every validation.
        """
        self._guards, self._student, self._mesh, self._probe = list(guards), student, mesh, probe
        self.rollbacks: list[dict[str, Any]] = []  # from, to, guard, why, rate_factor of each
        self._acting = any(guard.config.action in ("stop", "roll_back") for guard in guards)

    @property
    def state(self) -> dict[str, Any]:
        """All that later decisions depend on, as metadata of a checkpoint."""
        states: dict[str, Any] = {"rollbacks": list(self.rollbacks)}
        for guard in self._guards:
            states |= guard.state
        return states if self._probe is None else states | self._probe.state

    def load_state(self, metadata: Mapping[str, Any]) -> None:
        """Continue from the metadata of a checkpoint, with the learning rate that its roll-backs left."""
        for guard in self._guards:
            guard.load_state(metadata)
        if self._probe is not None:
            self._probe.load_state(metadata)
        self._set_rollbacks(metadata.get("rollbacks", []))

    def observers(self) -> "Guards":
        """Return the comparison with the teacher's samples alone, which raises no alarm."""
        return Guards((), self._student, self._mesh, self._probe)

    @property
    def metrics(self) -> dict[str, float]:
        """The number of roll-backs, of a run that may have any."""
        may = self.rollbacks or any(guard.config.action == "roll_back" for guard in self._guards)
        return {"rollbacks": float(len(self.rollbacks))} if may else {}

    @property
    def verdicts(self) -> dict[str, float]:
        """Return what each guard found after the last step or validation: 1 an alarm, 0 none, nothing if undecided."""
        return {name: value for guard in self._guards for name, value in guard.verdict.items()}

    @property
    def window_starts(self) -> tuple[int, ...]:
        """The first steps of windows whose alarm would go back to a checkpoint from before them."""
        rolling = [guard for guard in self._guards if guard.config.action == "roll_back"]
        return tuple(start for guard in rolling for start in guard.window_starts)

    def compare_samples(self) -> dict[str, float]:
        """Return how the student's samples compare with the teacher's, as metrics of a validation (a collective)."""
        return {} if self._probe is None else self._probe.run(self._student)

    def after_step(self, step: int, metrics: Mapping[str, float]) -> Alarm | None:
        """Return the gravest alarm after training step `step`, equal on all ranks (a collective), or None."""
        return self._agreed([guard.after_step(step, metrics) for guard in self._guards])

    def after_validation(self, step: int, metrics: Mapping[str, float]) -> Alarm | None:
        """Return the gravest alarm after a validation, equal on all ranks (a collective), or None."""
        return self._agreed([guard.after_validation(step, metrics) for guard in self._guards])

    def respond(self, alarm: Alarm | None, run: Path, saver: Saver, say: Callable[[str], None]) -> Response | None:
        """Say an alarm, and return what the run does about it; None if it goes on. All ranks must call it.

        A roll-back goes to the newest sound checkpoint that was saved before the first step of the alarm's window. If
        there is none, or the run went back `max_rollbacks` times already, it stops instead.
        """
        if alarm is None:
            return None
        guard, then, response = self._guard(alarm.guard), "", Response(alarm)
        if alarm.action == "roll_back":
            most, count = guard.config.max_rollbacks, len(self.rollbacks)
            saver.wait()
            checkpoint = manifest.newest_sound_before(run, alarm.first, self._mesh)
            if count >= most:
                then = f"; {count} roll-backs are as many as {alarm.guard}.max_rollbacks allows"
            elif checkpoint is None:
                then = f"; no checkpoint is from before step {alarm.first}, lower checkpoint_every"
            else:
                response = Response(alarm, checkpoint)
                then = f"; back to step {checkpoint[1]['step']} (roll-back {count + 1} of {most}), with "
                then += f"{guard.config.rate_factor:g} times the student's learning rate"
        say(f"warning: {guard.suspicion} suspected: {alarm.why}{then}; see {run / 'validation'}")
        return None if alarm.action == "warn" else response

    def rolled_back(self, alarm: Alarm, step: int, to: int, before: Sequence[dict[str, Any]]) -> None:
        """Finish a roll-back from `step` after the checkpoint of step `to` was loaded.

        `before` are the roll-backs until now, which the checkpoint may not know. The student goes on from its EMA
        weights. The moments of its optimizer and its counter of updates stay those of the checkpoint: after a reset
        AdamW's first steps would be its largest.
        """
        factor = self._guard(alarm.guard).config.rate_factor
        self._student.start_from_ema()
        new = {"from": step, "to": to, "guard": alarm.guard, "why": alarm.why, "rate_factor": factor}
        self._set_rollbacks([*before, new])

    def _set_rollbacks(self, rollbacks: Sequence[dict[str, Any]]) -> None:
        self.rollbacks = list(rollbacks)
        self._student.scale_learning_rate(math.prod(rollback["rate_factor"] for rollback in self.rollbacks))

    def _guard(self, name: str) -> Guard:
        return next(guard for guard in self._guards if guard.name == name)

    def _agreed(self, alarms: Sequence[Alarm | None]) -> Alarm | None:
        """Return the gravest alarm of all ranks, with this rank's own words if it has some."""
        raised = [alarm for alarm in alarms if alarm is not None and alarm.action != "off"]
        own = max(raised, key=lambda alarm: SEVERITY.index(alarm.action), default=None)
        if not self._acting:
            return own
        names = [guard.name for guard in self._guards]
        row = [0, 0, 0] if own is None else [SEVERITY.index(own.action), names.index(own.guard), own.first]
        severity, number, first = max(
            self._mesh.all_gather_cpu(torch.tensor([row])).tolist(), key=lambda reported: reported[0]
        )
        if not severity:
            return None
        return Alarm(names[number], SEVERITY[severity], "found by another rank" if own is None else own.why, first)
