"""Roles: learning-rate schedule, gradient clipping, the finite check, EMA weights, guidance and precision."""

import math

import pytest
import torch
from helpers import (
    ALONE,
    Calls,
    assert_near,
    assert_same,
    gradients,
    small_batch,
    small_model,
    trainable,
    weights,
)
from hypothesis import given
from hypothesis import strategies as st

from unified_trainer.numerics.flow import guide
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.ema import EMA
from unified_trainer.roles.learner import learning_rate_factor
from unified_trainer.roles.role import Frozen, RoleConfig, Trainable, TrainableConfig

X_T = torch.randn(2, 16, 2, 2, 2, generator=torch.Generator().manual_seed(3))
SIGMA = torch.tensor([0.9, 0.4], dtype=torch.float64)


def student(**config) -> Trainable:
    return trainable(config=TrainableConfig(**config))


def give_gradient(role: Trainable, scale: float = 1.0, seed: int = 0) -> float:
    """A random gradient on every weight; its norm."""
    generator = torch.Generator().manual_seed(seed)
    for p in role.network.parameters():
        p.grad = scale * torch.randn(p.shape, generator=generator)
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in role.network.parameters()))


# The learning-rate schedule.


def factors(updates: range, **config) -> list[float]:
    return [learning_rate_factor(TrainableConfig(**config), update) for update in updates]


def test_constant():
    assert factors(range(3)) == [1, 1, 1]


def test_warm_up_rises_in_equal_parts_and_its_last_update_is_whole():
    """Update k of w has (k + 1) / w: never 0, which would waste an update."""
    assert factors(range(6), warmup_updates=4) == [0.25, 0.5, 0.75, 1, 1, 1]


def test_linear_decay():
    """After the warm-up from 1 to the lowest share in n updates, then flat: m + (1 - m) (1 - k / n)."""
    got = factors(range(2, 9), warmup_updates=2, lr_schedule="linear", lr_decay_updates=4, min_lr_ratio=0.2)
    assert got == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_cosine_decay():
    """m + (1 - m) (1 + cos(pi k / n)) / 2."""
    got = factors(range(6), lr_schedule="cosine", lr_decay_updates=4, min_lr_ratio=0.1)
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * min(k, 4) / 4)) / 2 for k in range(6)]
    assert got == pytest.approx(expected)


def test_a_lowest_share_of_zero_is_zero():
    """A peer's `min_lr_ratio: 0` became .5 through `or`."""
    assert factors(range(4, 6), lr_schedule="linear", lr_decay_updates=4, min_lr_ratio=0.0) == [0, 0]


@given(schedule=st.sampled_from(["constant", "linear", "cosine"]), warm=st.integers(0, 5), n=st.integers(0, 9))
def test_the_factor_stays_between_nothing_and_one(schedule, warm, n):
    got = factors(range(20), warmup_updates=warm, lr_schedule=schedule, lr_decay_updates=n)
    assert all(0 <= factor <= 1 for factor in got)
    assert got[warm:] == sorted(got[warm:], reverse=True)


def test_the_clock_counts_updates_of_this_role():
    role, rates = student(learning_rate=0.5, warmup_updates=2), []
    for _ in range(3):
        give_gradient(role)
        rates.append(role.step()["student/learning_rate"])
    assert rates == [0.25, 0.5, 0.5] and role.updates == 3


def test_a_first_update_of_adamw_has_the_size_of_the_learning_rate():
    """m = (1 - b1) g, v = (1 - b2) g^2, bias-corrected g / |g|: every weight moves by lr, after decay by lr wd w."""
    role = student(learning_rate=1e-3, weight_decay=0.1, max_grad_norm=0.0, eps=1e-12)
    before = weights(role.network)
    give_gradient(role)
    signs = {key: gradient.sign() for key, gradient in gradients(role.network).items()}
    role.step()
    for key, weight in weights(role.network).items():
        expected = before[key] * (1 - 1e-3 * 0.1) - 1e-3 * signs[key]
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)


# Clipping and the finite check.


def first_moment_norm(role: Trainable) -> float:
    """|m| after one update is (1 - b1) |g|, g being what the optimizer was given."""
    moments = [value for key, value in role.state_dict().items() if key.endswith("/exp_avg")]
    return math.sqrt(sum(float(m.double().square().sum()) for m in moments)) / 0.1


