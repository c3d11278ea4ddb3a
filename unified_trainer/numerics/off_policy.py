"""The proximal policy that the ratio of samples of an older policy is clipped around.

Three policies have a part: the behavior policy made the sample, the proximal policy is the center of the clip range,
and the present one is trained. Log-ratios are means over the D elements of a sample.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

Proximal = Literal["none", "decoupled", "loglinear", "truncated"]


def proximal_log_ratio(
    correction: Proximal,
    log_ratio: Float[Tensor, " b"],
    log_ratio_start: Float[Tensor, " b"],
    lag: Int[Tensor, " b"],
) -> Float[Tensor, " b"]:
    """Return the log-ratio of the proximal to the behavior policy, without gradient; 0 for a sample of lag 0.

    `log_ratio` is that of the present policy, `log_ratio_start` that of the policy as the training step started.
    `none`: 0, the proximal policy is the behavior policy.
    `decoupled`: log_ratio_start (Hilton et al., arXiv:2110.00641; AReaL, arXiv:2505.24298).
    `loglinear`: lag / (lag + 1) log_ratio: one training step of the lag + 1 between behavior and present policy is
    taken back (A-3PO, arXiv:2512.06547).
    `truncated`: log_ratio, the proximal policy is the present one, so that no ratio is clipped.
    """
    log_ratio, steps = log_ratio.detach(), lag.to(log_ratio)
    if correction == "none":
        return torch.zeros_like(log_ratio)
    if correction == "decoupled":
        return torch.where(steps > 0, log_ratio_start, 0.0)
    if correction == "loglinear":
        return steps / (steps + 1) * log_ratio
    return torch.where(steps > 0, log_ratio, 0.0)
