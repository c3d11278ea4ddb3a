"""The plan of what each block of a role recomputes, so that activations take no more than a number of GiB."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from unified_trainer.errors import UserError
from unified_trainer.roles.recompute import Recompute
from unified_trainer.roles.role import TrainableConfig
from unified_trainer.sizing.memory import Sizes, kept_by
from unified_trainer.sizing.rehearsal import Counts

GIB = 2**30


@dataclass(frozen=True)
class ActivationPlan:
    """The plan of one role; bytes are those that its passes keep for the backward pass of its largest loss."""

    role: str
    recompute: Recompute
    blocks: int  # of each of its networks
    kept: float
    budget: float

    def __str__(self) -> str:
        full, others = self.recompute.full, self.blocks - self.recompute.full
        parts = [f"full in {full} blocks"] if full else []
        parts += [f"{self.recompute.others} in {others} blocks"] if others else []
        return (
            f"{self.role}.activation_memory {self.budget / GIB:g}: {', '.join(parts)}; activations take "
            f"{self.kept / GIB:.3g} GiB, computed"
        )


def activation_plans(counts: Counts, sizes: Sizes) -> dict[str, ActivationPlan]:
    """Return the plans of the roles whose activation_memory is a number.

    The first that fits is taken: none; selective; full in k blocks, selective in the others. UserError, with the
    smallest number that works, for one that is too small for full in all blocks.
    """
    plans = {}
    for name in counts.roles:
        config = sizes.run.roles.get(name)
        if isinstance(config, TrainableConfig) and not isinstance(config.activation_memory, str):

            def kept(recompute: Recompute, name: str = name) -> float:
                return kept_by(name, counts, replace(sizes, recompute={**sizes.recompute, name: recompute}))

            plans[name] = planned(name, config.activation_memory * GIB, sizes.models[name].size.layers, kept)
    return plans


def planned(role: str, budget: float, blocks: int, kept: Callable[[Recompute], float]) -> ActivationPlan:
    """Return the plan of one role: the first whose bytes, by `kept`, are at most `budget`."""
    needed = 0.0
    for recompute in _choices(blocks):
        needed = kept(recompute)
        if needed <= budget:
            return ActivationPlan(role, recompute, blocks, needed, budget)
    least = math.ceil(needed / GIB * 1000) / 1000
    raise UserError(
        f"{role}.activation_memory {budget / GIB:g}: even with everything recomputed, the activations of a loss take "
        f"{needed / GIB:.3g} GiB; set it to {least:g} or more, or lower the micro-batch"
    )


def _choices(blocks: int) -> Iterator[Recompute]:
    """Yield ways to recompute, that with the fewest FLOPs first."""
    yield Recompute()
    for full in range(blocks + 1):
        yield Recompute("selective", full)
