"""Distribution matching: golden numbers, invariances, and which role gets which gradient."""

import pytest
import torch
from helpers import FEW_STEPS, Calls, assert_near, dmd2, setup_of
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import softplus

from unified_trainer.methods.distribution_matching import (
    distribution_matching_gradient,
    distribution_matching_loss,
)
from unified_trainer.methods.dmd2 import DMD2Config
from unified_trainer.numerics.flow import ShiftedGrid, add_noise, guide, x0_from_velocity
from unified_trainer.parallel.random import Streams

ONE_BACKWARD = {"batch_size": 4, "micro_batch": 4, "student_every": 1, "guidance_scale": 2.0}
# Golden numbers of two samples of two frames, with axes b c t h w; they were computed with frames before channels.
X = (torch.arange(1, 9, dtype=torch.float64) / 4).view(2, 2, 1, 2, 1).transpose(1, 2)
REAL, FAKE = 1.25 * X, 0.8 * X
GRADIENT = torch.tensor(
    [[-0.72, -1.44, -2.16, -2.88], [-1.384615384615, -1.661538461538, -1.938461538462, -2.215384615385]],
    dtype=torch.float64,
)
seeds = st.integers(0, 2**16)


def drawn(seed: int, count: int = 3, batch: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(count, batch, 2, 2, 3, 1, dtype=torch.float64, generator=generator))


# The gradient and the loss.


def test_gradient_golden():
    """(fake - real) / mean|x - real| = -.45 x / (.25 mean x) of each sample."""
    got = distribution_matching_gradient(X, REAL, FAKE)
    torch.testing.assert_close(got.flatten(1), GRADIENT, rtol=0, atol=1e-10)


