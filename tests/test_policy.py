"""Transition kernels and their log-density: golden numbers, the Gaussian identity, and what takes a gradient."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unified_trainer.flow import sigma_table
from unified_trainer.policy import log_prob, transition

K = torch.arange(16, dtype=torch.float64).reshape(2, 8)
X_T, VELOCITY, NOISE = K.sin(), (1.3 * K).cos(), (2.7 * K + 0.5).sin()
SIGMA, SIGMA_NEXT = sigma_table(20, 3.0)[4:6]
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def assert_equal(got, expected, atol):
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=atol)


def test_dance_golden():
    mean, std = transition("dance", X_T, VELOCITY, SIGMA, SIGMA_NEXT, 0.3)
    x_next = mean + std * NOISE
    assert float(std) == pytest.approx(0.045573271519, abs=5e-13)
    assert_equal(mean[0, :3], [-0.0231634615, 0.8343281311, 0.9281229769], atol=5e-11)
    assert float(x_next[1, 7]) == pytest.approx(0.623893482937, abs=5e-13)
    assert_equal(log_prob(x_next, mean, std), [1.9333554108, 1.9463761462], atol=5e-11)


def test_ode_is_the_euler_step_without_density():
    """s = 0: mean = x + (sigma' - sigma) v, std 0."""
    mean, std = transition("ode", X_T, VELOCITY, SIGMA, SIGMA_NEXT, 0.3)
    assert_equal(mean, X_T + (SIGMA_NEXT - SIGMA) * VELOCITY, atol=1e-15)
    assert float(std) == 0
    with pytest.raises(ValueError, match="deterministic and has no density"):
        log_prob(mean, mean, std)


def test_ode_reaches_the_data_in_one_step():
    x0, noise = X_T, NOISE
    mean, _ = transition("ode", noise, noise - x0, 1.0, 0.0, 0.0)
    assert_equal(mean, x0, atol=1e-14)


@given(level=st.floats(0.01, 1.0), sigma=st.floats(0.05, 1.0), share=st.floats(0.0, 0.95))
def test_dance_closed_form(level, sigma, share):
    """mean = x + dt (v + s^2/(2 sigma) (x + (1 - sigma) v)), std = s sqrt(-dt), dt = sigma' - sigma."""
    sigma_next = share * sigma
    mean, std = transition("dance", X_T, VELOCITY, sigma, sigma_next, level)
    dt = sigma_next - sigma
    drift = VELOCITY + level**2 / (2 * sigma) * (X_T + (1 - sigma) * VELOCITY)
    assert_equal(mean, X_T + dt * drift, atol=1e-10)
    assert float(std) == pytest.approx(level * math.sqrt(-dt), rel=1e-12)


@given(seed=st.integers(0, 1000), std=st.floats(0.01, 3.0))
def test_log_prob_is_the_mean_of_a_normal(seed, std):
    generator = torch.Generator().manual_seed(seed)
    mean, x_next = torch.randn(2, 3, 4, 2, generator=generator, dtype=torch.float64)
    expected = torch.distributions.Normal(mean, std).log_prob(x_next).flatten(1).mean(1)
    assert_equal(log_prob(x_next, mean, torch.tensor(std, dtype=torch.float64)), expected, atol=1e-9)


def test_log_prob_does_not_depend_on_the_number_of_elements():
    """A mean, not a sum: every element twice gives the same density."""
    mean, x_next, std = X_T, NOISE, torch.tensor(0.7, dtype=torch.float64)
    doubled = log_prob(torch.cat([x_next, x_next], 1), torch.cat([mean, mean], 1), std)
    assert_equal(doubled, log_prob(x_next, mean, std), atol=1e-14)


def test_one_level_per_sample():
    sigmas, nexts = torch.tensor([0.9, 0.5], dtype=torch.float64), torch.tensor([0.7, 0.1], dtype=torch.float64)
    x_t, velocity = X_T.reshape(2, 2, 2, 2), VELOCITY.reshape(2, 2, 2, 2)
    mean, std = transition("dance", x_t, velocity, sigmas, nexts, 0.3)
    density = log_prob(x_t, mean, std)
    for i in range(2):
        one = slice(i, i + 1)
        alone, spread = transition("dance", x_t[one], velocity[one], float(sigmas[i]), float(nexts[i]), 0.3)
        assert_equal(mean[one], alone, atol=1e-15)
        assert_equal(density[one], log_prob(x_t[one], alone, spread), atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
def test_half_precision_is_computed_in_float32(dtype):
    x_t, velocity, x_next = X_T.to(dtype), VELOCITY.to(dtype), NOISE.to(dtype)
    mean, std = transition("dance", x_t, velocity, SIGMA, SIGMA_NEXT, 0.3)
    density = log_prob(x_next, mean, std)
    assert mean.dtype == std.dtype == density.dtype == (dtype if dtype == torch.float64 else torch.float32)
    exact, spread = transition("dance", x_t.double(), velocity.double(), SIGMA, SIGMA_NEXT, 0.3)
    torch.testing.assert_close(mean.double(), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(density.double(), log_prob(x_next.double(), exact, spread), rtol=1e-4, atol=1e-4)


def test_the_gradient_flows_into_the_mean_and_never_into_the_sample():
    """x' = mean + std eps is a constant of the density: d logp / d mean = (x' - mean) / (std^2 D)."""
    mean, x_next = X_T.clone().requires_grad_(), NOISE.clone().requires_grad_()
    std = torch.tensor(0.5, dtype=torch.float64)
    log_prob(x_next, mean, std).sum().backward()
    assert x_next.grad is None
    assert_equal(mean.grad, ((NOISE - X_T) / 0.25 / 8), atol=1e-13)


def test_drawing_with_a_graph_does_not_cancel_it():
    """Were x' not detached, (x' - mean) / std = eps would have no gradient in the mean at all."""
    velocity = VELOCITY.clone().requires_grad_()
    mean, std = transition("dance", X_T, velocity, SIGMA, SIGMA_NEXT, 0.3)
    log_prob(mean + std * NOISE, mean, std).sum().backward()
    assert float(velocity.grad.abs().min()) > 0


@pytest.mark.parametrize("sigma_next", [0.5, 0.6])
def test_a_step_must_go_down(sigma_next):
    with pytest.raises(ValueError, match="sigma_next must be below sigma"):
        transition("dance", X_T, VELOCITY, 0.5, sigma_next, 0.3)


def test_an_unknown_kernel_is_named(unchecked):
    with pytest.raises(ValueError, match="unknown kernel 'danse'; have ode, dance"):
        transition("danse", X_T, VELOCITY, SIGMA, SIGMA_NEXT, 0.3)
