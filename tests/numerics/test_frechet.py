"""The Frechet distance against closed forms and against another way to the same number."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unified_trainer.numerics.frechet import frechet_distance


def draw(seed: int, rows: int = 40, size: int = 5) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    mix = torch.randn(size, size, dtype=torch.float64, generator=random)
    return torch.randn(rows, size, dtype=torch.float64, generator=random) @ mix + torch.randn(
        size, dtype=torch.float64, generator=random
    )


def exactly(mean: torch.Tensor, covariance: torch.Tensor) -> torch.Tensor:
    """Rows whose mean and (Bessel) covariance are these: whitened draws, colored again."""
    rows = draw(0, 50, len(mean))
    rows = rows - rows.mean(0)
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(torch.cov(rows.T)), rows.T, upper=False).T
    return white @ torch.linalg.cholesky(covariance).T + mean


def by_eigenvalues(left: torch.Tensor, right: torch.Tensor) -> float:
    """tr (C_l C_r)^(1/2) as the sum of the roots of the eigenvalues of C_l C_r, which is not symmetric."""
    covariances = torch.cov(left.T), torch.cov(right.T)
    roots = torch.linalg.eigvals(covariances[0] @ covariances[1]).real.clamp(min=0).sqrt().sum()
    means = (left.mean(0) - right.mean(0)).square().sum()
    return float(means + covariances[0].trace() + covariances[1].trace() - 2 * roots)


def test_gaussians_of_known_moments():
    """Diagonal covariances commute: |d|^2 + sum (s_l - s_r)^2 = 9 + 16 + (1 - 2)^2 + (3 - 1)^2 = 30."""
    left = exactly(torch.zeros(2, dtype=torch.float64), torch.diag(torch.tensor([1.0, 9.0], dtype=torch.float64)))
    right = exactly(torch.tensor([3.0, 4.0]).double(), torch.diag(torch.tensor([4.0, 1.0], dtype=torch.float64)))
    assert frechet_distance(left, right) == pytest.approx(30, abs=1e-9)


def test_covariances_that_do_not_commute():
    """C_l = [[2, 1], [1, 2]], C_r = diag(1, 4): tr (C_l C_r)^(1/2) = sqrt(tr + 2 sqrt(det)) = sqrt(10 + 2 sqrt(12))."""
    zero = torch.zeros(2, dtype=torch.float64)
    left = exactly(zero, torch.tensor([[2.0, 1.0], [1.0, 2.0]]).double())
    right = exactly(zero, torch.diag(torch.tensor([1.0, 4.0]).double()))
    expected = 4 + 5 - 2 * math.sqrt(10 + 2 * math.sqrt(12))
    assert frechet_distance(left, right) == pytest.approx(expected, abs=1e-9)


def test_one_feature_is_the_closed_form():
    """(mu_l - mu_r)^2 + (s_l - s_r)^2."""
    left, right = torch.tensor([[0.0], [2.0]]), torch.tensor([[3.0], [9.0]])
    expected = (1 - 6) ** 2 + (math.sqrt(2) - math.sqrt(18)) ** 2
    assert frechet_distance(left, right) == pytest.approx(expected)


@given(seed=st.integers(0, 2**16), rows=st.integers(20, 60), size=st.integers(2, 6))
def test_it_is_symmetric_and_agrees_with_the_eigenvalues_of_the_product(seed, rows, size):
    left, right = draw(seed, rows, size), draw(seed + 1, rows + 3, size)
    got = frechet_distance(left, right)
    assert got == pytest.approx(by_eigenvalues(left, right), rel=1e-6, abs=1e-6)
    assert got == pytest.approx(frechet_distance(right, left), rel=1e-9)


@given(seed=st.integers(0, 2**16), rows=st.integers(2, 12))
def test_a_set_is_at_no_distance_from_itself(seed, rows):
    """Also with fewer rows than features, where the covariance is singular: rounding under the root leaves 1e-6."""
    left = draw(seed, rows, 8)
    assert abs(frechet_distance(left, left.flip(0))) < 1e-5 * float(left.square().sum())


def test_a_shift_adds_its_square_and_a_rotation_nothing():
    left, right = draw(0), draw(1)
    shift = torch.arange(5.0, dtype=torch.float64)
    assert frechet_distance(left, left + shift) == pytest.approx(30, rel=1e-6)
    turn = torch.linalg.qr(draw(2, 5, 5)).Q
    assert frechet_distance(left @ turn, right @ turn) == pytest.approx(frechet_distance(left, right))


def test_half_precision_is_computed_in_float64():
    left, right = draw(0).bfloat16(), draw(1).bfloat16()
    assert frechet_distance(left, right) == frechet_distance(left.double(), right.double())


@pytest.mark.parametrize(("left", "right"), [(1, 5), (5, 1), (0, 5)])
def test_too_few_rows_are_refused(left, right):
    with pytest.raises(ValueError, match=f"frechet_distance: {left} and {right} rows, at least 2"):
        frechet_distance(torch.randn(left, 3), torch.randn(right, 3))
