"""The value loss by hand, its gradient, and the variance that values explain."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unified_trainer.numerics.values import explained_variance, value_loss

# Old value 0 and clip .2: inside the range; moved towards the target, which lies far off; moved away from it; moved
# past a target within the range.
VALUE, TARGET = [0.1, 0.5, -0.5, 0.5], [1.0, 1.0, 1.0, 0.1]
LOSS = [0.9**2 / 2, 0.8**2 / 2, 1.5**2 / 2, 0.4**2 / 2]
SLOPE = [-0.9, 0.0, -1.5, 0.4]


def double(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_value_loss_golden():
    """By hand: max((V - R)^2, (clip(V, -.2, .2) - R)^2) / 2, and its slope."""
    value = double(VALUE).requires_grad_()
    loss = value_loss(value, torch.zeros(4), double(TARGET), 0.2)
    torch.testing.assert_close(loss.detach(), double(LOSS), rtol=0, atol=1e-12)
    loss.sum().backward()
    torch.testing.assert_close(value.grad, double(SLOPE), rtol=0, atol=1e-12)


def test_without_clip_the_loss_is_half_the_squared_error():
    loss = value_loss(double(VALUE), torch.zeros(4), double(TARGET))
    torch.testing.assert_close(loss, (double(VALUE) - double(TARGET)).square() / 2, rtol=0, atol=1e-12)


def test_only_the_value_has_a_gradient_and_all_is_float64():
    value, old, target = (torch.ones(3, requires_grad=True) for _ in range(3))
    loss = value_loss(value, old, target, 0.2)
    assert loss.dtype == torch.float64
    loss.sum().backward()
    assert old.grad is None and target.grad is None


@given(seed=st.integers(0, 50), clip=st.floats(0.01, 3))
def test_the_clipped_loss_is_never_below_the_plain_one(seed, clip):
    value, old, target = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert bool((value_loss(value, old, target, clip) >= value_loss(value, old, target)).all())
    assert torch.equal(value_loss(value, value, target, clip), value_loss(value, value, target))


def test_explained_variance_by_hand():
    """Returns 1, 3 of variance 1; errors -.5, .5 of variance .25."""
    assert explained_variance(double([1.5, 2.5]), double([1.0, 3.0])) == pytest.approx(0.75)
    assert explained_variance(double([1.0, 3.0]), double([1.0, 3.0])) == 1
    assert explained_variance(double([3.0, 1.0]), double([1.0, 3.0])) == -3


@pytest.mark.parametrize("constant", [0.0, 2.0, -7.0])
def test_a_constant_explains_nothing_whatever_its_size(constant):
    assert explained_variance(double([constant] * 3), double([1.0, 3.0, 8.0])) == 0


def test_equal_returns_have_no_variance_to_explain():
    assert explained_variance(double([1.0, 2.0]), double([5.0, 5.0])) == 0
