"""A rollout during which what only training reads is in CPU memory: the same ranks sample and train."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import chain

from torch import Tensor

from unified_trainer.basics.types import Batch
from unified_trainer.methods.rl.rollouts import AroundRollouts, Rollouts, ScoredSamples
from unified_trainer.parallel.copy_queue import copy_queue
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.role import Role, Trainable


class OffloadedRollouts(AroundRollouts):
    """Samples of another source of this process: the device has room for sampling while it works.

    The state of training leaves the device before the first sample and is back after the last score, also after an
    error, so that a checkpoint is whole. The numbers are those of the source.
    """

    def __init__(self, source: Rollouts, roles: Mapping[str, Role], sampler: Role) -> None:
        """`sampler` is the role that makes the samples."""
        super().__init__(source)
        self._roles, self._sampler = roles, sampler

    def samples(self, batch: Batch, step: int, rng: Streams) -> ScoredSamples:
        with ExitStack() as during:
            halved = [during.enter_context(backbone.in_halves()) for backbone in self._sampler.backbones.values()]
            idle = chain(self._idle(), *halved)
            during.enter_context(copy_queue(self._sampler.device).offloaded(idle))
            return self._source.samples(batch, step, rng)

    def _idle(self) -> Iterator[Tensor]:
        """Yield moments, EMA and the weights of networks that do not run."""
        running = list(self._sampler.backbones.values())
        for role in self._roles.values():
            if isinstance(role, Trainable):
                for learner in role.learners.values():
                    yield from learner.idle_in_passes
            for backbone in role.backbones.values():
                if backbone not in running:
                    yield from backbone.model.network.parameters()
