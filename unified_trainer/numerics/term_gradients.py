"""Norms and angles of the gradients of a loss's terms from their inner products, and the factor that holds a ratio."""

import math

import torch
from jaxtyping import Float
from torch import Tensor


def gradient_norm(products: Float[Tensor, "t t"], weights: Float[Tensor, " t"]) -> float:
    """Return |sum_i w_i g_i| = sqrt(w^T P w) of gradients with the inner products P; rounding below 0 counts as 0."""
    return math.sqrt(max(0.0, float(weights @ products @ weights)))


def gradient_cosines(products: Float[Tensor, "t t"]) -> Float[Tensor, "t t"]:
    """Return the cosine of each pair of gradients from their inner products; 0 where one of the two is zero."""
    norms = products.diagonal().sqrt()
    scale = norms[:, None] * norms
    return torch.where(scale > 0, products / scale, 0.0)


def balanced_factor(factor: float, found: float, wanted: float, rate: float, bounds: tuple[float, float]) -> float:
    """Return factor x (wanted / found)^rate within the bounds, for a ratio that is proportional to the factor.

    With rate 1 the ratio is then the wanted one; a smaller rate is an exponential moving average of its logarithm. A
    ratio of 0, infinity or NaN says nothing and leaves the factor as it is.
    """
    if not 0 < found < math.inf:
        return factor
    return min(max(factor * (wanted / found) ** rate, bounds[0]), bounds[1])
