"""The loss of a value function, and how much of the returns it explains."""

from jaxtyping import Float
from torch import Tensor, maximum

from unified_trainer.basics.types import widest


def value_loss(
    value: Float[Tensor, "*b"], value_old: Float[Tensor, "*b"], target: Float[Tensor, "*b"], clip: float = 0.0
) -> Float[Tensor, "*b"]:
    """Return 1/2 max((V - target)^2, (V_old + clamp(V - V_old, -clip, clip) - target)^2) of each value.

    A value that has moved by more than `clip` from V_old, the value before the update, gets no gradient unless it moved
    away from the target (PPO2; PPO, arXiv:1707.06347, clips the policy alone). Without clip, 0, the loss is
    1/2 (V - target)^2. Only V takes a gradient.
    """
    dtype = widest(value.device)
    value, value_old, target = value.to(dtype), value_old.detach().to(dtype), target.detach().to(dtype)
    error = (value - target).square()
    if clip:
        error = maximum(error, (value_old + (value - value_old).clamp(-clip, clip) - target).square())
    return error / 2


def explained_variance(values: Float[Tensor, "*b"], returns: Float[Tensor, "*b"]) -> float:
    """Return 1 - Var(returns - values) / Var(returns): 1 is a perfect value function, 0 is as good as a constant.

    It is 0 for equal returns.
    """
    returns = returns.double()
    spread = returns.var(correction=0)
    return float(1 - (returns - values.double()).var(correction=0) / spread) if spread > 0 else 0.0
