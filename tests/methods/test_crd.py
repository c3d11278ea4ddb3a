"""Centered Reward Distillation: its gradient in closed form, the centring of its groups, and its moving average."""

from functools import partial

import pytest
import torch
from helpers import (
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
)
from test_diffusion_nft import CAUSAL, REWARDS, SIGMAS, STEPS, samples, student_of, velocity_on
from test_diffusion_nft import trainer as of_old_policy

from unified_trainer.__main__ import main
from unified_trainer.methods.crd import CRD, CRDConfig
from unified_trainer.numerics.advantages import group_means
from unified_trainer.parallel.random import Streams

CONFIG = CRDConfig(num_prompts=2, num_samples=4, prompts_per_update=2, rollout_batch=8, update_batch=8, beta=3.0)
trainer = partial(of_old_policy, kind=CRD, of=CONFIG, seeds={"moving_average": 3})
EVERY = torch.arange(8)


def gradient(**changes) -> dict[str, torch.Tensor]:
    one = trainer(**changes)
    one.step(0)
    (only,) = one.roles["student"].gradients
    return only


def by_hand(one, kl: float = 0.0, reference=None, scale: float = 1.0, kept: torch.Tensor = EVERY):
    """The gradient of the paper's loss, over samples of the old policy and noise levels, the groups' means included."""
    role, average, config = student_of(one), one.method.moving_average, one.method.config
    batch, x0, total = one.loader.batch(0), samples(one), 0.0
    velocity = velocity_on(x0, one)
    rewards = torch.tensor(REWARDS, dtype=torch.float64).reshape(2, 4)
    wanted = ((rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)).flatten()
    groups = [kept[kept < 4], kept[kept >= 4]]
    for s in range(STEPS):
        noise = Streams(0, 0).noise(f"forward {s}", batch.sample_ids, LATENT_SHAPE)
        x_t = (1 - SIGMAS[s]) * x0 + SIGMAS[s] * noise
        level = torch.full((8,), SIGMAS[s], dtype=torch.float64)
        v, v_average = velocity(role, x_t, level, batch.cond), velocity(average, x_t, level, batch.cond).detach()
        errors = [(one - (noise - x0)).flatten(1) for one in (v, v_average)]
        new, before = (-error.square().mean(1) / error.detach().abs().mean(1) for error in errors)
        implicit, external = config.beta * (new - before), wanted / 10
        loss = torch.cat(
            [(implicit[g] - implicit[g].mean() - external[g] + external[g].mean()).square() for g in groups]
        )
        loss = 5 / config.beta * loss
        if reference is not None:
            cond, uncond = (reference.velocity(x_t, level, of).detach() for of in (batch.cond, batch.uncond))
            coefficients = 1e-4 + (wanted / 10 + 0.5) * (kl - 1e-4)  # none of the advantages exceeds 5
            loss = loss + coefficients * (v - uncond - scale * (cond - uncond)).square().flatten(1).mean(1)
        total = total + loss.mean() / STEPS
    total.backward()
    return gradients(role.network)


@pytest.mark.slow
def test_the_update_is_the_gradient_of_the_paper():
    """The moving average has other weights, so that the means of the groups count; each runs once without gradient."""
    one = trainer()
    calls = Calls.of(one.roles["student"])
    metrics = one.step(0)
    assert_near(one.roles["student"].gradients[0], by_hand(trainer()), 1e-3)
    assert calls.graph == [False] * STEPS + [True] * STEPS
    assert metrics["policy_gap"] > 0 and metrics["loss"] > 0


@pytest.mark.slow
def test_where_the_student_is_the_moving_average_the_gradient_is_that_of_the_advantages():
    """-A of the relative error's, for any beta: implicit rewards are 0."""
    one, other = (gradient(seeds={"moving_average": 0}, beta=beta) for beta in (0.5, 7.0))
    assert_near(one, other, 1e-4)
    role, of, total = student_of(trainer()), trainer(), 0.0
    batch, x0 = of.loader.batch(0), samples(of)
    rewards = torch.tensor(REWARDS).reshape(2, 4)
    a = ((rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)).flatten()
    for s in range(STEPS):
        noise = Streams(0, 0).noise(f"forward {s}", batch.sample_ids, LATENT_SHAPE)
        level = torch.full((8,), SIGMAS[s], dtype=torch.float64)
        error = role.velocity((1 - SIGMAS[s]) * x0 + SIGMAS[s] * noise, level, batch.cond) - (noise - x0)
        total = total + (a * error.square().flatten(1).mean(1) / error.detach().abs().flatten(1).mean(1)).mean() / STEPS
    total.backward()
    assert_near(one, gradients(role.network), 1e-3)


