"""The direction of distribution matching in two parts: towards the conditional teacher, and along its guidance."""

from jaxtyping import Float
from torch import Tensor

from unified_trainer.numerics.flow import Sigma, per_sample


def weighted_direction(
    fake: Float[Tensor, "b ..."],
    real: Float[Tensor, "b ..."],
    cond: Float[Tensor, "b ..."],
    conditional_weight: float,
    guidance_weight: Sigma,
) -> Float[Tensor, "b ..."]:
    """Return c (fake - cond) - a (real - cond), where real - cond = (w - 1) (cond - uncond) is the guidance part.

    The arguments are x0 of the critic, of the guided teacher and of the conditional teacher; a is one number or one for
    each sample (DMDR, arXiv:2511.13649, with c = 1). It is written as fake - real plus what c and a change, so that
    c = a = 1 gives fake - real bit for bit.
    """
    changed = (conditional_weight - 1) * (fake - cond) + per_sample(1 - guidance_weight, fake) * (real - cond)
    return (fake - real) + changed


def advantage_weights(advantages: Float[Tensor, " b"], scale: float) -> Float[Tensor, " b"]:
    """Return 1 + scale A of each sample, bounded to 0 and 2: a better sample is guided more (arXiv:2511.13649)."""
    return (1 + scale * advantages).clamp(0, 2)