def test_loss_golden():
    gradient = distribution_matching_gradient(X, REAL, FAKE)
    assert float(distribution_matching_loss(X, gradient)) == pytest.approx(1.8059644970, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_masked_loss_golden(dtype):
    """The mean is over the selected elements only, here the second of two frames."""
    gradient = distribution_matching_gradient(X, REAL, FAKE)
    mask = torch.tensor([0, 1]).to(dtype).view(1, 1, 2, 1, 1)
    assert float(distribution_matching_loss(X, gradient, mask)) == pytest.approx(2.7031952663, abs=1e-9)
    assert float(distribution_matching_loss(X, gradient, mask.expand_as(X))) == pytest.approx(2.7031952663, abs=1e-9)


def test_the_golden_teacher_is_guided_in_standard_form():
    """cond .5 x and uncond .25 x at scale 4: .25 x + 4 (.25 x) = 1.25 x."""
    torch.testing.assert_close(guide(0.5 * X, 0.25 * X, 4.0), REAL)


@given(seed=seeds)
def test_the_gradient_of_the_loss_is_g_over_numel(seed):
    x, real, fake = drawn(seed)
    x.requires_grad_()
    g = distribution_matching_gradient(x, real, fake)
    loss = distribution_matching_loss(x, g)
    (got,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(got, g / g.numel())
    assert float(loss.detach()) == pytest.approx(float(g.square().mean() / 2))


@given(seed=seeds)
def test_a_mask_leaves_the_rest_without_gradient(seed):
    x, real, fake = drawn(seed)
    x.requires_grad_()
    g = distribution_matching_gradient(x, real, fake)
    mask = torch.tensor([False, True]).view(1, 1, 2, 1, 1)
    (got,) = torch.autograd.grad(distribution_matching_loss(x, g, mask), x)
    torch.testing.assert_close(got, g * mask / (g.numel() / 2))


@given(seed=seeds)
def test_equal_scores_give_no_gradient(seed):
    x, real, _ = drawn(seed)
    assert not distribution_matching_gradient(x, real, real).any()


def test_equal_sample_and_predictions_give_zero_not_nan():
    """The quotient 0 / 0 counts as 0."""
    assert torch.equal(distribution_matching_gradient(X, X, X), torch.zeros_like(X))


def test_a_nan_prediction_stays_nan():
    """Published code makes every NaN 0, which hides a NaN in the teacher's weights."""
    broken = X.clone()
    broken[0, 0] = torch.nan
    assert distribution_matching_gradient(X + 1, broken, X)[0].isnan().all()
    assert distribution_matching_gradient(X + 1, X, broken)[0, 0].isnan().any()


@given(seed=seeds, scale=st.floats(1e-3, 1e3))
def test_a_common_scale_has_no_effect(seed, scale):
    x, real, fake = drawn(seed)
    scaled = distribution_matching_gradient(scale * x, scale * real, scale * fake)
    torch.testing.assert_close(scaled, distribution_matching_gradient(x, real, fake))


@given(seed=seeds, order=st.permutations(range(3)))
def test_samples_do_not_see_each_other(seed, order):
    """Permuted samples give permuted gradients, and a part gives its part: each sample has its own normaliser."""
    parts = drawn(seed)
    whole = distribution_matching_gradient(*parts)
    torch.testing.assert_close(distribution_matching_gradient(*(part[order] for part in parts)), whole[order])
    torch.testing.assert_close(distribution_matching_gradient(*(part[1:2] for part in parts)), whole[1:2])


@given(seed=seeds)
def test_the_gradient_points_from_real_to_fake_with_a_normaliser_of_one_sample(seed):
    """mean|x - real| of each sample times g is fake - real."""
    x, real, fake = drawn(seed)
    g = distribution_matching_gradient(x, real, fake)
    for i in range(len(x)):
        torch.testing.assert_close(g[i] * (x[i] - real[i]).abs().mean(), fake[i] - real[i])


def test_half_precision_is_promoted():
    parts = [part.bfloat16() for part in drawn(0)]
    g = distribution_matching_gradient(*parts)
    assert g.dtype == torch.float32 and distribution_matching_loss(parts[0], g).dtype == torch.float32


# Noise levels.


def tau_law(shift: float) -> ShiftedGrid:
    """Return the law of tau that the method draws from."""
    law = DMD2Config(tau_shift=shift).tau_law
    assert law == ShiftedGrid(shift, (0.02, 0.98), 1000)
    return law


def all_levels(shift: float) -> torch.Tensor:
    """Return the thousand levels of tau times 1000; each is equally likely."""
    return 1000 * tau_law(shift)((torch.arange(1000, dtype=torch.float64) + 0.5) / 1000)


def test_the_law_of_tau_golden():
    tau = all_levels(5.0)
    assert float(tau.mean()) == pytest.approx(745.661, abs=5e-4)
    assert float(tau.quantile(0.5)) == pytest.approx(833.055, abs=5e-4)
    assert float((tau == 20).double().mean()) == pytest.approx(0.0050)
    assert float((tau == 980).double().mean()) == pytest.approx(0.0920)


@given(u=st.floats(0, 1, exclude_max=True), shift=st.floats(0.5, 12))
def test_tau_stays_in_its_range_and_has_a_thousand_levels(u, shift):
    level = tau_law(shift)(torch.tensor([u], dtype=torch.float64))
    assert 0.02 <= float(level) <= 0.98
    grid = tau_law(shift)(torch.tensor([int(u * 1000) / 1000 + 1e-9], dtype=torch.float64))
    torch.testing.assert_close(level, grid, rtol=0, atol=1e-12)


# The losses of student and critic, on small networks.


def matching(**config):
    """Return a trainer, its first batch, and random samples in place of the student's."""
    one = dmd2(DMD2Config(**ONE_BACKWARD | config))
    batch = one.loader.batch(0)
    x0 = torch.randn(4, *batch.latent_shape, generator=torch.Generator().manual_seed(1))
    return one, batch, x0


def has_gradient(network) -> bool:
    return any(p.grad is not None for p in network.parameters())


def roles_of(one):
    return one.method.student, one.method.matching.teacher, one.method.matching.critic


@pytest.mark.parametrize("gan_weight", [0.0, 0.5])
def test_the_students_loss_teaches_the_samples_alone(gan_weight):
    one, batch, x0 = matching(gan_weight=gan_weight)
    x0.requires_grad_()
    loss = one.method.matching.student_loss(x0, batch, Streams(0, 0))
    loss.value.backward()
    assert loss.role == "student" and x0.grad.any()
    for role in roles_of(one):
        assert not has_gradient(role.network)
    assert all(p.grad is None for p in one.roles["critic"].weights.values())


@pytest.mark.parametrize("gan_weight", [0.0, 0.5])
def test_the_critics_loss_teaches_the_critic_alone(gan_weight):
    one, batch, x0 = matching(gan_weight=gan_weight)
    loss = one.method.matching.critic_loss(x0, batch, Streams(0, 0))
    loss.value.backward()
    student, teacher, critic = roles_of(one)
    assert loss.role == "critic" and has_gradient(critic.network)
    assert not has_gradient(student.network) and not has_gradient(teacher.network)
    head = [key for key, p in critic.weights.items() if key.startswith("discriminator") and p.grad is not None]
    assert len(head) == (2 if gan_weight else 0)


def scores(one, batch, x0, rng):
    """Return real, fake, noise level and noisy sample of the student's loss, computed term by term."""
    noise = rng.noise("student tau noise", batch.sample_ids, batch.latent_shape)
    sigma = tau_law(5.0)(rng.uniform("student tau", batch.sample_ids))
    x_tau = add_noise(x0, noise, sigma)
    _, teacher, critic = roles_of(one)
    with torch.no_grad():
        cond, uncond = (teacher.velocity(x_tau, sigma, text) for text in (batch.cond, batch.uncond))
        real = x0_from_velocity(x_tau, uncond + 2.0 * (cond - uncond), sigma)
        fake = x0_from_velocity(x_tau, critic.velocity(x_tau, sigma, batch.cond), sigma)
    return real, fake, sigma, x_tau


def test_the_students_gradient_is_that_of_the_two_scores():
    one, batch, x0 = matching()
    real, fake, _, _ = scores(one, batch, x0, Streams(0, 0))
    loss = one.method.matching.student_loss(x0.requires_grad_(), batch, Streams(0, 0))
    (got,) = torch.autograd.grad(loss.value, x0)
    expected = distribution_matching_gradient(x0, real, fake) / x0.numel()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-7)


def test_the_gan_gradient_is_that_of_a_direct_computation():
    """The difference that the GAN term makes is w d mean softplus(-D(x_tau)) / dx, through the whole critic."""
    weight, (one, batch, x0) = 0.5, matching(gan_weight=0.5)
    plain, _, _ = matching()
    x0.requires_grad_()
    (total,) = torch.autograd.grad(one.method.matching.student_loss(x0, batch, Streams(0, 0)).value, x0)
    (without,) = torch.autograd.grad(plain.method.matching.student_loss(x0, batch, Streams(0, 0)).value, x0)
    _, _, sigma, x_tau = scores(one, batch, x0, Streams(0, 0))
    critic = one.roles["critic"]
    seen = []
    critic.network.blocks[1].register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    critic.velocity(x_tau, sigma, batch.cond)
    head = critic._heads[""]
    logits = (seen[0].mean(1) @ head.weight.T + head.bias)[:, 0]
    (direct,) = torch.autograd.grad(softplus(-logits).mean(), x0)
    torch.testing.assert_close(total - without, weight * direct, rtol=1e-3, atol=1e-7)
    assert float(direct.abs().max()) > 1e-5


class Ones(Streams):
    """Streams whose noise is 1, for golden numbers."""

    def noise(self, name, keys, shape):
        return torch.ones(len(keys), *shape)


def test_the_critics_loss_golden():
    """With velocity 0, noise 1 and samples of 1 to 8 quarters, mean (0 - (1 - x))^2 = .34375 at any noise level."""
    one, batch, x0 = matching()
    critic = one.roles["critic"]
    for p in critic.network.proj_out.parameters():
        p.data.zero_()
    x0 = X.flatten().float().repeat(x0.numel() // 8).view_as(x0)
    loss = one.method.matching.critic_loss(x0, batch, Ones(0, 0)).value
    assert float(loss.detach()) == pytest.approx(0.34375, rel=1e-6)


def test_the_critics_loss_is_flow_matching_on_the_samples():
    one, batch, x0 = matching()
    rng, critic = Streams(0, 0), one.roles["critic"]
    loss = one.method.matching.critic_loss(x0, batch, rng)
    noise = rng.noise("critic tau noise", batch.sample_ids, batch.latent_shape)
    sigma = tau_law(5.0)(rng.uniform("critic tau", batch.sample_ids))
    velocity = critic.velocity(add_noise(x0, noise, sigma), sigma, batch.cond)
    expected = (velocity - (noise - x0)).square().mean()
    torch.testing.assert_close(loss.value, expected)
    torch.testing.assert_close(loss.metrics["critic_loss"].mean(), expected)
    torch.testing.assert_close(loss.metrics["sample_power"].mean(), x0.square().mean())


def test_weights_of_samples_weigh_the_critics_errors():
    """The loss is mean w e; the metric stays the error itself."""
    one, batch, x0 = matching()
    weights = torch.tensor([0.0, 0.5, 1.0, 2.5])
    loss = one.method.matching.critic_loss(x0, batch, Streams(0, 0), weights)
    plain = one.method.matching.critic_loss(x0, batch, Streams(0, 0))
    assert torch.equal(loss.metrics["critic_loss"], plain.metrics["critic_loss"])
    torch.testing.assert_close(loss.value, (weights * plain.metrics["critic_loss"]).mean())
    ones = one.method.matching.critic_loss(x0, batch, Streams(0, 0), torch.ones(4))
    assert torch.equal(ones.value, plain.value)


def test_the_critics_gan_loss_tells_samples_from_clips():
    """softplus(D(sample)) + softplus(-D(clip)) at D = 0, with f the features that D reads.

    d/dw = mean(sigmoid(D_f) f_f - sigmoid(-D_r) f_r) = (mean f_f - mean f_r) / 2, and d/db = 0.
    """
    one, batch, x0 = matching(gan_weight=0.5, gan_critic_weight=0.1)
    critic = one.roles["critic"]
    for p in critic._heads[""].parameters():
        p.data.zero_()
    seen = []
    critic.network.blocks[1].register_forward_hook(lambda _module, _inputs, output: seen.append(output.detach()))
    calls = Calls.of(critic)
    loss = one.method.matching.critic_loss(x0, batch, Streams(0, 0))
    loss.value.backward()
    fake, real = seen[0].mean(1).chunk(2)
    expected = 0.1 * (fake.mean(0) - real.mean(0)) / 2
    torch.testing.assert_close(critic._heads[""].weight.grad[0], expected, rtol=1e-4, atol=1e-7)
    assert float(critic._heads[""].bias.grad) == pytest.approx(0, abs=1e-8)
    assert float(loss.metrics["gan_critic_loss"].mean()) == pytest.approx(2 * float(softplus(torch.tensor(0.0))))
    sigma = calls.sigma[0].chunk(2)
    assert torch.equal(sigma[0], sigma[1])  # samples and clips at one noise level


@pytest.mark.parametrize("gan_weight", [0.0, 0.5])
def test_one_level_a_sample_and_both_conditions_in_one_pass(gan_weight):
    one, batch, x0 = matching(gan_weight=gan_weight)
    _, teacher, critic = roles_of(one)
    of_teacher, of_critic = Calls.of(teacher), Calls.of(critic)
    one.method.matching.student_loss(x0, batch, Streams(0, 0))
    assert [len(x) for x in of_teacher.x_t] == [8] and [len(x) for x in of_critic.x_t] == [4]
    assert torch.equal(of_teacher.x_t[0][:4], of_teacher.x_t[0][4:]) and torch.equal(
        of_teacher.x_t[0][:4], of_critic.x_t[0]
    )
    assert (
        torch.equal(of_teacher.sigma[0], torch.cat([of_critic.sigma[0]] * 2))
        and len(set(of_critic.sigma[0].tolist())) == 4
    )
    assert torch.equal(of_teacher.text[0], torch.cat([batch.cond["text"], batch.uncond["text"]]))
    assert torch.equal(of_critic.text[0], batch.cond["text"])  # the critic is not guided


def test_student_and_critic_draw_apart():
    """The critic has its own noise and levels, and both are new in every step."""
    one, batch, x0 = matching()
    calls = Calls.of(one.roles["critic"])
    for step in range(2):
        one.method.matching.student_loss(x0, batch, Streams(0, step))
        one.method.matching.critic_loss(x0, batch, Streams(0, step))
    assert len({tuple(sigma.tolist()) for sigma in calls.sigma}) == 4
    noise = torch.stack(
        [
            (x - (1 - s.view(-1, 1, 1, 1, 1)) * x0) / s.view(-1, 1, 1, 1, 1)
            for x, s in zip(calls.x_t, calls.sigma, strict=True)
        ]
    )
    assert float((torch.corrcoef(noise.flatten(1)) - torch.eye(4)).abs().max()) < 0.3  # 5 / sqrt(256)


@pytest.mark.slow
@pytest.mark.parametrize("gan_weight", [0.0, 0.5])
@pytest.mark.parametrize("size", [1, 2])
def test_the_losses_of_parts_average_to_the_whole(size, gan_weight):
    one, batch, x0 = matching(gan_weight=gan_weight)
    matched, x0 = one.method.matching, x0.requires_grad_()

    def gradients_of(parts):
        x0.grad = None
        for part in parts:
            rows = slice(part.sample_ids[0], part.sample_ids[-1] + 1)
            student = matched.student_loss(x0[rows], part, Streams(0, 0))
            critic = matched.critic_loss(x0[rows].detach(), part, Streams(0, 0))
            ((student.value + critic.value) / len(parts)).backward()
        one.roles["critic"].step()
        return {"samples": x0.grad.clone()}, one.roles["critic"].gradients.pop()

    whole, parts = gradients_of([batch]), gradients_of(batch.split(size))
    assert_near(parts[0], whole[0], 1e-4)
    assert_near(parts[1], whole[1], 1e-4)


def test_the_gaps_are_sorted_by_noise_level():
    """gap_low, gap_mid and gap_high hold |fake - real| of the samples with a level in that third."""
    one, batch, x0 = matching(tau_shift=1.0)
    found = {"low": 0, "mid": 0, "high": 0}
    for step in range(4):
        rng = Streams(0, step)
        metrics = one.method.matching.student_loss(x0, batch, rng).metrics
        sigma = tau_law(1.0)(rng.uniform("student tau", batch.sample_ids))
        for name, low in zip(found, (0, 1 / 3, 2 / 3), strict=True):
            inside = int(((sigma >= low) & (sigma < low + 1 / 3)).sum())
            assert len(metrics[f"gap_{name}"]) == inside
            found[name] += inside
    assert min(found.values()) > 0


# Wrong settings.


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tau_range": (0.9, 0.1)}, r"algorithm\.tau_range must rise, not"),
        (
            {"update_schedule": "exclusive", "student_every": 1},
            r"algorithm\.update_schedule exclusive never updates the critic",
        ),
    ],
)
def test_a_wrong_setting_names_its_key(config, message):
    with pytest.raises(ValueError, match=message):
        DMD2Config(**config).check(setup_of(FEW_STEPS))


@pytest.mark.parametrize("gan_weight", [0.0, 0.1])
@pytest.mark.parametrize("name", ["student", "critic"])
def test_the_weight_of_an_expert_scales_the_loss_and_no_metric(name, gan_weight, monkeypatch):
    """Noise levels drawn for one expert with probability q instead of p: the loss counts p / q."""
    values, metrics = [], []
    for weight in (1.0, 3.0):
        one = dmd2(DMD2Config(**ONE_BACKWARD, gan_weight=gan_weight))
        critic, batch, rng = one.roles["critic"], one.loader.batch(0), Streams(0, 0)
        draw = critic.draw_noise_levels
        monkeypatch.setattr(critic, "draw_noise_levels", lambda *words, draw=draw, w=weight: (draw(*words)[0], w))
        x0 = torch.randn(4, *batch.latent_shape, generator=torch.Generator().manual_seed(1))
        loss = getattr(one.method.matching, f"{name}_loss")(x0, batch, rng)
        values.append(float(loss.value.detach()))
        metrics.append({key: float(torch.as_tensor(value).sum()) for key, value in loss.metrics.items()})
    assert values[0] != 0 and values[1] == pytest.approx(3 * values[0], rel=1e-6)
    assert metrics[0] == metrics[1]
