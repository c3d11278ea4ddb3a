"""Replaying a rollout's transitions with the student's present weights, and the statistics of one update."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unified_trainer.basics.types import Batch, Latents, PerSample, take_rows
from unified_trainer.methods.rl.kept_rollout import KeptRollout
from unified_trainer.methods.rl.minibatches import Minibatch
from unified_trainer.methods.rl.rollouts import ScoredSamples
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.sampling.equal_rows import EqualRows


class Transition(NamedTuple):
    """One transition of some samples, as the rollout made it."""

    batch: Batch
    x_t: Latents
    x_next: Latents
    log_prob: PerSample  # averaged over elements
    x0: Latents  # end of the samples


@dataclass(frozen=True)
class Trajectories:
    """This rank's rollout: batch, states and log-probs of the kept transitions, RNG that redraws their noise."""

    batch: Batch
    rollout: KeptRollout
    window: range  # the transitions that the rollout holds: stochastic ones
    rng: Streams
    lags: Int[Tensor, " b"]  # training steps between the weights that made a sample and the present ones; CPU
    start_log_probs: Float[Tensor, "b s"]  # log-densities at the start of the training step, where they are computed
    first_states: Sequence[Hashable] = ()  # a key per sample; equal keys: equal state before the window. Empty: no key

    @classmethod
    def of(
        cls, samples: ScoredSamples, step: int, window: range, rng: Streams, *, same_noise: bool = False
    ) -> "Trajectories":
        """Return the rollout of training step `step`."""
        lags = step - samples.versions
        state = _first_states(samples) if same_noise else ()
        drawn = rng.of_steps(samples.made_in)
        return cls(samples.batch, samples.rollout, window, drawn, lags, samples.rollout.log_probs, state)

    def index(self, s: int) -> int:
        """Return the column of transition s among those of the rollout."""
        return s - self.window.start

    def equal_rows(self, rows: Tensor, s: int) -> EqualRows | None:
        """Return which of these samples are in one state before transition s, with one prompt; None for none."""
        if not self.first_states or s != self.window.start:
            return None
        return EqualRows.of(self.first_states[row] for row in rows.tolist())

    def transition(self, s: int, rows: Tensor) -> Transition:
        """Return transition s of some samples."""
        rollout, at, index = self.rollout, self.index(s), rows.tolist()
        return Transition(
            batch=self.batch.take(index),
            x_t=rollout.state(at, index),
            x_next=rollout.state(at + 1, index),
            log_prob=take_rows(rollout.log_probs[:, at], index),
            x0=rollout.end(index),
        )

    def noise(self, batch: Batch, s: int) -> Latents:
        """Redraw the noise of transition s for these samples; it is not stored."""
        return transition_noise(self.rng, batch, s)


def transition_noise(rng: Streams, batch: Batch, s: int) -> Latents:
    """Draw the noise of transition s for these samples."""
    return rng.noise(f"transition {s}", batch.sample_ids, batch.latent_shape)


@dataclass(frozen=True)
class Replay:
    """One transition of a minibatch's samples, with the present weights against those of the rollout."""

    log_ratio: PerSample  # log pi(x_next | x_t) now minus at the rollout, averaged over elements
    ratio: PerSample  # the log-ratio that the objective reads: log_ratio, guarded, or to the proximal policy
    kl_old: PerSample  # KL per element between the policies of the rollout and of now
    kl_reference: PerSample | None  # KL to the reference, where the loss has one
    clip: tuple[float, float]  # how far below and above 1 the ratio may go
    lag: Int[Tensor, " b"]  # training steps between the weights of the rollout and the present ones
    proximal: PerSample  # log-ratio of the proximal policy to that of the rollout, without gradient
    elements: int  # of a sample's latents


@dataclass(frozen=True)
class ReplayStats:
    """All transitions of all trained samples of one update, over all ranks."""

    log_ratio: Float[Tensor, "n s"]
    ratio: Float[Tensor, "n s"]
    kl_old: Float[Tensor, "n s"]
    kl_reference: Float[Tensor, "n s"]
    lag: Float[Tensor, "n s"]
    weight: Float[Tensor, "n s"]
    advantage: Float[Tensor, "n s"]

    def of_lag(self, lag: float) -> "ReplayStats":
        """Return the samples of this lag."""
        rows = self.lag[:, 0] == lag
        return ReplayStats(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    def metrics(self, transitions: list[int], elements: int) -> dict[str, float]:
        """Return the log-ratio, the KL since the rollout, and sqrt(2 KL / D), a log-ratio's spread over D elements."""
        result = {"log_ratio": float(self.log_ratio.mean()), "log_ratio_abs_max": float(self.log_ratio.abs().max())}
        by_transition = {f"/{s}": self.kl_old[:, i] for i, s in enumerate(transitions)}
        for name, kl in {"": self.kl_old, **by_transition}.items():
            mean = float(kl.mean())
            result[f"approx_kl{name}"] = mean
            result[f"log_ratio_noise_floor{name}"] = math.sqrt(2 * mean / elements)
        return result


@dataclass
class ReplayCollector:
    """Collects the replays of one update: minibatches within transitions."""

    _rows: list[Tensor] = field(default_factory=list)  # one [m, 8] for each minibatch of each transition

    def add(self, replay: Replay, advantage: PerSample, weight: PerSample, minibatch: Minibatch) -> None:
        """Add one transition of a minibatch, with the weights of its gains."""
        kl = torch.zeros_like(replay.kl_old) if replay.kl_reference is None else replay.kl_reference
        real = minibatch.real.to(replay.kl_old, non_blocking=True)
        columns = (replay.log_ratio, replay.ratio, replay.kl_old, kl, replay.lag, weight, advantage, real)
        self._rows.append(torch.stack([column.detach().to(real, non_blocking=True) for column in columns], 1))

    def gathered(self, mesh: Mesh, transitions: int) -> ReplayStats:
        """Return the replays of all ranks in float64 on the CPU, without padding."""
        mine = torch.cat(self._rows).unflatten(0, (transitions, -1)).transpose(0, 1)
        rows = mesh.gather(mine).cpu().double()
        *columns, real = rows.unbind(2)
        return ReplayStats(*(column[real[:, 0] > 0] for column in columns))


def _first_states(samples: ScoredSamples) -> list[Hashable]:
    """Return a key for each sample, prompt and version; samples of equal keys have one state before the window."""
    return list(zip(samples.batch.prompt_ids, samples.versions.tolist(), strict=True))
