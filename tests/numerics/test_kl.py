"""KL: the exact form by hand and by torch, and the coefficient that follows."""

import pytest
import torch

from unified_trainer.numerics.kl import AdaptiveKL, gaussian_kl, velocity_kl


def test_the_exact_form_by_hand():
    """dmu = (.3, -.1), std .5: mean square .05 over 2 x .25."""
    mean, mean_ref = torch.tensor([[1.3, 0.9]]), torch.ones(1, 2)
    assert float(gaussian_kl(mean, mean_ref, torch.tensor(0.5))) == pytest.approx(0.1)
    assert float(velocity_kl(mean, mean_ref)) == pytest.approx(0.05)


def test_the_exact_form_is_that_of_torch():
    generator = torch.Generator().manual_seed(0)
    mean, mean_ref = torch.randn(2, 2, 100, generator=generator, dtype=torch.float64)
    mean_ref, std = mean + 0.1 * mean_ref, torch.tensor(0.7, dtype=torch.float64)
    exact = gaussian_kl(mean, mean_ref, std)
    normal = torch.distributions.Normal
    divergence = torch.distributions.kl_divergence(normal(mean, 0.7), normal(mean_ref, 0.7)).mean(1)
    torch.testing.assert_close(exact, divergence)


def test_one_std_per_sample():
    mean, mean_ref = torch.ones(2, 3, 2, 1, 1), torch.zeros(2, 3, 2, 1, 1)
    std = torch.tensor([0.5, 2.0]).reshape(2, 1, 1, 1, 1)
    assert gaussian_kl(mean, mean_ref, std).tolist() == [2.0, 0.125]


def test_a_step_without_noise_has_no_kl():
    with pytest.raises(ValueError, match="deterministic and has no density"):
        gaussian_kl(torch.ones(1, 2), torch.zeros(1, 2), torch.tensor(0.0))


@pytest.mark.parametrize(("kl", "expected"), [(0.05, 0.099488), (0.3, 0.100512), (0.11, 0.100256), (0.1, 0.1)])
def test_the_adaptive_coefficient_golden(kl, expected):
    adaptive = AdaptiveKL(coefficient=0.1, target=0.1, horizon=1e4)
    assert adaptive.update(kl, 256) == pytest.approx(expected, abs=1e-12)
    assert adaptive.coefficient == pytest.approx(expected, abs=1e-12)


def test_the_adaptive_coefficient_goes_on_from_where_it_is():
    adaptive = AdaptiveKL(coefficient=0.1, target=0.1, horizon=1e4)
    adaptive.update(0.05, 256)
    assert adaptive.update(0.05, 256) == pytest.approx(0.1 * (1 - 0.2 * 0.0256) ** 2)


@pytest.mark.parametrize("changes", [{"target": 0.0}, {"horizon": 0.0}])
def test_a_target_and_a_horizon_are_needed(changes):
    with pytest.raises(ValueError, match="target and horizon must be above 0"):
        AdaptiveKL(**{"coefficient": 0.1, "target": 0.1, "horizon": 1e4} | changes)
