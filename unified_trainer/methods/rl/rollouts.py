"""Where the scored samples of a training step come from: this process, or workers that may make them ahead of training.

A method asks its `Rollouts` for the samples of a step and cannot tell who made them.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from jaxtyping import Int
from torch import Tensor

from unified_trainer.basics.types import Batch, Latents, PerSample, Rollout
from unified_trainer.methods.base import Metrics
from unified_trainer.methods.rl.kept_rollout import KeptRollout, RolloutParts, join
from unified_trainer.methods.rl.rollout_config import TrajectoryPlace
from unified_trainer.models.base import Codec
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.meter import phase
from unified_trainer.parallel.random import Streams
from unified_trainer.rewards.reward import Reward, RewardSum, Scores
from unified_trainer.sampling.shared_calls import kept_for_the_next_part

STORED = 2**32  # a group that was made some training steps ago has its prompt id plus that many times this
Sample = Callable[[Batch, int, Streams], Rollout]  # batch, training step and its random numbers -> rollout


@dataclass(frozen=True)
class ScoredSamples:
    """This rank's samples of one training step: prompts, rollouts, scores and versions of the weights, row by row.

    A version is the number of training steps that weights have behind them.
    """

    batch: Batch
    rollout: KeptRollout
    scores: Scores
    versions: Int[Tensor, " b"]  # of the weights that made each sample; on the CPU
    made_in: Mapping[int, int] = field(default_factory=dict)  # by sample id, the earlier training step that drew noise

    def rewards(self, reward: RewardSum, scores: Scores, mesh: Mesh) -> PerSample:
        """Return the rewards of all ranks' gathered scores, NaN without a score; NotFiniteError names a sample."""
        return reward.partial_total(scores.parts, self.batch.prompts, mesh.data_rank * len(self.batch))

    def replaced(self, rows: Sequence[int], others: "ScoredSamples") -> "ScoredSamples":
        """Return these samples with the first of the others in the given rows."""
        order = list(range(len(self.batch)))
        for i, row in enumerate(rows):
            order[row] = len(order) + i
        return self.joined(others, order)

    def joined(self, others: "ScoredSamples", order: Sequence[int]) -> "ScoredSamples":
        """Return these rows of both, counted through."""
        rollout = join([self.rollout, others.rollout]).take(order)
        scores = Scores.cat([self.scores, others.scores]).take(order)
        versions = torch.cat([self.versions, others.versions])[order]
        batch = self.batch.cat(others.batch).take(order)
        return ScoredSamples(batch, rollout, scores, versions, {**self.made_in, **others.made_in})


Check = Callable[[ScoredSamples, Streams, str], None]  # samples of a worker, their random numbers, and its name


@dataclass(frozen=True)
class Sampling:
    """The parts of a run that make and score samples in one process."""

    sample: Sample | None  # of a process that makes samples
    weights: Mapping[str, Tensor]  # of the role that samples, without those that are never trained
    reward: Reward | None  # of a process that scores them
    codec: Codec
    latent_shape: tuple[int, int, int, int]
    device: torch.device


class Rollouts(Protocol):
    """A source of scored samples."""

    uniform: bool  # whether all ranks must ask for equally many samples, because their networks run in collectives
    # Called from time to time with samples of a worker, while the role that samples has the weights that made them.
    check: Check | None

    def samples(self, batch: Batch, step: int, rng: Streams) -> ScoredSamples:
        """Return the samples of a batch of this training step."""

    def metrics(self) -> dict[str, float]:
        """Return metrics of the step whose samples were made last."""

    def lower_ahead(self) -> None:
        """Make later samples one training step less ahead; all ranks ask for it at the end of the same step."""


class AroundRollouts:
    """A source of samples around another one, and as it is where a subclass does not say otherwise."""

    check: Check | None = None  # that of the source is called

    def __init__(self, source: Rollouts) -> None:
        self._source, self.uniform = source, source.uniform

    def metrics(self) -> Metrics:
        return self._source.metrics()

    def lower_ahead(self) -> None:
        self._source.lower_ahead()


def lag_metrics(samples: ScoredSamples, step: int, mesh: Mesh) -> Metrics:
    """Return by how many training steps the weights that samples began with are older than the present ones, if so."""
    lag = (step - mesh.all_gather_cpu(samples.versions)).double()
    return {"lag": float(lag.mean()), "lag_max": float(lag.max())} if bool(lag.any()) else {}


class LocalRollouts:
    """Samples, decodes and scores in this process, `size` samples at a time."""

    uniform = True
    check: Check | None = None  # samples of this process need none

    def __init__(
        self,
        sample: Sample,
        reward: Reward,
        size: int,
        trajectories: TrajectoryPlace = "device",
        *,
        score_last: bool = False,
        safe_point: Callable[[], None] = lambda: None,
    ) -> None:
        """With `score_last` samples are scored when all are made: the networks of the reward come and go once.

        `safe_point` is called before each part: up to there a training step has changed nothing, and may be dropped.
        """
        self._sample, self._reward, self._size, self._place = sample, reward, size, trajectories
        self._safe_point = safe_point
        self._score_last = score_last

    def samples(self, batch: Batch, step: int, rng: Streams) -> ScoredSamples:
        kept, parts = RolloutParts(self._place, len(batch)), batch.split(self._size)
        with kept_for_the_next_part():
            made = self._made(parts, kept, step, rng)
            if not self._score_last:
                scores = self._scored(parts, made, step)
            else:
                for _ in made:
                    pass
        rollout, versions = kept.joined(), torch.full((len(batch),), step)
        if self._score_last:
            with self._reward.scoring():
                scores = self._scored(parts, self._ends(parts, rollout), step)
        return ScoredSamples(batch, rollout, Scores.cat(scores), versions)

    def _made(self, parts: Sequence[Batch], kept: RolloutParts, step: int, rng: Streams) -> Iterator[Latents]:
        """Make the samples of each part, keep them, and yield their final x0."""
        for number, part in enumerate(parts, 1):
            self._safe_point()
            with phase("rollout", number, len(parts)):
                made = self._sample(part, step, rng.restarted())
                kept.add(made)
                x0 = made.x0
                del made  # its states are kept elsewhere while the next part is made
            yield x0

    def _ends(self, parts: Sequence[Batch], rollout: KeptRollout) -> Iterator[Latents]:
        for part, end in zip(parts, itertools.accumulate(map(len, parts)), strict=True):
            yield rollout.end(range(end - len(part), end))

    def _scored(self, parts: Sequence[Batch], ends: Iterator[Latents], step: int) -> list[Scores]:
        """Score each part; scorers in another process answer while the x0 of the next part is made."""
        begun = (self._reward.begin(x0, part.prompts, step) for part, x0 in zip(parts, ends, strict=True))
        return [finish() for finish, _ in itertools.pairwise(itertools.chain(begun, [None])) if finish]

    def metrics(self) -> dict[str, float]:
        return {"reward/retried": float(self._reward.retried)} if self._reward.retried else {}

    def lower_ahead(self) -> None:
        """Do nothing: samples are made in the training step that asks for them."""
