"""Intervals of means over independent units: the bootstrap, paired where units are shared, and Wilson's of a share."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

Statistic = Callable[[Float[Tensor, "r k"]], Float[Tensor, " r"]]  # of the means of k columns, row by row
AT_A_TIME = 1000  # resamples in memory


def bootstrap_interval(
    columns: Float[Tensor, "n k"], statistic: Statistic, *, resamples: int, seed: int, confidence: float
) -> tuple[float, float]:
    """Return the percentile interval of statistic(means of the columns) over resampled rows (Efron, Ann. Stat. 1979).

    A row is a unit that is independent of the others, such as a prompt; its columns are drawn together, so that what
    they share cancels in a difference. With t the statistic of the rows themselves and q a quantile of the resampled
    ones, an end is t + (q - t) sqrt(n / (n - 1)) t_(n-1) / z: resampled means vary by the variance of the rows without
    Bessel's correction, as does a smooth statistic of them, and few rows know their variance badly, which the ratio of
    Student's quantile to the normal one makes up for (1.42 at n = 5 and confidence .95, 1.07 at 20). The result does
    not depend on the order of the rows. Raise ValueError for less than two rows.
    """
    count = len(columns)
    if count < 2:
        raise ValueError(f"bootstrap_interval: {count} rows, at least 2 are needed")
    ordered = torch.tensor(sorted(columns.double().tolist()), dtype=torch.float64)
    parts = [column.contiguous() for column in ordered.unbind(1)]
    draw, statistics = torch.Generator().manual_seed(seed), []
    for start in range(0, resamples, AT_A_TIME):
        picks = torch.randint(count, (min(AT_A_TIME, resamples - start), count), generator=draw)
        times = torch.zeros(picks.shape, dtype=torch.float64).scatter_add_(1, picks, torch.ones_like(picks).double())
        # one product for each column: equal columns have equal means, bit for bit
        statistics.append(statistic(torch.stack([times @ part / count for part in parts], 1)))
    itself = float(statistic(ordered.mean(0, keepdim=True)))
    ends = torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=torch.float64)
    low, high = torch.quantile(torch.cat(statistics), ends).tolist()
    wider = (count / (count - 1)) ** 0.5 * student_quantile(confidence, count - 1) / _normal_quantile(confidence)
    return itself + (low - itself) * wider, itself + (high - itself) * wider


def wilson_interval(share: float, count: int, confidence: float) -> tuple[float, float]:
    """Return Wilson's interval of a share of `count` independent units (J. Am. Stat. Assoc. 1927).

    Its ends solve (share - p)^2 = z^2 p (1 - p) / count, with z the normal quantile. Units that count as a half make
    it wider than it need be. Raise ValueError for less than one unit.
    """
    if count < 1:
        raise ValueError(f"wilson_interval: {count} units, at least 1 is needed")
    z = _normal_quantile(confidence)
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * (share * (1 - share) / count + (z / (2 * count)) ** 2) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)


def student_quantile(confidence: float, freedom: int) -> float:
    """Return the t with P(|T| < t) = confidence, 0 < confidence < 1, of Student's law with `freedom` degrees.

    The probability is a finite sum in theta = atan(t / sqrt(freedom)) (Abramowitz and Stegun, 26.7.3 and 26.7.4).
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        theta = (low + high) / 2
        low, high = (theta, high) if _student_share(theta, freedom) < confidence else (low, theta)
    return math.tan(low) * math.sqrt(freedom)


def _student_share(theta: float, freedom: int) -> float:
    odd = freedom % 2
    term, total = (math.cos(theta), 0.0) if odd else (1.0, 0.0)
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= math.cos(theta) ** 2 * (k - 1) / k
    return 2 / math.pi * (theta + math.sin(theta) * total) if odd else math.sin(theta) * total


def _normal_quantile(confidence: float) -> float:
    """Return the z with P(|Z| < z) = confidence."""
    return float(torch.special.ndtri(torch.tensor((1 + confidence) / 2, dtype=torch.float64)))
