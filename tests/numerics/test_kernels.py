"""Transition kernels and their log-density: golden numbers, the Gaussian identity, and what takes a gradient."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unified_trainer.numerics.flow import sigma_table
from unified_trainer.numerics.kernels import CappedPolicy, Policy, log_prob, transition

K = torch.arange(16, dtype=torch.float64).reshape(2, 8)
X_T, VELOCITY, NOISE = K.sin(), (1.3 * K).cos(), (2.7 * K + 0.5).sin()
SIGMA, SIGMA_NEXT = sigma_table(20, 3.0)[4:6]
SIGMA_MAX = sigma_table(20, 3.0)[1]  # .9827586207
DENSITY_DANCE, DENSITY_FLOW = [1.9333554108, 1.9463761462], [-0.1563957745, -0.1433750391]
DENSITY_WAN, DENSITY_CPS = [0.8268170569, 0.8398377922], [-0.3460167450, -0.3269374125]  # cps unnormalised
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def assert_equal(got, expected, atol):
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("kernel", "level", "std", "mean", "x_next", "density"),
    [
        ("dance", 0.3, 0.045573271519, [-0.0231634615, 0.8343281311, 0.9281229769], 0.623893482937, DENSITY_DANCE),
        ("flow", 0.7, 0.368364368109, [-0.0287307692, 0.7719374203, 0.8670831390], 0.521196368495, DENSITY_FLOW),
        ("flow_wan", 0.0, 0.137807770640, [-0.0238682140, 0.8264302372, 0.9203960868], 0.602744352738, DENSITY_WAN),
        ("cps", 0.8, 0.855950864666, [-0.0709142081, 0.2992035820, 0.4045848521], 0.053675979592, DENSITY_CPS),
    ],
)
def test_kernels_golden(kernel, level, std, mean, x_next, density):
    got, spread = transition(kernel, X_T, VELOCITY, SIGMA, SIGMA_NEXT, level, sigma_max=SIGMA_MAX)
    drawn = got + spread * NOISE
    assert float(spread) == pytest.approx(std, abs=5e-13)
    assert_equal(got[0, :3], mean, atol=5e-11)
    assert float(drawn[1, 7]) == pytest.approx(x_next, abs=5e-13)
    assert_equal(log_prob(drawn, got, spread, normalised=kernel != "cps"), density, atol=5e-11)


def closed_form(s: float, sigma: float, sigma_next: float) -> tuple[torch.Tensor, float]:
    drift = VELOCITY + s**2 / (2 * sigma) * (X_T + (1 - sigma) * VELOCITY)
    return X_T + (sigma_next - sigma) * drift, s * math.sqrt(sigma - sigma_next)


@given(level=st.floats(0.05, 1.0), sigma=st.floats(0.05, 0.99), share=st.floats(0.0, 0.95))
def test_flow_closed_form_below_pure_noise(level, sigma, share):
    """s = level sqrt(sigma / (1 - sigma)); sigma_max is not looked at."""
    mean, std = transition("flow", X_T, VELOCITY, sigma, share * sigma, level)
    expected, spread = closed_form(level * math.sqrt(sigma / (1 - sigma)), sigma, share * sigma)
    assert_equal(mean, expected, atol=1e-9)
    assert float(std) == pytest.approx(spread, rel=1e-12)


@pytest.mark.parametrize("sigma", [1.0, 1 - 1e-5, 0.9995])
def test_flow_is_guarded_near_pure_noise(sigma):
    """A level that rounding left just below 1 would divide by almost nothing."""
    mean, std = transition("flow", X_T, VELOCITY, sigma, 0.98, 0.7, sigma_max=SIGMA_MAX)
    expected, spread = closed_form(0.7 * math.sqrt(sigma / (1 - float(SIGMA_MAX))), sigma, 0.98)
    assert_equal(mean, expected, atol=1e-12)
    assert float(std) == pytest.approx(spread, rel=1e-12)


def test_the_guard_is_of_each_sample():
    sigmas, nexts = torch.tensor([1.0, 0.5], dtype=torch.float64), torch.tensor([0.9, 0.4], dtype=torch.float64)
    mean, std = transition("flow", X_T, VELOCITY, sigmas, nexts, 0.7, sigma_max=SIGMA_MAX)
    for i, s in enumerate((0.7 * math.sqrt(1 / (1 - float(SIGMA_MAX))), 0.7)):
        expected, spread = closed_form(s, float(sigmas[i]), float(nexts[i]))
        assert_equal(mean[i], expected[i], atol=1e-12)
        assert float(std[i]) == pytest.approx(spread, rel=1e-12)


@pytest.mark.parametrize("sigma_max", [None, 1.0])
@pytest.mark.parametrize(("kernel", "sigma"), [("flow", 1.0), ("flow_wan", 1.0), ("flow_wan", 0.5)])
def test_a_kernel_says_that_it_needs_the_second_level(kernel, sigma, sigma_max):
    with pytest.raises(ValueError, match=f"{kernel} needs sigma_max"):
        transition(kernel, X_T, VELOCITY, sigma, 0.4, 0.7, sigma_max=sigma_max)


@given(level=st.floats(0.0, 1.0), sigma=st.floats(0.05, 0.99), share=st.floats(0.0, 0.95))
def test_cps_keeps_the_noise_level(level, sigma, share):
    """The noise that the mean keeps and the new noise add up to sigma_next in variance: coefficients preserved."""
    sigma_next = share * sigma
    x0, noise = X_T - sigma * VELOCITY, X_T + (1 - sigma) * VELOCITY
    mean, std = transition("cps", X_T, VELOCITY, sigma, sigma_next, level)
    kept = (mean - (1 - sigma_next) * x0) / noise
    assert_equal(kept.square() + std.square(), torch.full_like(kept, sigma_next**2), atol=1e-9)


def test_cps_at_level_one_renoises_and_at_level_zero_is_euler():
    x0 = X_T - SIGMA * VELOCITY
    mean, std = transition("cps", X_T, VELOCITY, SIGMA, SIGMA_NEXT, 1.0)
    assert_equal(mean, (1 - SIGMA_NEXT) * x0, atol=1e-15)
    assert float(std) == float(SIGMA_NEXT)
    mean, std = transition("cps", X_T, VELOCITY, SIGMA, SIGMA_NEXT, 0.0)
    assert_equal(mean, X_T + (SIGMA_NEXT - SIGMA) * VELOCITY, atol=1e-12)
    assert float(std) == 0


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
    assert mean.dtype == std.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert density.dtype == torch.float64  # a mean over elements
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


@pytest.mark.parametrize(("kernel", "level", "capped"), [("flow", 0.6, [0, 1]), ("dance", 0.9, [3])])
def test_a_capped_policy_has_no_larger_standard_deviation(kernel, level, capped):
    """Where it is capped, mean and std are those of the diffusion cap / sqrt(-dt); elsewhere those without a cap."""
    sigmas = torch.tensor([1.0, 0.8, 0.6, 0.45, 0.1, 0.0], dtype=torch.float64)
    whole, cut = Policy(kernel, level, sigmas), CappedPolicy(kernel, level, sigmas, std_cap=0.45)
    x_t, velocity = torch.randn(2, 2, 3, dtype=torch.float64)
    for s in range(4):
        sigma, dt = float(sigmas[s]), float(sigmas[s + 1] - sigmas[s])
        mean, std = cut.step(s, x_t, velocity)
        if s not in capped:
            assert torch.equal(mean, whole.step(s, x_t, velocity)[0]) and whole.std(s) < 0.45
            continue
        assert float(std.flatten()[0]) == pytest.approx(0.45) and whole.std(s) > 0.45
        noise = x_t + (1 - sigma) * velocity
        expected = x_t + dt * (velocity + (0.45**2 / -dt) / (2 * sigma) * noise)
        torch.testing.assert_close(mean, expected)
