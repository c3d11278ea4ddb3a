"""A rollout's transitions as the student would make them now, and what one update saw of them."""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.methods.lessons import Lesson
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.types import PerSample


@dataclass(frozen=True)
class Replay:
    """One transition of the samples of a lesson."""

    log_ratio: PerSample  # log pi(x_next | x_t) now, minus what it was when it was sampled
    ratio: PerSample  # the log-ratio that the objective reads: the same, or guarded
    k: PerSample  # KL per element between then and now
    kl: PerSample | None  # to the reference, where the loss has one


@dataclass(frozen=True)
class Seen:
    """All transitions of all useful samples of an update, over all ranks."""

    log_ratio: Float[Tensor, "n s"]
    ratio: Float[Tensor, "n s"]
    k: Float[Tensor, "n s"]
    kl: Float[Tensor, "n s"]
    advantage: Float[Tensor, "n s"]

    def metrics(self, transitions: list[int], elements: int) -> dict[str, float]:
        """The log-ratio, and k with its noise floor sqrt(2 k / D): the spread of a log-ratio of D elements."""
        result = {"log_ratio": float(self.log_ratio.mean()), "log_ratio_abs_max": float(self.log_ratio.abs().max())}
        by_transition = {f"/{s}": self.k[:, i] for i, s in enumerate(transitions)}
        for name, k in {"": self.k, **by_transition}.items():
            result[f"k{name}"] = float(k.mean())
            result[f"k_noise{name}"] = math.sqrt(2 * result[f"k{name}"] / elements)
        return result


@dataclass
class Record:
    """Collects the replays of one update: lessons within transitions."""

    _rows: list[Tensor] = field(default_factory=list)  # one [m, 6] for each lesson of each transition

    def add(self, replay: Replay, advantage: PerSample, lesson: Lesson) -> None:
        kl = torch.zeros_like(replay.k) if replay.kl is None else replay.kl
        real = lesson.real.to(replay.k)
        columns = (replay.log_ratio, replay.ratio, replay.k, kl, advantage.to(replay.k), real)
        self._rows.append(torch.stack([column.detach() for column in columns], 1))

    def everywhere(self, mesh: Mesh, transitions: int) -> Seen:
        """What all ranks collected, without the samples that only filled up."""
        mine = torch.cat(self._rows).unflatten(0, (transitions, -1)).transpose(0, 1)
        rows = mesh.gather(mine)
        *columns, real = rows.unbind(2)
        return Seen(*(column[real[:, 0] > 0] for column in columns))
