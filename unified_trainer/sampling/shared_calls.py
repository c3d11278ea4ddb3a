"""Network calls of a rollout that are equal for several samples are made once.

Samples of one prompt and one initial noise stay equal until noise of their own is added. A rollout is made in parts;
inside `kept_for_the_next_part` a part takes over what the part before it computed for the prompt of its last sample.
"""

import itertools
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from unified_trainer.basics.types import Batch, Latents
from unified_trainer.roles.role import Role
from unified_trainer.sampling.equal_rows import EqualRows

Velocity = Callable[[Latents, Tensor], Latents]  # velocity of x_t at one noise level
Velocities = dict[Hashable, list[Tensor]]  # by the key of equal rows: the velocity [c, t, h, w] of each shared call

_HANDED_ON: ContextVar[Velocities | None] = ContextVar("handed_on", default=None)


@contextmanager
def kept_for_the_next_part() -> Iterator[None]:
    """Make the parts of one rollout inside, one after the other, with weights that do not change."""
    before = _HANDED_ON.set({})
    try:
        yield
    finally:
        _HANDED_ON.reset(before)


def shared_velocity(
    role: Role, batch: Batch, equal: EqualRows | None, calls: int, velocity_of: Callable[[Batch], Velocity]
) -> Velocity:
    """Return the batch's velocity, in whose first `calls` calls the network runs once for each set of `equal` rows.

    `velocity_of(rows)` gives such a function of x_t and noise level for some of the samples. With `equal` this is a
    collective: all ranks make a call that one of them needs, since their weights may be sharded.
    """
    each = velocity_of(batch)
    if equal is None:
        return each
    handed_on = _HANDED_ON.get()
    known: Velocities = {} if handed_on is None else {key: handed_on[key] for key in equal.keys if key in handed_on}
    missing = [place for place, key in enumerate(equal.keys) if key not in known]
    if role.on_any_rank(bool(missing)):
        missing = missing or [0]
    once = velocity_of(batch.take([equal.first[place] for place in missing])) if missing else None
    last, last_made = equal.keys[equal.place[-1]], list[Tensor]()  # samples of one prompt follow each other
    if handed_on is not None:
        handed_on.clear()
        handed_on[last] = last_made
    made = itertools.count()

    def velocity(x_t: Latents, sigma: Tensor) -> Latents:
        number = next(made)
        if number >= calls:
            return each(x_t, sigma)
        now = {key: velocities[number] for key, velocities in known.items()}
        if once is not None:  # known ones stay: a call for the sake of other ranks is of another batch size
            rows = once(torch.stack([x_t[equal.first[place]] for place in missing]), sigma)
            now = {equal.keys[place]: row for place, row in zip(missing, rows.unbind(0), strict=True)} | now
        last_made.append(now[last].clone())
        return torch.stack([now[equal.keys[place]] for place in equal.place])

    return velocity
