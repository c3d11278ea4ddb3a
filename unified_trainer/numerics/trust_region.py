"""The trust region of Flow-DPPO: a mask by KL in place of a clip range."""

from jaxtyping import Bool, Float
from torch import Tensor


def leaves_trust_region(
    log_ratio: Float[Tensor, "*b"], advantage: Float[Tensor, "*b"], kl: Float[Tensor, "*b"], bound: float
) -> Bool[Tensor, "*b"]:
    """Return which transitions have no gradient: KL per element >= bound, and the ratio moved as its advantage pushes.

    `kl` is that of the present to the behavior policy.
    """
    return (kl >= bound) & (log_ratio * advantage.sign() > 0)
