"""The flow process: golden numbers of the schedules, and identities that hold for every input."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unified_trainer.numerics import flow

SHIFTS = st.floats(0.2, 20.0)
LEVELS = st.floats(0.01, 1.0)
SEEDS = st.integers(0, 10_000)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PER_SAMPLE = (flow.add_noise, flow.x0_from_velocity, flow.noise_from_velocity, flow.guide)


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_equal(got, expected, atol=1e-12):
    torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=atol)


# Golden numbers.


@pytest.mark.parametrize(
    ("shift", "quarters", "total"),
    [
        (3.0, [900.0, 750.0, 500.0], 676540.5613),
        (5.0, [937.5, 2500 / 3, 625.0], 747550.2524),
        (8.0, [960.0, 8000 / 9, 8000 / 11], 803855.8267),
    ],
)
def test_the_thousand_point_table(shift, quarters, total):
    table = 1000 * flow.sigma_table(1000, shift)
    assert len(table) == 1001 and table[0] == 1000 and table[-1] == 0
    assert_equal(table[[250, 500, 750]], quarters, atol=1e-9)
    assert_equal(table.sum(), total, atol=5e-5)


def test_the_ends_of_the_shift_5_table():
    table = 1000 * flow.sigma_table(1000, 5.0)
    assert_equal(table[:4], [1000, 999.799840, 999.599359, 999.398557], atol=5e-7)
    assert_equal(table[-4:-1], [14.822134, 9.920635, 4.980080], atol=5e-7)


def test_twenty_steps_at_shift_3():
    table = flow.sigma_table(20, 3.0)
    assert len(table) == 21 and table.dtype == torch.float64
    assert_equal(table[:6], [1, 0.982759, 0.964286, 0.944444, 0.923077, 0.9], atol=5e-7)
    assert_equal(table[-3:], [0.25, 0.136364, 0], atol=5e-7)


@pytest.mark.parametrize(
    ("shift", "expected"),
    [
        (3.0, [1, 0.9, 0.75, 0.5]),
        (5.0, [1, 0.9375, 5 / 6, 0.625]),
        (8.0, [1, 0.96, 8 / 9, 8 / 11]),
    ],
)
def test_shifted_levels_of_a_few_step_sampler(shift, expected):
    assert_equal(flow.shift_sigma(torch.tensor([1, 0.75, 0.5, 0.25], dtype=torch.float64), shift), expected)


def test_published_step_indices_are_points_of_the_thousand_point_table():
    """Published schedules list indices: step -> T[1000 - step] (CausVid, arXiv:2412.07772)."""
    steps = torch.tensor([1000, 757, 522, 3])
    assert_equal(flow.shift_sigma(steps.double() / 1000, 5.0), flow.sigma_table(1000, 5.0)[1000 - steps])


def test_a_table_needs_a_step():
    with pytest.raises(ValueError, match="num_steps must be at least 1, not 0"):
        flow.sigma_table(0, 3.0)


# Laws of noise levels.


@given(u=st.floats(0, 1, exclude_max=True), shift=SHIFTS)
def test_shifted_uniform_levels_are_the_shifted_u(u, shift):
    u = torch.tensor([u], dtype=torch.float64)
    assert torch.equal(flow.ShiftedUniform(shift)(u), flow.shift_sigma(u, shift))
    both = flow.ShiftedUniform(shift)(torch.stack([u, u], 1))
    assert both.shape == (1, 2) and torch.equal(both[:, 0], flow.shift_sigma(u, shift))


@given(sigma=st.floats(0.05, 0.95), shift=st.floats(0.5, 12))
def test_the_share_of_shifted_uniform_levels_by_counting(sigma, shift):
    u = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    law = flow.ShiftedUniform(shift)
    assert law.share_above(sigma) == pytest.approx(float((law(u) >= sigma).double().mean()), abs=1e-4)
    assert law.share_above(sigma) == 1 - sigma / (shift - (shift - 1) * sigma)


@pytest.mark.parametrize(("shift", "share"), [(1, 0.125), (3, 0.30), (5, 0.4167), (8, 0.533), (12, 0.632)])
def test_the_share_of_the_high_noise_expert_golden(shift, share):
    """At the boundary 0.875 of Wan2.2 A14B."""
    assert flow.ShiftedUniform(shift).share_above(0.875) == pytest.approx(share, abs=5e-4)


def test_the_law_of_tau_golden():
    """Every level of the grid once: 1000 tau at shift 5, clipped to [20, 980]."""
    law = flow.ShiftedGrid(5.0, (0.02, 0.98))
    tau = 1000 * law((torch.arange(1000, dtype=torch.float64) + 0.5) / 1000)
    assert float(tau.mean()) == pytest.approx(745.661, abs=5e-4)
    assert float(tau.quantile(0.5)) == pytest.approx(833.055, abs=5e-4)
    assert float((tau == 20).double().mean()) == pytest.approx(0.0050)
    assert float((tau == 980).double().mean()) == pytest.approx(0.0920)
    assert law.share_above(0.98) == 0.092 and law.share_above(0.02) == 1


@given(u=st.floats(0, 1, exclude_max=True), shift=st.floats(0.5, 12), levels=st.sampled_from([10, 1000]))
def test_grid_levels_are_the_clipped_shift_of_floor_u(u, shift, levels):
    law, u = flow.ShiftedGrid(shift, (0.02, 0.98), levels), torch.tensor([u], dtype=torch.float64)
    expected = flow.shift_sigma((u * levels).floor() / levels, shift).clamp(0.02, 0.98)
    assert torch.equal(law(u), expected) and 0.02 <= float(law(u)) <= 0.98


@given(sigma=st.floats(0.01, 1), shift=st.floats(0.5, 12), levels=st.sampled_from([10, 1000]))
def test_the_share_of_a_grid_counts_its_levels(sigma, shift, levels):
    law = flow.ShiftedGrid(shift, (0.02, 0.98), levels)
    count = sum(min(0.98, max(0.02, flow.shift_sigma(k / levels, shift))) >= sigma for k in range(levels))
    assert law.share_above(sigma) == pytest.approx(count / levels, abs=1.01 / levels)


# Identities.


@given(u=st.floats(0, 1), shift=SHIFTS)
def test_unshift_undoes_shift(u, shift):
    assert flow.unshift_sigma(flow.shift_sigma(u, shift), shift) == pytest.approx(u, abs=1e-12)


@given(u=st.floats(0.001, 0.999), shift=st.floats(1.01, 20.0))
def test_a_shift_above_one_moves_towards_noise_and_keeps_the_ends(u, shift):
    assert flow.shift_sigma(u, shift) > u > flow.unshift_sigma(u, shift)
    assert flow.shift_sigma(0.0, shift) == 0 and flow.shift_sigma(1.0, shift) == 1


@given(steps=st.integers(1, 60), shift=SHIFTS)
def test_a_table_falls_from_one_to_zero(steps, shift):
    table = flow.sigma_table(steps, shift)
    assert len(table) == steps + 1 and float(table[0]) == pytest.approx(1, abs=1e-15) and table[-1] == 0
    assert bool((table.diff() < 0).all())


@given(sigma=LEVELS, seed=SEEDS)
def test_conversions_return_what_was_mixed(sigma, seed):
    """With x_t = (1 - sigma) x0 + sigma noise and v = noise - x0 every part comes back from the others."""
    x0, noise = draw(seed, 2, 3, 4), draw(seed + 1, 2, 3, 4)
    x_t, velocity = flow.add_noise(x0, noise, sigma), noise - x0
    assert_equal(x_t, (1 - sigma) * x0 + sigma * noise)
    assert_equal(flow.x0_from_velocity(x_t, velocity, sigma), x0)
    assert_equal(flow.noise_from_velocity(x_t, velocity, sigma), noise)


@given(scale=st.floats(0, 10), seed=SEEDS)
def test_guidance_forms(scale, seed):
    """w = 1 is cond, w = 0 is uncond, and the additive form cond + s (cond - uncond) is w = s + 1."""
    cond, uncond = draw(seed, 2, 3), draw(seed + 1, 2, 3)
    assert_equal(flow.guide(cond, uncond, 1.0), cond)
    assert_equal(flow.guide(cond, uncond, 0.0), uncond)
    assert_equal(flow.guide(cond, uncond, scale + 1), cond + scale * (cond - uncond), atol=1e-10)
    assert_equal(flow.guide(cond, cond, scale), cond)


def test_guidance_at_4():
    """cond .5 x, uncond .25 x, w = 4: .25 x + 4 (.25 x) = 1.25 x."""
    x = torch.arange(1.0, 9.0, dtype=torch.float64).reshape(2, 2, 1, 2, 1) / 4
    assert_equal(flow.guide(0.5 * x, 0.25 * x, 4.0), 1.25 * x)


# Arguments per sample, and dtypes.


@pytest.mark.parametrize("function", PER_SAMPLE)
@pytest.mark.parametrize("shape", [(4,), (4, 2), (4, 2, 1, 3, 2)])
def test_one_level_per_sample(function, shape):
    first, second = draw(0, *shape), draw(1, *shape)
    levels = torch.tensor([0.1, 0.4, 0.7, 1.0], dtype=torch.float64)
    alone = [function(first[i : i + 1], second[i : i + 1], float(levels[i])) for i in range(4)]
    assert_equal(function(first, second, levels), torch.cat(alone))


@pytest.mark.parametrize("function", PER_SAMPLE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_half_precision_is_combined_in_float32(function, dtype):
    first, second = draw(0, 2, 3, 4, dtype=dtype), draw(1, 2, 3, 4, dtype=dtype)
    level = torch.tensor([0.3, 0.9], dtype=torch.float64)
    got = function(first, second, level)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact = function(first.double(), second.double(), level)
    torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_mean_of_a_sample_is_accumulated_in_float64(dtype):
    """Elements of 1 and 2^-20 alternate: their mean is exact in float64 alone; the gradient is 1 / D."""
    x = torch.tensor([1.0, 2.0**-20]).repeat(2, 3, 50_000).to(dtype).requires_grad_()
    mean = flow.sample_mean(x)
    assert mean.dtype == torch.float64 and mean.tolist() == pytest.approx([(1 + 2.0**-20) / 2] * 2, rel=1e-14)
    mean.sum().backward()
    assert x.grad.dtype == dtype and float(x.grad.double().mean()) == pytest.approx(1 / 300_000, rel=5e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", [flow.shift_sigma, flow.unshift_sigma])
def test_noise_levels_are_never_rounded_to_half_precision(function, dtype):
    """A level given in half precision is exact; what is computed from it is float32 at least."""
    u = torch.linspace(0, 1, 33).to(dtype)
    torch.testing.assert_close(function(u, 5.0).double(), function(u.double(), 5.0), rtol=1e-6, atol=1e-7)
