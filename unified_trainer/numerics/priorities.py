"""The priorities of stored groups: how they fall with age, which place is overwritten, and which group is drawn."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def present_priority(
    priority: Float[Tensor, "..."], age: Int[Tensor, "..."], half_life: float, max_age: int
) -> Float[Tensor, "..."]:
    """Return priority 2^(-age / half_life), and 0 where age is above `max_age`; ages are in training steps.

    Priorities are at least 0; an empty place has priority 0.
    """
    return torch.where(age > max_age, 0.0, priority * torch.exp2(-age.to(priority) / half_life))


def overwritten(
    stored: Float[Tensor, "*places depth"], new: Float[Tensor, "*places"]
) -> tuple[Int[Tensor, "*places"], Bool[Tensor, "*places"]]:
    """Return the position of the least present priority at each place, and whether that of the new group is above it.

    Of equal ones it is the first. A new group takes that position, or is not stored.
    """
    least = stored.amin(-1)
    first = (stored == least[..., None]).int().argmax(-1)
    return first, new > least


def draw_in_proportion(weights: Float[Tensor, " n"], u: float) -> int | None:
    """Return the position that a uniform `u` in [0, 1) draws with probability in proportion to its weight.

    None if all weights are 0; a weight of 0 is never drawn.
    """
    ends = weights.double().cumsum(0)
    if not float(ends[-1]) > 0:
        return None
    below = int((ends <= u * ends[-1]).sum())
    return min(below, int(weights.nonzero()[-1]))
