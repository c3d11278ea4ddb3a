"""The Wasserstein distance by closed forms."""

import pytest
import torch

from unified_trainer.numerics.wasserstein import wasserstein


def test_a_shift_is_its_length_and_a_scale_moves_each_value():
    values = torch.randn(50)
    assert wasserstein(values, values.flip(0)) == 0
    assert wasserstein(values, values + 3) == pytest.approx(3, abs=1e-6)
    assert wasserstein(values, 3 * values) == pytest.approx(float(2 * values.abs().mean()), abs=1e-6)


def test_samples_of_unequal_size_compare_their_laws():
    """All of one at 0, the other half at 0 and half at 1: half of the mass moves by 1. Repeats change nothing."""
    zero, both = torch.zeros(3), torch.tensor([1.0, 0.0])
    assert wasserstein(zero, both) == wasserstein(both, zero) == pytest.approx(0.5)
    assert wasserstein(both.repeat(4), torch.tensor([0.0, 1.0, 2.0])) == pytest.approx(1 / 3 + 2 / 3 - 1 / 2)


def test_a_point_is_as_far_as_the_mean_distance():
    law = torch.rand(1000)
    assert wasserstein(torch.tensor([0.25]), law) == pytest.approx(float((law - 0.25).abs().mean()), abs=1e-6)


def test_an_empty_sample_is_refused():
    with pytest.raises(ValueError, match="wasserstein: 0 and 2 values, at least 1 is needed of both"):
        wasserstein(torch.zeros(0), torch.zeros(2))
