"""Which passes plan traces for a peak of memory: those that no other pass covers."""

from unified_trainer.parallel.meter import Pass
from unified_trainer.tools.plan.memory import _largest, _largest_losses


def made(samples: int, frames: int, *, gradient: bool = False, role: str = "student") -> Pass:
    return Pass(role, gradient, samples, samples * frames, {}, 0)


def test_a_pass_with_fewer_samples_or_tokens_of_the_same_network_is_left_out():
    few, many, long, other = made(2, 3), made(8, 3), made(2, 21), made(1, 3, role="teacher")
    assert _largest([few, many, long, other, made(8, 3)]) == [many, long, other]
    assert _largest([few, made(2, 3, gradient=True)]) == [few, made(2, 3, gradient=True)]


def test_a_loss_is_left_out_if_another_covers_each_of_its_passes():
    small = [made(2, 3, gradient=True), made(2, 3)]
    large = [made(8, 3, gradient=True), made(8, 3)]
    mixed = [made(1, 3, gradient=True), made(16, 3)]
    assert _largest_losses([small, large, small, mixed]) == [large, mixed]
    assert _largest_losses([small, small[:1]]) == [small, small[:1]]
