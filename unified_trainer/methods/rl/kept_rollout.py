"""Where the rollout of a training step is kept until its updates have read it: on the device, or in CPU memory."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.types import Latents, Rollout, take_rows
from unified_trainer.methods.rl.rollout_config import TrajectoryPlace
from unified_trainer.parallel.copy_queue import copy_queue


@dataclass(frozen=True)
class HostRollout:
    """A rollout whose latents are in CPU memory, sample by sample; the rows that are read are copied to the device.

    The copies are exact, and nothing waits for them but what reads them. Joining and selecting samples copies nothing.
    """

    states: tuple[Float[Tensor, "s_plus_1 c t h w"], ...]  # in pinned memory, as x0 is
    log_probs: Float[Tensor, "b s"]  # on the device
    x0: tuple[Float[Tensor, "c t h w"], ...]

    @classmethod
    def of(cls, rollout: Rollout, device: torch.device) -> "HostRollout":
        """Copy a rollout, on the device or in CPU memory, into CPU memory; `device` is where its rows will be read."""
        queue = copy_queue(device)
        states, x0 = (queue.to_cpu(x).unbind(0) for x in (rollout.states, rollout.x0))
        return cls(states, rollout.log_probs.to(device), x0)

    def state(self, number: int, rows: Sequence[int]) -> Latents:
        return self._rows([self.states[row][number] for row in rows])

    def end(self, rows: Sequence[int]) -> Latents:
        return self._rows([self.x0[row] for row in rows])

    def take(self, rows: Sequence[int]) -> "HostRollout":
        """Return the samples of these rows, in this order."""
        states, x0 = (tuple(of[row] for row in rows) for of in (self.states, self.x0))
        return HostRollout(states, take_rows(self.log_probs, rows), x0)

    @classmethod
    def cat(cls, parts: Sequence["HostRollout"]) -> "HostRollout":
        """Return the samples of all parts, in order."""
        return cls(
            tuple(row for part in parts for row in part.states),
            torch.cat([part.log_probs for part in parts]),
            tuple(row for part in parts for row in part.x0),
        )

    def _rows(self, rows: Sequence[Tensor]) -> Latents:
        return copy_queue(self.log_probs.device).to_device(rows)


KeptRollout = Rollout | HostRollout


def join(parts: Sequence[KeptRollout]) -> KeptRollout:
    """Return the samples of parts that are kept in one place, in order."""
    hosted = [part for part in parts if isinstance(part, HostRollout)]
    if len(hosted) == len(parts):
        return HostRollout.cat(hosted)
    return Rollout.cat([part for part in parts if isinstance(part, Rollout)])


class RolloutParts:
    """Joins the parts of a rollout as they are made; at no time is a second copy of the whole in memory."""

    def __init__(self, place: TrajectoryPlace, samples: int) -> None:
        self._place, self._samples, self._added = place, samples, 0
        self._whole: Rollout | None = None
        self._parts: list[HostRollout] = []

    def add(self, part: Rollout) -> None:
        """Add the next samples."""
        if self._place == "cpu":
            self._parts.append(HostRollout.of(part, part.x0.device))
            return
        if len(part.x0) == self._samples:  # a single part is not copied
            self._whole = part
            return
        if self._whole is None:
            rows = {f.name: getattr(part, f.name) for f in fields(Rollout)}
            self._whole = Rollout(**{name: x.new_empty(self._samples, *x.shape[1:]) for name, x in rows.items()})
        for f in fields(Rollout):
            x = getattr(part, f.name)
            getattr(self._whole, f.name)[self._added : self._added + len(x)].copy_(x)
        self._added += len(part.x0)

    def joined(self) -> KeptRollout:
        """Return all samples, in order; all must have been added."""
        if self._whole is not None:
            return self._whole
        return HostRollout.cat(self._parts)
