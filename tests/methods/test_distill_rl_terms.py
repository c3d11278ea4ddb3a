"""Further terms of distill_rl: the direction in parts, the distance to the teacher, and the discriminator."""

from dataclasses import replace

import pytest
import torch
from helpers import FEW_STEPS, LATENT_SHAPE, ScriptedScorer, dmd2, random_clips, setup_of
from test_distill_rl import (
    LAST,
    ONE,
    SameNoise,
    assert_equal_gradients,
    config,
    gradients,
    losses,
    step_with_exit,
    trainer,
)

from unified_trainer.errors import UserError
from unified_trainer.methods.distill_rl_settings import DistanceTermConfig, GANTermConfig
from unified_trainer.methods.distribution_matching import PartWeights
from unified_trainer.methods.dmd2 import DMD2Config
from unified_trainer.numerics.flow import add_noise, x0_from_velocity
from unified_trainer.parallel.random import Streams

REWARDS = (0.0, 1.0, -0.5, 0.5)  # dr_grpo advantages -.5, .5, -.5, .5


def sampled(one):
    """The batch and the rollout of the first training step."""
    batch = one.loader.batch(0)
    return batch, one.method.rollouts.samples(batch, 0, SameNoise(0, 0)).rollout


def test_a_direction_in_equal_parts_is_the_plain_one_bit_for_bit():
    one = trainer(matching=ONE)
    batch, rollout = sampled(one)
    plain, parts = (one.method.matching.direction(rollout.x0, batch, Streams(0, 0), p) for p in (None, PartWeights()))
    assert torch.equal(plain.gradient, parts.gradient) and bool(plain.gradient.any())


def test_the_guidance_part_is_scaled_by_the_advantage():
    """g = (c (f - cond) - a s (cond - uncond)) / mean|x0 - real| with s = 1 and a = 1.5 (1 - A) or 1.5 (1 + A)."""
    changes = {"conditional_weight": 0.5, "guidance_weight": 1.5, "advantage_scale": 1.0}
    one = trainer(ScriptedScorer(REWARDS), matching=ONE | changes, advantage="dr_grpo")
    batch, rollout = sampled(one)
    matching, rng, x0 = one.method.matching, Streams(0, 0), rollout.x0
    plain = matching.direction(x0, batch, rng)
    noise = rng.noise("student tau noise", batch.sample_ids, LATENT_SHAPE)
    sigma, _ = matching._noise_levels("student tau", batch, rng)
    x_tau = add_noise(x0, noise, sigma)
    with torch.no_grad():
        velocities = [matching.critic.velocity(x_tau, sigma, batch.cond)]
        velocities += [matching.teacher.velocity(x_tau, sigma, cond) for cond in (batch.cond, batch.uncond)]
    fake, cond, uncond = (x0_from_velocity(x_tau, velocity, sigma) for velocity in velocities)
    real = uncond + 2.0 * (cond - uncond)
    scale = torch.tensor([0.75, 2.25, 0.75, 2.25]).view(4, 1, 1, 1, 1)
    norm = (x0 - real).abs().flatten(1).mean(1).view(4, 1, 1, 1, 1)
    expected = (0.5 * (fake - cond) - scale * (cond - uncond)) / norm
    found = losses(one, 0, batch)["student"][0].value.detach()
    torch.testing.assert_close(found, 0.5 * expected.square().mean(), rtol=1e-4, atol=1e-6)
    assert abs(float(found) - 0.5 * float(plain.gradient.square().mean())) > 0.05 * float(found)


def test_the_distance_to_the_teacher_is_that_of_the_velocities():
    one = trainer(distance=DistanceTermConfig(weight=0.5))
    batch, rollout = sampled(one)
    x_t, level = rollout.states[:, LAST], FEW_STEPS.sigmas()[LAST].expand(4)
    student, teacher = one.roles["student"], one.method.matching.teacher
    with torch.no_grad():
        cond, uncond = (teacher.velocity(x_t, level, c) for c in (batch.cond, batch.uncond))
    expected = 0.5 * (student.velocity(x_t, level, batch.cond) - (2 * cond - uncond)).square().mean()
    (loss,) = losses(one, 0, batch)["student"]
    torch.testing.assert_close(loss.value, expected)
    own = gradients(student)
    for p in student.weights.values():
        p.grad = None
    expected.backward()
    assert own.keys() == gradients(student).keys()
    for key, value in gradients(student).items():
        torch.testing.assert_close(own[key], value, rtol=1e-4, atol=1e-7)
    assert float(loss.metrics["teacher_distance"].mean()) == pytest.approx(2 * float(expected.detach()), rel=1e-5)


def test_matching_with_a_discriminator_is_dmd2_bit_for_bit():
    one, step = trainer(matching=ONE, gan=GANTermConfig(weight=0.5, critic_weight=0.1)), step_with_exit(LAST)
    settings = DMD2Config(
        batch_size=4,
        micro_batch=4,
        guidance_scale=2.0,
        student_every=1,
        critic_samples="shared",
        gan_weight=0.5,
        gan_critic_weight=0.1,
    )
    other = dmd2(settings)
    assert one.method.config.needs_clips
    heads = [role.roles["critic"]._heads[""] for role in (one, other)]
    heads[0].load_state_dict(heads[1].state_dict())  # its weights are not zero
    batch = replace(one.loader.batch(step), latents=random_clips(8).latents([0, 1, 2, 3]))
    found, expected = losses(one, step, batch), losses(other, step, batch)
    for role in ("student", "critic"):
        (own,), (theirs,) = found[role], expected[role]
        assert torch.equal(own.value, theirs.value)
        assert all(torch.equal(own.metrics[key], value) for key, value in theirs.metrics.items())
    assert_equal_gradients(one.roles["critic"], other.roles["critic"])
    assert_equal_gradients(one.roles["student"], other.roles["student"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conditional_weight": 0.0, "guidance_weight": 0.0}, "there is no direction"),
        ({"guidance_scale": 1.0, "advantage_scale": 1.0}, r"guidance_scale other than 1"),
        ({"guidance_weight": 0.0, "advantage_scale": 1.0}, r"guidance_weight above 0"),
        ({"exits": "all", "advantage_scale": 1.0}, r"exits must be last"),
    ],
)
def test_parts_that_cannot_be_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        config(matching=ONE | changes).check(setup_of(FEW_STEPS))
