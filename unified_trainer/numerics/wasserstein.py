"""The Wasserstein distance between two samples of a number."""

import torch
from jaxtyping import Float
from torch import Tensor


def wasserstein(left: Float[Tensor, " n"], right: Float[Tensor, " m"]) -> float:
    """Return the integral of |F_left - F_right|, in the unit of the values, computed in float64.

    F are the shares of values up to a number. In one dimension the integral is the mean distance by which one sample
    must be moved to become the other (arXiv:1803.00567, remark 2.30). Raise ValueError for an empty sample.
    """
    if not len(left) or not len(right):
        raise ValueError(f"wasserstein: {len(left)} and {len(right)} values, at least 1 is needed of both")
    left, right = left.double().sort().values, right.double().sort().values
    values = torch.cat([left, right]).sort().values
    shares = [torch.searchsorted(own, values[:-1], right=True) / len(own) for own in (left, right)]
    return float(((shares[0] - shares[1]).abs() * values.diff()).sum())
