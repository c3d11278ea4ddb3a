"""Score identity and decoupled matching: goldens, gradients in closed form and against oracles, calls and runs."""

import pytest
import torch
from helpers import (
    FEW_STEPS,
    SMALL,
    Calls,
    assert_same,
    checkpoint_of,
    cut_off,
    dmd2,
    flags,
    metrics_of,
    setup_of,
    small_batch,
)
from test_distribution_matching import FAKE, ONE_BACKWARD, REAL, X, has_gradient, roles_of, tau_law

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.methods.distribution_matching import distribution_matching_gradient
from unified_trainer.methods.dmd2 import DMD2Config
from unified_trainer.methods.score_directions import ScoreIdentity, score_identity_loss
from unified_trainer.numerics.flow import ShiftedGrid, add_noise, x0_from_velocity
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.critic import Critic
from unified_trainer.roles.role import Frozen


def matching(**config):
    """A trainer, its first batch, and random samples in place of the student's."""
    one = dmd2(DMD2Config(**ONE_BACKWARD | config))
    batch = one.loader.batch(0)
    x0 = torch.randn(4, *batch.latent_shape, generator=torch.Generator().manual_seed(1))
    return one, batch, x0


# Score identity.


@pytest.mark.parametrize(("alpha", "expected"), [(1.0, -0.4361538462), (0.0, 0.5451923077)])
def test_the_loss_golden(alpha, expected):
    """r - f = .45 x and r - x = .25 x: .45 x (.25 - .45 alpha) x / (.25 mean x) of each sample."""
    assert float(score_identity_loss(X, REAL, FAKE, alpha).mean()) == pytest.approx(expected, abs=1e-9)


class Linear:
    """A role whose velocity is k x_t, at the noise level .4."""

    def __init__(self, k: float) -> None:
        self.k, self.keeps_graph = k, False

    def velocity(self, x_t, sigma, cond):
        return self.k * x_t

    def guided_velocity(self, x_t, sigma, cond, uncond, scale):
        return self.k * x_t

    def draw_noise_levels(self, name, ids, rng, law, partner=None):
        return torch.full((len(ids),), 0.4, dtype=torch.float64), 1.0


class LinearTeacher(Linear, Frozen):
    """A teacher that is."""


class LinearCritic(Linear, Critic):
    """A critic that is."""


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.2])
def test_the_gradient_in_closed_form(alpha):
    """With r = A x_t and f = B x_t, D = A - B, the slope is the derivative of D x_t ((A x_t - x) - alpha D x_t) / w.

    Both networks and the sample itself count: (1 - sigma) D (...) + D x_t ((1 - sigma) (A - alpha D) - 1).
    """
    batch, x = small_batch(3), torch.randn(3, *small_batch(1).latent_shape, dtype=torch.float64)
    config = DMD2Config(direction="sid", sid_alpha=alpha)
    got = ScoreIdentity(config, LinearTeacher(0.3), LinearCritic(0.8))(x, batch, Streams(0, 0)).gradient
    noise = Streams(0, 0).noise("student tau noise", batch.sample_ids, batch.latent_shape)
    a, d, x_t = 1 - 0.4 * 0.3, 0.4 * (0.8 - 0.3), 0.6 * x + 0.4 * noise
    width = (x - a * x_t).abs().flatten(1).mean(1).view(3, 1, 1, 1, 1)
    expected = 0.6 * d * ((a * x_t - x) - alpha * d * x_t) + d * x_t * (0.6 * (a - alpha * d) - 1)
    torch.testing.assert_close(got, expected / width)


def test_the_students_gradient_goes_through_teacher_and_critic_and_teaches_neither():
    one, batch, x0 = matching(direction="sid")
    x0.requires_grad_()
    _, teacher, critic = roles_of(one)
    loss = one.method.matching.student_loss(x0, batch, Streams(0, 0))
    (got,) = torch.autograd.grad(loss.value, x0)
    assert not any(has_gradient(role.network) for role in roles_of(one))

    teacher.keeps_graph = True  # here too, whatever the direction asked for
    rng = Streams(0, 0)
    noise = rng.noise("student tau noise", batch.sample_ids, batch.latent_shape)
    sigma = tau_law(5.0)(rng.uniform("student tau", batch.sample_ids))
    x_tau = add_noise(x0, noise, sigma)
    cond, uncond = (teacher.velocity(x_tau, sigma, text) for text in (batch.cond, batch.uncond))
    real = x0_from_velocity(x_tau, uncond + 2.0 * (cond - uncond), sigma)
    fake = x0_from_velocity(x_tau, critic.velocity(x_tau, sigma, batch.cond), sigma)
    terms = (real - fake) * ((real - x0) - (real - fake))
    losses = terms.flatten(1).mean(1) / (x0 - real).detach().abs().flatten(1).mean(1)
    (expected,) = torch.autograd.grad(losses.mean(), x0)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(loss.metrics["sid_loss"], losses.detach(), rtol=1e-4, atol=1e-6)


# The decoupled direction.


