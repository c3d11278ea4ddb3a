"""The two parts of the direction of distribution matching, with weights of their own."""

import pytest
import torch

from unified_trainer.numerics.flow import guide
from unified_trainer.numerics.guidance_parts import advantage_weights, weighted_direction


def draws(count: int = 3) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(4, 2, 3, generator=random) for _ in range(count)]


def test_with_both_weights_1_it_is_fake_minus_real_bit_for_bit():
    fake, cond, uncond = draws()
    real = guide(cond, uncond, 3.0)
    for one in (1.0, torch.ones(4)):
        assert torch.equal(weighted_direction(fake, real, cond, 1.0, one), fake - real)


def test_the_parts_are_the_conditional_difference_and_the_guidance():
    """c (f - cond) - a s (cond - uncond) with s = w - 1, a one number for each sample."""
    fake, cond, uncond = draws()
    real, weights = guide(cond, uncond, 3.0), torch.tensor([0.0, 0.5, 1.0, 2.0])
    expected = 0.25 * (fake - cond) - weights.view(4, 1, 1) * 2.0 * (cond - uncond)
    torch.testing.assert_close(weighted_direction(fake, real, cond, 0.25, weights), expected, rtol=1e-5, atol=1e-6)
    plain = weighted_direction(fake, real, cond, 1.0, 0.0)
    torch.testing.assert_close(plain, fake - cond, rtol=1e-5, atol=1e-6)


def test_better_samples_are_guided_more_within_bounds():
    found = advantage_weights(torch.tensor([-5.0, -1.0, 0.0, 0.5, 9.0]), 0.5)
    assert found.tolist() == pytest.approx([0.0, 0.5, 1.0, 1.25, 2.0])