@pytest.mark.parametrize(("scale", "clip", "given_share"), [(10.0, 0.5, None), (1e-6, 0.5, 1.0), (10.0, 0.0, 1.0)])
def test_clipping_is_by_the_norm_over_all_weights(scale, clip, given_share):
    role = student(max_grad_norm=clip)
    norm = give_gradient(role, scale)
    metrics = role.step()
    assert metrics["student/grad_norm"] == pytest.approx(norm, rel=1e-5)  # as it was before clipping
    expected = clip if given_share is None else norm
    assert first_moment_norm(role) == pytest.approx(expected, rel=1e-4)


def test_the_gradient_is_forgotten_after_an_update():
    role = student()
    give_gradient(role)
    role.step()
    assert all(p.grad is None for p in role.network.parameters())


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (float("nan"), r"blocks\.1\.ffn\.net\.2\.weight"),
        (float("inf"), r"blocks\.1\.ffn\.net\.2\.weight"),
        (1e30, "all weights together"),  # its square is not finite
    ],
)
def test_a_gradient_that_is_not_finite_moves_nothing(value, named):
    role = student(ema_decay=0.5)
    give_gradient(role)
    role.step()
    before = {key: tensor.clone() for key, tensor in role.state_dict().items()}
    give_gradient(role)
    role.network.blocks[1].ffn.net[2].weight.grad[0, 0] = value
    with pytest.raises(FloatingPointError, match=f"student: the gradient of {named} is not finite"):
        role.step()
    assert_same(role.state_dict(), before)


# EMA weights.


def moved(role: Trainable, updates: int) -> list[dict[str, torch.Tensor]]:
    """The weights before and after each update."""
    history = [weights(role.network)]
    for seed in range(updates):
        give_gradient(role, seed=seed)
        role.step()
        history.append(weights(role.network))
    return history


def test_the_average_after_three_updates():
    """shadow = d^3 w0 + (1 - d) (d^2 w1 + d w2 + w3)."""
    role = student(learning_rate=0.1, ema_decay=0.75)
    history = moved(role, 3)
    shares = (0.75**3, 0.25 * 0.75**2, 0.25 * 0.75, 0.25)
    expected = {k: sum(s * w[k] for s, w in zip(shares, history, strict=True)) for k in history[0]}
    with role.ema_weights():
        assert_near(weights(role.network), expected, 1e-6)
        assert not torch.equal(role.network.proj_out.weight, history[3]["proj_out.weight"])
    assert_same(weights(role.network), history[3])


