"""A rollout's transitions as the student would make them now, and what one update saw of them."""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.rl.minibatches import Minibatch
from unified_trainer.types import Batch, Latents, PerSample, Rollout


@dataclass(frozen=True)
class Trajectories:
    """What this rank's samples went through in one training step."""

    batch: Batch
    rollout: Rollout
    window: range  # the stochastic transitions, which the rollout holds
    rng: Streams

    def transition(self, s: int, rows: Tensor) -> tuple[Batch, Latents, Latents, PerSample, Latents]:
        """Some samples, their x_t and x_next of transition s with its log-density, and what they became."""
        states, at = self.rollout.states, s - self.window.start
        log_prob, x0 = self.rollout.log_probs[rows, at], self.rollout.x0[rows]
        return self.batch.take(rows.tolist()), states[rows, at], states[rows, at + 1], log_prob, x0

    def noise(self, batch: Batch, s: int) -> Latents:
        """What transition s drew for these samples, drawn again instead of stored."""
        return transition_noise(self.rng, batch, s)


def transition_noise(rng: Streams, batch: Batch, s: int) -> Latents:
    """What transition s draws for these samples."""
    return rng.noise(f"transition {s}", batch.sample_ids, batch.latent_shape)


@dataclass(frozen=True)
class Replay:
    """One transition of the samples of a minibatch."""

    log_ratio: PerSample  # log pi(x_next | x_t) now, minus what it was when it was sampled
    ratio: PerSample  # the log-ratio that the objective reads: the same, or guarded
    k: PerSample  # KL per element between then and now
    kl: PerSample | None  # to the reference, where the loss has one
    clip: tuple[float, float]  # how far below and above 1 the ratio may go


@dataclass(frozen=True)
class ReplayStats:
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
            result[f"approx_kl{name}"] = float(k.mean())
            result[f"log_ratio_noise_floor{name}"] = math.sqrt(2 * result[f"approx_kl{name}"] / elements)
        return result


@dataclass
class ReplayCollector:
    """Collects the replays of one update: minibatches within transitions."""

    _rows: list[Tensor] = field(default_factory=list)  # one [m, 6] for each minibatch of each transition

    def add(self, replay: Replay, advantage: PerSample, minibatch: Minibatch) -> None:
        kl = torch.zeros_like(replay.k) if replay.kl is None else replay.kl
        real = minibatch.real.to(replay.k)
        columns = (replay.log_ratio, replay.ratio, replay.k, kl, advantage.to(replay.k), real)
        self._rows.append(torch.stack([column.detach() for column in columns], 1))

    def gathered(self, mesh: Mesh, transitions: int) -> ReplayStats:
        """What all ranks collected, without the samples that only filled up."""
        mine = torch.cat(self._rows).unflatten(0, (transitions, -1)).transpose(0, 1)
        rows = mesh.gather(mine)
        *columns, real = rows.unbind(2)
        return ReplayStats(*(column[real[:, 0] > 0] for column in columns))
