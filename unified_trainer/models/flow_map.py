"""Flow maps: networks that predict the mean velocity of a whole step (MeanFlow, arXiv:2505.13447).

u(x_t, t, r) is the mean velocity of the ODE from noise level t down to r, so that x_r = x_t - (t - r) u. A condition
says where steps may end.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.types import Condition, PerSample

ENDS = "ends"


def ending_at(cond: Condition, levels: Float[Tensor, "b n"]) -> Condition:
    """Return a condition under which a step ends at the highest of these noise levels that is below its own."""
    return cond.updated(Condition({ENDS: levels}))


def end_of(sigma: PerSample, cond: Condition) -> PerSample:
    """Return where the step of each sample ends; without an end below sigma it is sigma, a step of no length."""
    if ENDS not in cond.tensors:
        return sigma
    levels, own = cond[ENDS].to(sigma), sigma[:, None]
    highest = torch.where(levels < own, levels, -1.0).amax(1)
    return torch.where(highest < 0, sigma, highest)
