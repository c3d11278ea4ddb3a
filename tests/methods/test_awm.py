"""Advantage Weighted Matching: its likelihood and its gradient in closed form, its ratio and its old policy."""

import pytest
import torch
from helpers import (
    ALONE,
    LATENT_SHAPE,
    SMALL,
    Calls,
    assert_near,
    assert_same,
    checkpoint_of,
    cut_off,
    frozen,
    gradients,
    metrics_of,
    small_causal,
)
from test_diffusion_nft import CAUSAL, REWARDS, SIGMAS, STEPS, samples, student_of, trainer, velocity_on

from unified_trainer.__main__ import main
from unified_trainer.methods.awm import AWM, AWMConfig, log_likelihood
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.causal import CausalFrozen
from unified_trainer.roles.role import RoleConfig

CONFIG = AWMConfig(
    num_prompts=2,
    num_samples=4,
    prompts_per_update=2,
    rollout_batch=8,
    update_batch=8,
    power=0.5,
    clip_range=1e-3,
    old_kl=0.4,
    old_decay_rise=0.1,
)


def awm(**changes):
    return trainer(kind=AWM, of=CONFIG, **changes)


def one_element(value: float) -> torch.Tensor:
    return torch.full((1, 1, 1, 1, 1), value)


# The likelihood.


@pytest.mark.parametrize(("power", "expected"), [(1.0, -2.0), (0.5, -2.0), (0.25, -2 * 2**0.5)])
def test_the_likelihood_by_hand(power, expected):
    """v = 3, target = 1, sigma = .5: e = 4, and -.5 e^p / p is -2 for p = 1, -.5 2 / .5 = -2 for p = .5."""
    got = log_likelihood(one_element(3.0), one_element(1.0), 0.5, power)
    assert float(got) == pytest.approx(expected, abs=2e-2 if power == 0.25 else 1e-4)  # less 1e-10^p / p


def test_a_velocity_that_is_exact_has_likelihood_0_and_no_gradient():
    v = torch.randn(2, *LATENT_SHAPE).requires_grad_()
    got = log_likelihood(v, v.detach(), 0.7, 0.25)
    got.sum().backward()
    assert torch.equal(got, torch.zeros(2, dtype=torch.float64)) and not v.grad.any()


@pytest.mark.parametrize("power", [0.25, 1.0])
def test_the_slope_of_the_likelihood(power):
    """d log p / dv = -sigma e^(p - 1) 2 (v - target) / D: larger errors count less the smaller p is."""
    v, target = torch.randn(2, 2, *LATENT_SHAPE, dtype=torch.float64)
    leaf = v.clone().requires_grad_()
    log_likelihood(leaf, target, 0.7, power).sum().backward()
    error = (v - target).square().flatten(1).mean(1).view(2, 1, 1, 1, 1)
    expected = -0.7 * error ** (power - 1) * 2 * (v - target) / v[0].numel()
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-6, atol=1e-12)


# The update.


def advantages() -> torch.Tensor:
    """The standardised rewards of each group over the clip 5."""
    groups = torch.tensor(REWARDS).reshape(2, 4)
    return ((groups - groups.mean(1, keepdim=True)) / groups.std(1, keepdim=True)).flatten() / 5


def by_hand(one, kl: float = 0.0, reference=None) -> dict[str, torch.Tensor]:
    """The gradient of the published loss, averaged over samples of the old policy and over noise levels."""
    role, old, config = student_of(one), one.method.old, one.method.config
    batch, x0, total = one.loader.batch(0), samples(one), 0.0
    velocity = velocity_on(x0, one)
    for s in range(STEPS):
        noise = Streams(0, 0).noise(f"forward {s}", batch.sample_ids, LATENT_SHAPE)
        x_t = (1 - SIGMAS[s]) * x0 + SIGMAS[s] * noise
        level = torch.full((8,), SIGMAS[s], dtype=torch.float64)
        v, v_old = velocity(role, x_t, level, batch.cond), velocity(old, x_t, level, batch.cond).detach()
        errors = [(one - (noise - x0)).square().flatten(1).mean(1) for one in (v, v_old)]
        new, before = (-SIGMAS[s] * error**config.power / config.power for error in errors)
        ratio, a = (new - before).exp(), advantages()
        bounded = ratio.clamp(1 - config.clip_range, 1 + config.clip_range)
        loss = torch.maximum(-a * ratio, -a * bounded)
        loss = loss + config.old_kl * (v - v_old).square().flatten(1).mean(1)
        if reference is not None:
            loss = loss + kl * (v - velocity(reference, x_t, level, batch.cond)).square().flatten(1).mean(1)
        total = total + loss.mean() / STEPS
    total.backward()
    return gradients(role.network)


