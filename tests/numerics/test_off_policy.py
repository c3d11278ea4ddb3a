"""Corrections in closed form, for a Gaussian policy of D elements whose mean has moved.

With shift d of the mean in units of the standard deviation, equal in all elements, the log-density ratio of a whole
sample is normal under the older policy: variance s^2 = D d^2, mean -s^2 / 2.
"""

import math

import pytest
import torch

from unified_trainer.numerics.importance_weight import importance_weight
from unified_trainer.numerics.kernels import log_prob
from unified_trainer.numerics.objectives import Clip, Unclipped, diagnostics
from unified_trainer.numerics.off_policy import proximal_log_ratio

pytestmark = pytest.mark.slow

ELEMENTS, SHIFT, DRAWS = 8, 0.2, 200_000
SPREAD = SHIFT * math.sqrt(ELEMENTS)
LAGS = torch.tensor([0, 1, 3])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def log_ratios() -> torch.Tensor:
    """Mean log-ratio per element of draws from the older policy N(0, 1)."""
    draws = torch.randn(DRAWS, ELEMENTS, dtype=torch.float64, generator=generator())
    return log_prob(draws, torch.full_like(draws, SHIFT), torch.ones(())) - log_prob(
        draws, torch.zeros_like(draws), torch.ones(())
    )


def normal(z: float) -> float:
    return (1 + math.erf(z / math.sqrt(2))) / 2


# Importance weights.


def test_joint_weights_have_mean_1_and_the_ess_of_a_lognormal():
    """E w = 1 and E w^2 = exp(s^2) under the older policy: ess = exp(-D d^2), by `diagnostics` of the objective w A."""
    weight = importance_weight(log_ratios(), ELEMENTS, "joint", math.inf)
    assert float(weight.mean()) == pytest.approx(1, abs=5 * math.sqrt(math.expm1(SPREAD**2) / DRAWS))
    zeros, ones = torch.zeros_like(weight), torch.ones_like(weight)
    measured = diagnostics(Unclipped(), zeros, ones, clip_low=0.2, clip_high=0.2, weight=weight)
    assert measured["ess"] == pytest.approx(math.exp(-(SPREAD**2)), rel=0.01)
    assert measured["u_mean"] == pytest.approx(float(weight.mean()))


@pytest.mark.parametrize("largest", [1.0, 1.5, 3.0])
def test_truncated_weights_have_the_mean_of_a_truncated_lognormal(largest):
    """E min(w, c) = Phi((ln c - s^2/2) / s) + c Phi(-(ln c + s^2/2) / s)."""
    weight = importance_weight(log_ratios(), ELEMENTS, "joint", largest)
    below = normal((math.log(largest) - SPREAD**2 / 2) / SPREAD)
    above = normal(-(math.log(largest) + SPREAD**2 / 2) / SPREAD)
    assert float(weight.mean()) == pytest.approx(below + largest * above, abs=5 * float(weight.std()) / DRAWS**0.5)
    assert float(weight.max()) <= largest


def test_mean_weights_are_the_geometric_mean_of_the_ratios_of_elements():
    log_ratio = torch.tensor([-0.3, 0.0, 0.2], dtype=torch.float64)
    torch.testing.assert_close(importance_weight(log_ratio, 1000, "mean", 5.0), log_ratio.exp(), rtol=0, atol=0)
    joint = importance_weight(log_ratio, 3, "joint", 5.0)
    torch.testing.assert_close(joint, (3 * log_ratio).exp(), rtol=1e-12, atol=0)


def test_a_weight_that_would_overflow_is_bounded():
    weight = importance_weight(torch.tensor([-1.0, 1.0]), 10**6, "joint", math.inf)
    torch.testing.assert_close(weight, torch.tensor([-20.0, 20.0], dtype=torch.float64).exp())


# The proximal policy.


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ("none", [0, 0, 0]),
        ("decoupled", [0, 0.7, 0.7]),
        ("loglinear", [0, 0.5 * 0.1, 0.75 * 0.1]),
        ("truncated", [0, 0.1, 0.1]),
    ],
)
def test_the_proximal_policy_of_samples_of_lag_0_1_and_3(correction, expected):
    """A sample of lag 0 has none but the behavior policy, so that its loss is not corrected."""
    log_ratio = torch.full((3,), 0.1, dtype=torch.float64, requires_grad=True)
    proximal = proximal_log_ratio(correction, log_ratio, torch.full((3,), 0.7, dtype=torch.float64), LAGS)
    assert proximal.tolist() == pytest.approx(expected, rel=1e-12) and not proximal.requires_grad
    assert float(proximal[0].detach()) == 0


def test_loglinear_clips_where_the_whole_ratio_is_a_power_of_the_range():
    """The ratio to the proximal policy is r^(1 / (lag + 1)): the clip acts where r leaves (1 +- c)^(lag + 1)."""
    log_ratio = torch.linspace(-0.5, 0.5, 401, dtype=torch.float64)
    lag = torch.full((401,), 3)
    ratio = log_ratio - proximal_log_ratio("loglinear", log_ratio, torch.zeros_like(log_ratio), lag)
    stopped = diagnostics(Clip(), ratio, torch.ones(401), clip_low=0.1, clip_high=0.1)["zero_gradient_fraction"]
    assert stopped == pytest.approx(float((log_ratio > 4 * math.log(1.1)).double().mean()))


# Gradients of old samples.


def gradient(correction: str, density: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimate the policy gradient from draws of the older policy: the mean and its standard error, per element.

    The reward of x is c.x + |x|^2; older mean .0, present mean .2. Every draw has a copy of the mean: its own gradient.
    """
    draws = torch.randn(DRAWS, ELEMENTS, dtype=torch.float64, generator=generator(seed))
    reward = draws @ torch.linspace(-1, 1, ELEMENTS, dtype=torch.float64) + draws.square().sum(1)
    mean = torch.full((DRAWS, ELEMENTS), SHIFT, dtype=torch.float64, requires_grad=True)
    one = torch.ones(())
    log_ratio = log_prob(draws, mean, one) - log_prob(draws, torch.zeros_like(draws), one)
    # at the start of a training step the proximal policy is the present one
    proximal = proximal_log_ratio(correction, log_ratio, log_ratio.detach(), torch.ones(DRAWS, dtype=torch.int64))
    weight = importance_weight(proximal, ELEMENTS, density, math.inf)
    objective = weight * Clip()(log_ratio - proximal, reward, 1e-3, 1e-3)
    (of_draws,) = torch.autograd.grad(objective.sum(), mean)
    return of_draws.mean(0), of_draws.std(0) / DRAWS**0.5


EXACT = (torch.linspace(-1, 1, ELEMENTS, dtype=torch.float64) + 2 * SHIFT) / ELEMENTS  # d E[reward] / d mean / D


@pytest.mark.parametrize("correction", ["decoupled", "truncated"])
def test_joint_weights_give_old_samples_the_gradient_of_new_ones(correction):
    """In expectation: the estimate is within five standard errors of d E[reward] / d mean under the present policy."""
    estimate, error = gradient(correction, "joint", seed=1)
    assert bool(((estimate - EXACT).abs() < 5 * error).all())


@pytest.mark.parametrize(("correction", "density"), [("none", "mean"), ("decoupled", "mean"), ("truncated", "mean")])
def test_other_estimates_are_biased(correction, density):
    """Mean weights only move the clip range: the estimate stays many standard errors away."""
    estimate, error = gradient(correction, density, seed=1)
    assert float(((estimate - EXACT).abs() / error).max()) > 20