class Still(Streams):
    """Streams of one noise and one level, whatever they are for."""

    def noise(self, name, keys, shape):
        return super().noise("still", keys, shape)

    def uniform(self, name, keys):
        return super().uniform("still", keys)


def test_at_one_noise_level_it_is_matching_with_guidance():
    """(f - c) + (w - 1) (u - c) = f - (u + w (c - u)): the two differ in the normaliser alone."""
    one, batch, x0 = matching(direction="decoupled")
    plain, _, _ = matching()
    got, expected = (
        each.method.matching.direction(x0, batch, Still(0, 0)).gradient.flatten(1) for each in (one, plain)
    )
    ratio = (got * expected).sum(1) / expected.square().sum(1)
    torch.testing.assert_close(got, ratio[:, None] * expected, rtol=1e-3, atol=1e-5)
    assert ((ratio - 1).abs() > 1e-4).any()


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_each_part_has_its_own_noise_and_law(weight):
    laws = {"tau_shift": 3.0, "guidance_tau_shift": 8.0, "guidance_tau_range": (0.5, 0.9)}
    one, batch, x0 = matching(direction="decoupled", regulariser_weight=weight, guidance_scale=4.0, **laws)
    found = one.method.matching.direction(x0, batch, Streams(0, 0))
    rng, (_, teacher, critic) = Streams(0, 0), roles_of(one)

    def predictions(name, law):
        noise = rng.noise(f"{name} noise", batch.sample_ids, batch.latent_shape)
        sigma = law(rng.uniform(name, batch.sample_ids))
        x_tau = add_noise(x0, noise, sigma)
        calls = ((teacher, batch.cond), (teacher, batch.uncond), (critic, batch.cond))
        with torch.no_grad():
            return [x0_from_velocity(x_tau, role.velocity(x_tau, sigma, cond), sigma) for role, cond in calls]

    cond, _, fake = predictions("student tau", ShiftedGrid(3.0, (0.02, 0.98)))
    expected = weight * distribution_matching_gradient(x0, cond, fake)
    cond, uncond, _ = predictions("guidance tau", ShiftedGrid(8.0, (0.5, 0.9)))
    width = (x0 - cond).abs().flatten(1).mean(1).view(4, 1, 1, 1, 1)
    expected = expected + 3.0 * (uncond - cond) / width
    torch.testing.assert_close(found.gradient, expected, rtol=1e-3, atol=1e-5)


# Calls, runs and wrong settings.


@pytest.mark.parametrize(("direction", "teacher_rows"), [("dmd", [8]), ("sid", [8]), ("decoupled", [4, 8])])
def test_network_calls(direction, teacher_rows):
    one, batch, x0 = matching(direction=direction)
    _, teacher, critic = roles_of(one)
    of_teacher, of_critic = Calls.of(teacher), Calls.of(critic)
    one.method.matching.student_loss(x0, batch, Streams(0, 0))
    assert [len(x) for x in of_teacher.x_t] == teacher_rows and [len(x) for x in of_critic.x_t] == [4]
    assert of_teacher.graph == [direction == "sid"] * len(teacher_rows)


@pytest.mark.slow
@pytest.mark.parametrize("roles", [[], ["--student.adapter.rank", "2", "--critic.adapter.rank", "2"]])
@pytest.mark.parametrize(("method", "direction"), [("dmd2", "sid"), ("dmd2", "decoupled"), ("self_forcing", "sid")])
def test_a_resumed_run_is_the_run_that_was_never_stopped(method, direction, roles, tmp_path):
    """With adapters the three roles share one network, also in the backward pass through teacher and critic."""
    small = ["--method", method, *SMALL["finetune"][2:], *roles, "--algorithm.direction", direction]
    small = [word for word in small if word not in ("--data.num-clips", "4")]
    small += flags({"sampler.guidance-scale": 1, "algorithm.student-every": 2, "student.learning-rate": 1e-3})
    small += flags({"video.frames": 9, "video.height": 32, "video.width": 32, "guard.action": "off"})
    straight, halved = tmp_path / "straight", tmp_path / "halved"
    assert main([*small, "--output", str(straight), "--steps", "4", "--checkpoint-every", "1"]) == 0
    assert main(["--resume", str(cut_off(straight, halved, 2))]) == 0
    assert metrics_of(halved) == metrics_of(straight)
    assert_same(checkpoint_of(halved, 4), checkpoint_of(straight, 4))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"direction": "sid", "gan_weight": 0.1}, r"algorithm\.gan_weight must be 0 with algorithm\.direction sid"),
        (
            {"direction": "decoupled", "guidance_scale": 1.0},
            r"guidance_scale must not be 1 with .*decoupled",
        ),
        ({"guidance_tau_range": (0.9, 0.1)}, r"algorithm\.guidance_tau_range must rise"),
    ],
)
def test_a_wrong_setting_names_its_key(config, message):
    with pytest.raises(UserError, match=message):
        DMD2Config(**config).check(setup_of(FEW_STEPS))
