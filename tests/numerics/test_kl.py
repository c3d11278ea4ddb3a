"""KL: golden numbers of the estimates, the exact form against the estimates' mean, and the coefficient that follows."""

import math

import pytest
import torch

from unified_trainer.numerics.kernels import log_prob
from unified_trainer.numerics.kl import AdaptiveKL, gaussian_kl, gaussian_kl_estimate, kl_estimate, velocity_kl

LOG_PROB = torch.tensor([-1.0, -1.2, -0.7], dtype=torch.float64)
LOG_PROB_REF = torch.tensor([-1.1, -1.0, -0.7], dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("kl", [0.1, -0.2, 0.0]),
        ("abs", [0.1, 0.2, 0.0]),
        ("mse", [0.005, 0.02, 0.0]),
        ("low_var_kl", [0.00483742, 0.02140276, 0.0]),
    ],
)
def test_estimates_golden(kind, expected):
    got = kl_estimate(kind, LOG_PROB, LOG_PROB_REF)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=5e-9)


@pytest.mark.parametrize(("kind", "same"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")])
def test_the_other_names_of_the_estimates(kind, same):
    assert torch.equal(kl_estimate(kind, LOG_PROB, LOG_PROB_REF), kl_estimate(same, LOG_PROB, LOG_PROB_REF))


@pytest.mark.parametrize(("kind", "slope"), [("abs", 1.0), ("k1", 1.0), ("k2", 0.3), ("k3", 1 - 0.7408182207)])
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


@pytest.mark.slow
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


def test_the_estimates_are_those_of_every_element():
    """d of each element from torch's densities, its estimate, and only then the mean over the sample."""
    mean, mean_ref, eps = torch.randn(3, 2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mean_ref, x_next, normal = mean + 0.3 * mean_ref, mean + 0.3 * eps, torch.distributions.Normal
    log_prob, log_prob_ref = normal(mean, 0.3).log_prob(x_next), normal(mean_ref, 0.3).log_prob(x_next)
    for kind in ("k1", "k2", "k3"):
        expected = kl_estimate(kind, log_prob, log_prob_ref).flatten(1).mean(1)
        got = gaussian_kl_estimate(kind, x_next, mean, mean_ref, torch.tensor(0.3, dtype=torch.float64))
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("elements", [100, 100_000])
def test_the_estimates_have_the_expectation_of_the_kl(elements):
    """400,000 draws of the policy at a KL of .01 per element: k1 and k3 estimate it, k2 adds KL^2 / 2 of each element.

    With a = |dmu| / std = sqrt(2 KL), d = a eps + a^2 / 2: the variance of k1 is a^2, that of k2 and k3 about a^4 / 2.
    """
    x_next, mean, mean_ref, std = drawn(elements)
    exact = gaussian_kl(mean, mean_ref, std).mean()
    assert float(exact) == pytest.approx(0.01, rel=0.02)
    square = ((mean - mean_ref) / std).double().pow(4).mean() / 8
    for kind, bias in (("k1", 0.0), ("k2", float(square)), ("k3", 0.0)):
        got = gaussian_kl_estimate(kind, x_next, mean, mean_ref, std).mean()
        deviation = math.sqrt(0.02 if kind == "k1" else 3 * 0.02**2 / 2)
        assert float(got) == pytest.approx(float(exact) + bias, abs=5 * deviation / math.sqrt(400_000)), kind


@pytest.mark.parametrize("elements", [100, 100_000])
def test_the_gradients_of_k2_and_k3_have_the_expectation_of_that_of_the_kl(elements):
    """Along the move from the reference, by which the KL is .01 t^2: slope .02 at t = 1; that of k1 is 0 on average."""
    x_next, mean, mean_ref, std = drawn(elements)
    slopes = {}
    for kind in ("exact", "k1", "k2", "k3"):
        t = torch.ones((), requires_grad=True)
        moved = mean_ref + t * (mean - mean_ref)
        if kind == "exact":
            gaussian_kl(moved, mean_ref, std).mean().backward()
        else:
            gaussian_kl_estimate(kind, x_next, moved, mean_ref, std).mean().backward()
        slopes[kind] = float(t.grad)
    assert slopes["exact"] == pytest.approx(0.02, rel=0.02)
    assert slopes["k1"] == pytest.approx(0, abs=5 * math.sqrt(0.02 / 400_000))
    assert slopes["k2"] == pytest.approx(slopes["exact"], rel=0.02)
    assert slopes["k3"] == pytest.approx(slopes["exact"], rel=0.02)


def drawn(elements: int):
    """Draw x_next of the policy, float32; its mean is 400,000 elements at a KL of .01 per element on average."""
    generator = torch.Generator().manual_seed(0)
    mean, move, eps = torch.randn(3, 400_000 // elements, elements, generator=generator)
    std = torch.tensor(0.05)
    return mean + std * eps, mean, mean - math.sqrt(0.02) * std * move, std


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_the_estimates_of_a_tiny_kl_keep_their_digits(kind):
    """A KL of 1e-6 per element in float32, as after one update: the log-ratios of the elements are about 1e-3."""
    x_next, mean, mean_ref, std = drawn(100_000)
    near = mean + (mean_ref - mean) / 100
    exact = gaussian_kl(mean.double(), near.double(), std)
    torch.testing.assert_close(gaussian_kl_estimate(kind, x_next, mean, near, std).double(), exact, rtol=0.03, atol=0)


def test_the_gradient_of_an_estimate_never_reaches_the_draw():
    mean = torch.zeros(1, 4, requires_grad=True)
    x_next = (mean + torch.ones(4)).requires_grad_()
    x_next.retain_grad()
    gaussian_kl_estimate("k3", x_next, mean, torch.full((1, 4), 0.1), torch.tensor(0.5)).sum().backward()
    assert x_next.grad is None and mean.grad is not None


def test_one_std_per_sample():
    mean, mean_ref = torch.ones(2, 3, 2, 1, 1), torch.zeros(2, 3, 2, 1, 1)
    std = torch.tensor([0.5, 2.0]).reshape(2, 1, 1, 1, 1)
    assert gaussian_kl(mean, mean_ref, std).tolist() == [2.0, 0.125]


def test_a_step_without_noise_has_no_kl():
    with pytest.raises(ValueError, match="deterministic and has no density"):
        gaussian_kl(torch.ones(1, 2), torch.zeros(1, 2), torch.tensor(0.0))
    with pytest.raises(ValueError, match="deterministic and has no density"):
        gaussian_kl_estimate("k2", torch.ones(1, 2), torch.ones(1, 2), torch.zeros(1, 2), torch.tensor(0.0))


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
    with pytest.raises(ValueError, match="unknown KL estimate 'k4'; have kl, k1, abs, mse, k2, low_var_kl, k3"):
        kl_estimate("k4", LOG_PROB, LOG_PROB_REF)