def test_the_average_starts_after_so_many_updates():
    """shadow = w2 after two updates, then d w2 + (1 - d) w3."""
    role = student(learning_rate=0.1, ema_decay=0.75, ema_start=2)
    history = moved(role, 2)
    with role.ema_weights():
        assert_same(weights(role.network), history[2])
    (_, last) = moved(role, 1)
    with role.ema_weights():
        expected = {k: 0.75 * history[2][k] + 0.25 * last[k] for k in last}
        assert_near(weights(role.network), expected, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("decay", [0.9, 0.99, 0.999, 0.9999])
def test_the_average_rests_where_rounding_loses_its_updates(decay):
    """In float32 (1 - d) (w - shadow) is lost below half a unit in the last place, 2^-25 to 2^-24 of the shadow.

    A change of the weight of 1e-4 is therefore not followed at decay .9999, and is at the others, up to the rest.
    """
    start = torch.linspace(1.0, 1.9, 100)  # where the distance of two numbers is 2^-23
    lost = 2.0**-24 / (1 - decay) / start
    for change in (1e-4, 1e-2):
        weight = {"w": start * (1 + change)}
        average = EMA({"w": start.clone()}, decay)
        average._weights = weight
        for update in range(1, min(round(20 / (1 - decay)), 40_000)):
            average.update(update)
        gap = (weight["w"] - average.shadow["w"]) / start
        assert float((gap / lost).max()) <= 1.01
        assert (change < float(lost.min())) == torch.equal(average.shadow["w"], start)


def test_a_schedule_needs_its_length():
    with pytest.raises(ValueError, match=r"student\.lr_schedule cosine needs student\.lr_decay_updates"):
        TrainableConfig(lr_schedule="cosine").check("student")
    TrainableConfig(lr_schedule="cosine", lr_decay_updates=1).check("student")


def test_the_average_is_put_back_after_an_error():
    role = student(learning_rate=0.1, ema_decay=0.75)
    last = moved(role, 1)[-1]
    state = {key: tensor.clone() for key, tensor in role.state_dict().items()}
    with pytest.raises(KeyError), role.ema_weights():
        raise KeyError
    assert_same(weights(role.network), last)
    assert_same(role.state_dict(), state)


def test_without_an_average_the_weights_stand_in():
    role = student()
    last = moved(role, 1)[-1]
    with role.ema_weights():
        assert_same(weights(role.network), last)
    assert not any(key.startswith("ema/") for key in role.state_dict())


def test_loaded_weights_are_averaged_anew():
    role = student(learning_rate=0.1, ema_decay=0.75)
    moved(role, 2)
    role.restart_ema()
    now = weights(role.network)
    with role.ema_weights():
        assert_same(weights(role.network), now)
    history = [now, *moved(role, 1)[1:]]
    with role.ema_weights():
        assert_near(weights(role.network), {k: 0.75 * history[0][k] + 0.25 * history[1][k] for k in now}, 1e-6)


@pytest.mark.parametrize("decay", [-0.1, 1.0, 1.5])
def test_a_decay_must_be_a_share(decay):
    with pytest.raises(ValueError, match="ema_decay must be in"):
        EMA({"w": torch.zeros(1)}, decay)


# Velocities.


def test_guided_velocity_is_two_passes_and_guidance():
    role, batch = student(), small_batch()
    cond, uncond = (role.velocity(X_T, SIGMA, c).detach() for c in (batch.cond, batch.uncond))
    for scale in (0.0, 1.0, 3.0):
        got = role.guided_velocity(X_T, SIGMA, batch.cond, batch.uncond, scale).detach()
        torch.testing.assert_close(got, guide(cond, uncond, scale), rtol=1e-5, atol=1e-5)
    assert float((cond - uncond).abs().max()) > 1e-3


@pytest.mark.parametrize(("scale", "rows"), [(1.0, 2), (3.0, 4), (0.0, 4)])
def test_one_pass_and_no_uncond_without_guidance(scale, rows):
    role, batch = student(), small_batch()
    calls = Calls.of(role)
    role.guided_velocity(X_T, SIGMA, batch.cond, batch.uncond, scale)
    assert [len(x_t) for x_t in calls.x_t] == [rows]
    assert torch.equal(calls.text[0][:2], batch.cond["text"])


def test_the_network_sees_a_fractional_time():
    """937.5, not 937: time = 1000 sigma."""
    role, batch = student(), small_batch()
    calls = Calls.of(role)
    role.velocity(X_T, torch.tensor([0.9375, 0.0625], dtype=torch.float64), batch.cond)
    assert calls.sigma[0].tolist() == [0.9375, 0.0625]


def test_a_sample_does_not_see_its_neighbours():
    role, batch = student(), small_batch()
    together = role.velocity(X_T, SIGMA, batch.cond)
    for i in range(2):
        one = slice(i, i + 1)
        alone = role.velocity(X_T[one], SIGMA[one], batch[one].cond)
        torch.testing.assert_close(alone, together[one], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # torch: a slower kernel
def test_bf16_computes_in_bf16_and_answers_in_float32():
    batch = small_batch()
    exact = student().velocity(X_T, SIGMA, batch.cond)
    rounded = student(precision="bf16").velocity(X_T, SIGMA, batch.cond)
    assert rounded.dtype == torch.float32
    difference = float((rounded - exact).detach().abs().max())
    assert 0 < difference < 0.05
    assert all(p.dtype == torch.float32 for p in student(precision="bf16").network.parameters())


def gradient_of(role: Trainable) -> dict[str, torch.Tensor]:
    role.velocity(X_T, SIGMA, small_batch().cond).square().mean().backward()
    return gradients(role.network)


def test_recomputed_activations_change_nothing():
    exact, recomputed = student(), student(activation_memory="full")
    calls = Calls.of(recomputed)
    assert_near(gradient_of(recomputed), gradient_of(exact), 1e-6)
    assert len(calls.x_t) == 1


def test_a_frozen_role_has_no_gradient():
    model, batch = small_model(), small_batch()
    role = Frozen("teacher", Backbone(model, ALONE), RoleConfig())
    x_t = X_T.clone().requires_grad_()
    assert not role.velocity(x_t, SIGMA, batch.cond).requires_grad
    assert not role.guided_velocity(x_t, SIGMA, batch.cond, batch.uncond, 3.0).requires_grad
    assert not any(p.requires_grad for p in model.network.parameters())
    assert not model.network.training


def test_a_frozen_role_computes_what_a_trainable_one_does():
    batch = small_batch()
    frozen = Frozen("teacher", Backbone(small_model(), ALONE), RoleConfig()).velocity(X_T, SIGMA, batch.cond)
    assert torch.equal(frozen, student().velocity(X_T, SIGMA, batch.cond))
