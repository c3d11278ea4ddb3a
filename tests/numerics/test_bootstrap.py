"""Intervals of means: coverage of a known law, invariances, and what pairing is worth."""

import pytest
import torch

from unified_trainer.numerics.bootstrap import bootstrap_interval, student_quantile, wilson_interval

ASKED = {"resamples": 2000, "seed": 0, "confidence": 0.95}


def first(means: torch.Tensor) -> torch.Tensor:
    return means[:, 0]


def gain(means: torch.Tensor) -> torch.Tensor:
    return means[:, 1] - means[:, 0]


def pairs(count: int = 30, seed: int = 0, noise: float = 0.1) -> torch.Tensor:
    """Two columns that share what is hard about a unit: the second is the first plus 0.2 plus noise."""
    random = torch.Generator().manual_seed(seed)
    one, more = torch.randn(2, count, dtype=torch.float64, generator=random)
    return torch.stack([one, one + 0.2 + noise * more], 1)


@pytest.mark.slow
@pytest.mark.parametrize("count", [5, 10, 30])
def test_the_interval_of_a_normal_mean_covers_it(count):
    """500 trials: +-0.03. Without Student's quantile it is 0.87 of 5 draws."""
    random = torch.Generator().manual_seed(1)
    draws = 3 + 2 * torch.randn(500, count, 1, dtype=torch.float64, generator=random)
    asked = ASKED | {"resamples": 1000}
    found = [bootstrap_interval(rows, first, **asked) for rows in draws]
    assert sum(low < 3 < high for low, high in found) / len(found) == pytest.approx(0.95, abs=0.03)


@pytest.mark.parametrize(
    ("confidence", "freedom", "quantile"),
    [
        (0.95, 1, 12.7062),
        (0.95, 2, 4.3027),
        (0.95, 4, 2.7764),
        (0.99, 9, 3.2498),
        (0.9, 19, 1.7291),
        (0.95, 999, 1.9623),
    ],
)
def test_students_quantiles(confidence, freedom, quantile):
    assert student_quantile(confidence, freedom) == pytest.approx(quantile, abs=1e-4)


def test_its_width_is_that_of_students_law():
    """2 x t_9 s / sqrt(n), with Bessel's s; without the factor sqrt(n / (n - 1)) it is 5 % less at n = 10."""
    random = torch.Generator().manual_seed(2)
    widths = []
    for seed in range(100):
        rows = torch.randn(10, 1, dtype=torch.float64, generator=random)
        low, high = bootstrap_interval(rows, first, **ASKED | {"seed": seed})
        widths.append((high - low) / (2 * 2.262 * float(rows.std()) / 10**0.5))
    assert sum(widths) / 100 == pytest.approx(1.0, abs=0.025)


def test_it_does_not_depend_on_the_order_of_the_units():
    rows = pairs()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(3))
    assert bootstrap_interval(rows, gain, **ASKED) == bootstrap_interval(rows[order], gain, **ASKED)


def test_it_follows_from_the_seed():
    rows = pairs()
    assert bootstrap_interval(rows, gain, **ASKED) == bootstrap_interval(rows, gain, **ASKED)
    assert bootstrap_interval(rows, gain, **ASKED) != bootstrap_interval(rows, gain, **ASKED | {"seed": 1})


def test_equal_columns_differ_by_nothing_at_all():
    one = torch.randn(17, generator=torch.Generator().manual_seed(4))
    assert bootstrap_interval(torch.stack([one, one], 1), gain, **ASKED) == (0, 0)

    def of_roots(means):
        return means[:, 1].exp().sqrt() - means[:, 0].exp().sqrt()

    assert bootstrap_interval(torch.stack([one, one], 1), of_roots, **ASKED) == (0, 0)


def test_a_constant_difference_is_known_exactly():
    rows = pairs(noise=0.0)
    assert bootstrap_interval(rows, gain, **ASKED) == pytest.approx((0.2, 0.2), abs=1e-12)


def test_pairing_narrows_the_interval():
    """Of a difference of variance 0.1^2 instead of 1 + 1: by 0.1 / sqrt(2) = 0.07, here from 30 units."""
    rows = pairs()
    alone = [bootstrap_interval(rows[:, i : i + 1], first, **ASKED) for i in (0, 1)]
    unpaired = sum((high - low) ** 2 for low, high in alone) ** 0.5
    low, high = bootstrap_interval(rows, gain, **ASKED)
    assert 0.05 < (high - low) / unpaired < 0.1
    assert low < 0.2 < high


def test_more_resamples_than_fit_at_a_time_are_all_drawn():
    rows = pairs()
    low, high = bootstrap_interval(rows, gain, **ASKED | {"resamples": 1})
    assert low == high
    narrow, wide = (
        bootstrap_interval(rows, gain, **ASKED | {"resamples": 2500, "confidence": level}) for level in (0.5, 0.99)
    )
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_one_unit_is_refused():
    with pytest.raises(ValueError, match="bootstrap_interval: 1 rows, at least 2"):
        bootstrap_interval(torch.ones(1, 1), first, **ASKED)


@pytest.mark.parametrize(
    ("share", "count", "low", "high"),
    [
        (0.5, 10, 0.2366, 0.7634),  # 1/2 -+ z / (2 sqrt(n + z^2))
        (1.0, 10, 0.7225, 1.0),  # 1 / (1 + z^2 / n)
        (0.0, 10, 0.0, 0.2775),
    ],
)
def test_wilson(share, count, low, high):
    assert wilson_interval(share, count, 0.95) == pytest.approx((low, high), abs=1e-4)


def test_wilson_needs_a_unit():
    with pytest.raises(ValueError, match="wilson_interval: 0 units"):
        wilson_interval(0.5, 0, 0.95)