@pytest.mark.parametrize("clip_range", [1e-3, 1.0])
def test_the_update_is_the_gradient_of_the_paper(clip_range):
    """The old policy has other weights: some ratios are outside a narrow range, and none outside the published one."""
    one = awm(clip_range=clip_range)
    calls = Calls.of(one.roles["student"])
    metrics = one.step(0)
    assert_near(one.roles["student"].gradients[0], by_hand(awm(clip_range=clip_range)), 1e-3)
    assert len(calls.graph) == STEPS and all(calls.graph)  # the student runs for its loss only
    assert metrics["policy_gap"] > 0 and (metrics["clip_fraction"] > 0) == (clip_range < 1)


def test_kl_to_the_reference():
    one = awm(reference=frozen("reference", seed=2), kl_coefficient=3.0)
    metrics = one.step(0)
    assert_near(one.roles["student"].gradients[0], by_hand(awm(), 3.0, frozen("reference", seed=2)), 1e-3)
    assert metrics["kl"] > 0


@pytest.mark.slow
def test_a_causal_student_and_its_reference_attend_to_clean_chunks():
    """Two chunks; the old policy generates its samples chunk by chunk."""

    def reference() -> CausalFrozen:
        return CausalFrozen("reference", Backbone(small_causal(2), ALONE), RoleConfig())

    one = awm(sampler=CAUSAL, reference=reference(), kl_coefficient=3.0)
    one.step(0)
    assert_near(one.roles["student"].gradients[0], by_hand(awm(sampler=CAUSAL), 3.0, reference()), 1e-3)


def test_where_the_policies_agree_the_gradient_is_that_of_weighted_flow_matching():
    """-A sum of d log p / dv: neither the clip nor the distance to the old policy has an effect."""
    one, wide = awm(old_seed=0), awm(old_seed=0, clip_range=1.0, old_kl=0.0)
    one.step(0), wide.step(0)
    assert_near(one.roles["student"].gradients[0], wide.roles["student"].gradients[0], 1e-5)
    assert_near(one.roles["student"].gradients[0], by_hand(awm(old_seed=0)), 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("batches", [{"update_batch": 2}, {"rollout_batch": 3}])
def test_the_gradient_does_not_depend_on_batches(batches):
    parts, whole = awm(**batches), awm()
    parts.step(0), whole.step(0)
    assert_near(parts.roles["student"].gradients[0], whole.roles["student"].gradients[0], 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [[], ["--sampler.chunks.chunk-frames", "1"]], ids=["bidirectional", "causal"])
def test_a_resumed_run_is_the_run_that_was_never_stopped(chunks, tmp_path):
    options = [*chunks, "--algorithm.kl-coefficient", "0.1", "--algorithm.old-decay-rise", "0.2"]
    options += [
        "--student.learning-rate",
        "0.01",
        "--sampler.guidance-scale",
        "1",
        "--algorithm.noise-range",
        "0.1",
        "1",
    ]
    small = ["--method", "awm", *SMALL["dance_grpo"][2:], *options]
    straight, halved = tmp_path / "straight", tmp_path / "halved"
    assert main([*small, "--output", str(straight), "--steps", "3", "--checkpoint-every", "1"]) == 0
    assert main(["--resume", str(cut_off(straight, halved, 2))]) == 0
    assert metrics_of(halved) == metrics_of(straight)
    assert_same(checkpoint_of(halved, 3), checkpoint_of(straight, 3))