def test_only_samples_that_are_trained_on_are_centred():
    kept = torch.tensor([0, 3, 5, 6])
    assert_near(gradient(best_of_n=2), by_hand(trainer(), kept=kept), 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("batches", [{"update_batch": 2}, {"rollout_batch": 3}, {"update_batch": 1, "best_of_n": 2}])
def test_the_gradient_does_not_depend_on_batches(batches):
    """A group lies in several minibatches, and is compared as a whole."""
    whole = {key: value for key, value in batches.items() if key == "best_of_n"}
    assert_near(gradient(**batches), gradient(**whole), 1e-4)


def test_an_update_without_samples_measures_nothing():
    """The first prompt's rewards are equal: of two updates one is skipped."""
    one = trainer(rewards=(1.0,) * 4 + REWARDS[4:], prompts_per_update=1)
    calls = Calls.of(one.roles["student"])
    assert one.step(0)["skipped_updates"] == 1 and len(calls.graph) == 2 * STEPS


def test_kl_to_a_guided_reference():
    """The better a sample, the larger its coefficient."""
    one = trainer(reference=frozen("reference", seed=2), kl_coefficient=3.0, kl_guidance_scale=4.5)
    metrics = one.step(0)
    expected = by_hand(trainer(), 3.0, frozen("reference", seed=2), 4.5)
    assert_near(one.roles["student"].gradients[0], expected, 1e-3)
    assert metrics["kl"] > 0


@pytest.mark.slow
def test_a_causal_student_attends_to_clean_chunks():
    """Two chunks; the old policy generates its samples chunk by chunk."""
    one = trainer(sampler=CAUSAL)
    one.step(0)
    assert_near(one.roles["student"].gradients[0], by_hand(trainer(sampler=CAUSAL)), 1e-3)


@pytest.mark.slow
def test_the_moving_average_follows_after_the_updates():
    """Decay min(.4, .25 + .1 s)."""
    one = trainer(moves=True, moving_decay=0.4, moving_decay_rise=0.1)
    average = one.method.moving_average
    for step, decay in ((0, 0.25), (1, 0.35), (7, 0.4)):
        before = {key: weight.clone() for key, weight in average.state_dict().items()}
        one.step(step)
        for key, weight in average.state_dict().items():
            student = one.roles["student"].weights[key.removeprefix("copied/")].detach()
            torch.testing.assert_close(weight, decay * before[key] + (1 - decay) * student)


def test_weighted_means_of_groups():
    """Group 7: (1 + 2 * 4) / 3 and (5 + 2 * 2) / 3; group 2 has no weight."""
    values = torch.tensor([[1.0, 5.0], [9.0, 9.0], [4.0, 2.0]])
    means = group_means(values, torch.tensor([7, 2, 7]), torch.tensor([1.0, 0.0, 2.0]))
    assert means.tolist() == [[3, 3], [0, 0], [3, 3]]


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--student.adapter.rank", "2"]], ids=["full", "adapter"])
def test_a_resumed_run_is_the_run_that_was_never_stopped(options, tmp_path):
    options = [*options, "--algorithm.kl-coefficient", "0.1", "--algorithm.kl-guidance-scale", "2"]
    options += ["--student.learning-rate", "0.01", "--sampler.guidance-scale", "1"]
    small = ["--method", "crd", *SMALL["dance_grpo"][2:], *options]
    straight, halved = tmp_path / "straight", tmp_path / "halved"
    assert main([*small, "--output", str(straight), "--steps", "3", "--checkpoint-every", "1"]) == 0
    assert main(["--resume", str(cut_off(straight, halved, 2))]) == 0
    assert metrics_of(halved) == metrics_of(straight)
    held = checkpoint_of(straight, 3)
    assert_same(checkpoint_of(halved, 3), held)
    average = {key: value for key, value in held.items() if key.startswith("moving_average/copied/")}
    assert average and all(
        not torch.equal(value, held[key.replace("moving_average/copied", "student/weights")])
        for key, value in average.items()
    )
