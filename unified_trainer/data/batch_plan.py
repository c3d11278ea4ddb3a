"""How the samples of a training step divide into updates, ranks and micro-batches."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.suggestions import multiples_near


@dataclass(frozen=True)
class Position:
    """Where a run is in its data, in a checkpoint as JSON."""

    step: int = 0  # training steps done
    prompts: int = 0  # that they took
    # Of row groups in batches so far: the prompts taken before, the prompts of a batch, and its lanes.
    layouts: Sequence[Sequence[int]] = ()
    buckets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # the position in each shape of clips


@dataclass(frozen=True)
class BatchPlan:
    """The numbers of prompts and samples of a training step, of an update and of a micro-batch."""

    prompts: int  # prompts of one training step, over all ranks
    num_samples: int  # samples of each prompt
    prompts_per_update: int  # prompts of one optimizer update
    micro_batch: int  # samples of one backward pass, at most: a rank takes the largest size that divides its share
    keys: tuple[str, str, str, str]  # the settings that these four come from, for messages
    by_failures: bool = False  # prompts are drawn in proportion to failures + 1, instead of epoch by epoch
    failures_kept: float = 1.0  # share of the counts of failures that stays from a training step to the next
    further: bool = False  # a step may draw prompts outside its batch
    whole_groups: bool = False  # all samples of a prompt are on one rank
    # Of the smaller updates at the start of a run: the training steps until they end, and their prompts (`ramp_up`).
    ramp: tuple[tuple[int, int], ...] = ()
    begun: Position = Position()  # from which on these numbers hold: a run that is continued may have had others

    @classmethod
    def one_update(cls, batch_size: int, micro_batch: int) -> "BatchPlan":
        """Plan a step of one update in which every sample has its own prompt."""
        keys = ("algorithm.batch_size", "1", "algorithm.batch_size", "algorithm.micro_batch")
        return cls(batch_size, 1, batch_size, micro_batch, keys)

    def at(self, step: int) -> "BatchPlan":
        """Return the plan of one training step: this one, or a smaller one with as many updates."""
        return next((self.sized(prompts) for end, prompts in self.ramp if step < end), self)

    def sized(self, prompts_per_update: int) -> "BatchPlan":
        """Return the plan with other updates, as many of them in a training step."""
        updates = self.prompts // self.prompts_per_update
        return replace(self, prompts=updates * prompts_per_update, prompts_per_update=prompts_per_update, ramp=())

    def prompts_before(self, step: int) -> int:
        """Return the prompts of all training steps before this one: those taken before `begun`, and those since."""
        return self.begun.prompts + self._planned(step) - self._planned(self.begun.step)

    def _planned(self, step: int) -> int:
        """Return the prompts of all training steps before this one, by these numbers alone."""
        total = begin = 0
        for end, prompts in self.ramp:
            total += max(0, min(step, end) - begin) * self.sized(prompts).prompts
            begin = end
        return total + max(0, step - begin) * self.prompts

    def steps_for(self, prompts: int) -> int:
        """Return the fewest training steps that have so many prompts."""
        step = next((end for end, _ in reversed(self.ramp) if self.prompts_before(end) < prompts), 0)
        return step - (self.prompts_before(step) - prompts) // self.at(step).prompts

    def table(self, ranks: int) -> dict[str, int]:
        """Return every count of the step; UserError, with the nearest good sizes, if the ranks do not divide it."""
        counts = (self.prompts, self.num_samples, self.prompts_per_update, self.micro_batch)
        for key, count in zip(self.keys, counts, strict=True):
            if count < 1:
                raise UserError(f"{key} must be at least 1, not {count}")
        prompts, num_samples, prompts_per_update, _ = self.keys
        if self.prompts % self.prompts_per_update:
            raise UserError(
                f"{prompts} ({self.prompts}) must be divisible by {prompts_per_update} ({self.prompts_per_update}): "
                f"set {prompts} to {multiples_near(self.prompts, self.prompts_per_update)}"
            )
        samples, unit = self.prompts_per_update * self.num_samples, self._unit(ranks)
        near = multiples_near(self.prompts_per_update, unit)
        if samples % ranks:
            name = prompts_per_update if num_samples == "1" else f"{prompts_per_update} x {num_samples}"
            raise UserError(
                f"{name} ({samples}) must be divisible by the number of ranks ({ranks}): "
                f"set {prompts_per_update} to {near}"
            )
        if self.prompts_per_update % unit:
            raise UserError(
                f"{prompts_per_update} ({self.prompts_per_update}) must be divisible by the number of ranks ({ranks}), "
                f"because the samples of a prompt are compared on one rank: set {prompts_per_update} to {near}"
            )
        for _, size in self.ramp:
            if size % unit:
                raise UserError(
                    f"ramp_up: {ranks} ranks do not divide an update of {size * self.num_samples} samples: set "
                    f"ramp_up.start and ramp_up.increment to multiples of {unit * self.num_samples}"
                )
        per_update, updates = samples // ranks, self.prompts // self.prompts_per_update
        size = largest_divisor(per_update, self.micro_batch)
        return {
            "prompts": self.prompts,
            "samples per prompt": self.num_samples,
            "samples": self.prompts * self.num_samples,
            "ranks": ranks,
            "samples per rank": per_update * updates,
            "optimizer updates": updates,
            "samples per update and rank": per_update,
            "micro-batch": size,
            "accumulation": per_update // size,
        }

    def nearest(self, ranks: int) -> "BatchPlan":
        """Return the plan whose update is the nearest one that the ranks divide, with as many updates."""
        unit = self._unit(ranks)
        per_update = max(1, (2 * self.prompts_per_update + unit) // (2 * unit)) * unit
        updates = self.prompts / self.prompts_per_update
        return replace(self, prompts=round(updates * per_update), prompts_per_update=per_update)

    def _unit(self, ranks: int) -> int:
        """Return the number of prompts that the ranks divide, and all multiples of it."""
        return ranks if self.whole_groups else ranks // math.gcd(ranks, self.num_samples)

    def rank_samples(self, rank: int, ranks: int) -> list[int]:
        """Return the positions in the step's batch (prompt-major) that this rank holds, update by update."""
        per_update = self.prompts_per_update * self.num_samples
        share = per_update // ranks
        starts = range(rank * share, self.prompts * self.num_samples, per_update)
        return [position for start in starts for position in range(start, start + share)]

    def is_even(self, slots: set[int], ranks: int) -> bool:
        """Return whether each rank holds equally many samples of some groups, given by position in the step."""
        held = (self.rank_samples(rank, ranks) for rank in range(ranks))
        return len({sum(i // self.num_samples in slots for i in own) for own in held}) == 1


def largest_divisor(total: int, limit: int) -> int:
    """Return the largest size of at most `limit` that divides `total`."""
    return next(size for size in range(min(total, limit), 0, -1) if total % size == 0)
