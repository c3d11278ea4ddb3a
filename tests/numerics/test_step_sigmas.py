"""The noise levels that a sampler visits: even tables, step sigmas, and what is refused."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st

from unified_trainer.basics.errors import UserError
from unified_trainer.sampling.solver import SamplerConfig


@pytest.mark.parametrize(
    ("shift", "expected"),
    [(5.0, [1000, 937.5, 833.3333, 625]), (3.0, [1000, 900, 750, 500]), (8.0, [1000, 960, 888.8889, 727.2727])],
)
def test_warped_lists_golden(shift, expected):
    """Times 1000, as the network sees them."""
    sampler = SamplerConfig(num_steps=4, step_sigmas=(1.0, 0.75, 0.5, 0.25), shift=shift)
    sampler.check()
    got = 1000 * sampler.sigmas()
    assert got.tolist() == pytest.approx([*expected, 0], abs=1e-4)
    even = SamplerConfig(num_steps=4, shift=shift).sigmas()  # the same levels, spaced evenly
    torch.testing.assert_close(got, 1000 * even)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6, unique=True), st.floats(0.5, 12))
def test_a_falling_list_gives_falling_levels_down_to_zero(levels, shift):
    step_sigmas = tuple(level / 1000 for level in sorted(levels, reverse=True))
    sampler = SamplerConfig(num_steps=len(levels), step_sigmas=step_sigmas, shift=shift)
    sampler.check()
    sigmas = sampler.sigmas()
    assert len(sigmas) == len(levels) + 1 and sigmas[-1] == 0 and sigmas[0] <= 1
    assert bool((sigmas.diff() < 0).all())


@pytest.mark.parametrize("levels", [(0.5, 0.75), (0.5, 0.5)])
def test_a_list_that_does_not_fall_is_refused(levels):
    with pytest.raises(UserError, match=r"sampler\.step_sigmas must fall from step to step, not \("):
        SamplerConfig(num_steps=2, step_sigmas=levels).check()


def test_a_list_of_another_length_is_refused():
    with pytest.raises(UserError, match=r"sampler\.step_sigmas has 2 levels, but sampler\.num_steps is 30"):
        SamplerConfig(step_sigmas=(1.0, 0.5)).check()


def test_levels_end_at_the_terminal_one_as_those_of_diffusers():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0, shift_terminal=0.1)
    scheduler.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25])
    levels = SamplerConfig(num_steps=4, shift=5.0, terminal=0.1).sigmas()
    assert levels.tolist() == pytest.approx([1, 0.85, 0.6, 0.1, 0])
    torch.testing.assert_close(levels.float(), scheduler.sigmas)
    alone = SamplerConfig(num_steps=4, shift=5.0, terminal=0.625)  # what it is without a terminal level
    torch.testing.assert_close(alone.sigmas(), SamplerConfig(num_steps=4, shift=5.0).sigmas())


def test_one_level_cannot_be_stretched():
    with pytest.raises(UserError, match=r"sampler\.terminal 0\.1 needs 2 or more steps, but sampler\.num_steps is 1"):
        SamplerConfig(num_steps=1, terminal=0.1).check()


def test_solvers_are_kernels():
    """Renoising the predicted x0 is the cps kernel at level 1."""
    assert SamplerConfig(solver="sde").kernel == ("cps", 1.0) and SamplerConfig(solver="ode").kernel == ("ode", 0.0)
