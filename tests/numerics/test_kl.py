"""KL: golden numbers of the estimates, the exact form against the estimates' mean, and the coefficient that follows."""

import pytest
import torch

from unified_trainer.numerics.kernels import log_prob
from unified_trainer.numerics.kl import AdaptiveKL, gaussian_kl, kl_estimate, velocity_kl

LOG_PROB = torch.tensor([-1.0, -1.2, -0.7], dtype=torch.float64)
LOG_PROB_REF = torch.tensor([-1.1, -1.0, -0.7], dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("k1", [0.1, -0.2, 0.0]), ("k2", [0.005, 0.02, 0.0]), ("k3", [0.00483742, 0.02140276, 0.0])],
)
def test_estimates_golden(kind, expected):
    got = kl_estimate(kind, LOG_PROB, LOG_PROB_REF)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=5e-9)


@pytest.mark.parametrize(("kind", "slope"), [("k1", 1.0), ("k2", 0.3), ("k3", 1 - 0.7408182207)])
def test_the_slope_of_the_estimates(kind, slope):
    """In l, at l - lr = .3: 1, l - lr, 1 - e^(lr - l)."""
    current = torch.tensor([0.3], dtype=torch.float64, requires_grad=True)
    kl_estimate(kind, current, torch.zeros(1, dtype=torch.float64)).backward()
    assert float(current.grad) == pytest.approx(slope)


def test_k3_of_tiny_differences_keeps_its_digits():
    """d^2 / 2 at d = 1e-4 in float32, where e^d - d - 1 would be rounding."""
    got = kl_estimate("k3", torch.tensor([1e-4]), torch.zeros(1))
    assert float(got) == pytest.approx(5e-9, rel=0.02)


def test_the_exact_form_by_hand():
    """dmu = (.3, -.1), std .5: mean square .05 over 2 x .25."""
    mean, mean_ref = torch.tensor([[1.3, 0.9]]), torch.ones(1, 2)
    assert float(gaussian_kl(mean, mean_ref, torch.tensor(0.5))) == pytest.approx(0.1)
    assert float(velocity_kl(mean, mean_ref)) == pytest.approx(0.05)


def test_the_exact_form_is_the_mean_of_k1_and_of_torch():
    generator = torch.Generator().manual_seed(0)
    mean, mean_ref, eps = torch.randn(3, 2, 4, 3, 200_000, generator=generator, dtype=torch.float64)[:, :, 0, 0]
    mean_ref, std = mean + 0.1 * mean_ref, torch.tensor(0.7, dtype=torch.float64)
    exact = gaussian_kl(mean, mean_ref, std)
    normal = torch.distributions.Normal
    divergence = torch.distributions.kl_divergence(normal(mean, 0.7), normal(mean_ref, 0.7)).mean(1)
    torch.testing.assert_close(exact, divergence)
    x_next = mean + std * eps
    k1 = kl_estimate("k1", log_prob(x_next, mean, std), log_prob(x_next, mean_ref, std))
    torch.testing.assert_close(k1, exact, rtol=0, atol=4 * float((2 * exact / 200_000).sqrt().max()))


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


def test_an_unknown_estimate_is_named(unchecked):
    with pytest.raises(ValueError, match="unknown KL estimate 'k4'; have k1, k2, k3"):
        kl_estimate("k4", LOG_PROB, LOG_PROB_REF)
