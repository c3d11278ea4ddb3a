"""Importance weights of samples that an older policy made."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.types import widest
from unified_trainer.numerics.objectives import LOG_RATIO_LIMIT

WeightDensity = Literal["mean", "joint"]


def importance_weight(
    log_ratio: Float[Tensor, "*b"], elements: int, density: WeightDensity, largest: float
) -> Float[Tensor, "*b"]:
    """Return min(exp(c log_ratio), largest): truncated importance weights (IMPALA, arXiv:1802.01561).

    `log_ratio` is a mean over the elements of a sample. `joint`: c = elements, the ratio of the densities of whole
    samples, whose mean over the behavior policy is 1 before it is truncated; at a KL of k per element its logarithm has
    variance 2 k elements. `mean`: c = 1, the geometric mean of the ratios of elements. In the widest dtype of the
    device.
    """
    return scaled_log_ratio(log_ratio, elements, density).exp().clamp(max=largest)


def scaled_log_ratio(log_ratio: Float[Tensor, "*b"], elements: int, density: WeightDensity) -> Float[Tensor, "*b"]:
    """Return clip(c log_ratio, -20, 20), see `importance_weight`."""
    scaled = log_ratio.to(widest(log_ratio.device)) * (elements if density == "joint" else 1)
    return scaled.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
