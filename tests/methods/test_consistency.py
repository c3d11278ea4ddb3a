"""Consistency distillation: the loss by hand, its boundary, calls with gradient, and the distance after training."""

import copy
import dataclasses
import math

import pytest
import torch
from exact_world import CLASSES, EACH, SHAPE, ClassCodec, Posterior, distance, pretrained, role, templates
from helpers import (
    ALONE,
    FEW_STEPS,
    LATENT_SHAPE,
    Calls,
    Recorder,
    assert_near,
    frozen,
    no_prompt,
    random_clips,
    setup_of,
    small_batch,
    tiny_codec,
)

from unified_trainer.data.clips import Clips
from unified_trainer.data.loader import Loader
from unified_trainer.methods.consistency import Consistency, ConsistencyConfig
from unified_trainer.methods.consistency_loss import consistency_loss
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.numerics.flow import add_noise, per_sample, sigma_table, x0_from_velocity
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.role import Frozen, RoleConfig, Trainable, TrainableConfig
from unified_trainer.run.trainer import Trainer
from unified_trainer.sampling.solver import SamplerConfig

CONFIG = ConsistencyConfig(batch_size=2, micro_batch=2, teacher_steps=6)


def trainer(**changes) -> Trainer:
    config, student = dataclasses.replace(CONFIG, **changes), Recorder()
    method = Consistency(config, FEW_STEPS, student=student, teacher=frozen("teacher", seed=1))
    loader = Loader(random_clips(8), tiny_codec(), config.plan(), LATENT_SHAPE, "", 0, ALONE)
    return Trainer(method, {"student": student}, loader, ALONE, seed=0)


def batch_with_latents(count: int = 2):
    return small_batch(count, latents=torch.randn(count, *LATENT_SHAPE, generator=torch.Generator().manual_seed(2)))


@pytest.mark.parametrize("steps", [2, 6])
def test_the_loss_is_the_distance_of_two_predictions_on_one_step_of_the_teacher(steps):
    """Compare with mean (sqrt(d^2 + c^2) - c), d = x0(x_t, sigma) - x0(x_next, sigma'), computed sample by sample."""
    one, batch, rng = trainer(teacher_steps=steps), batch_with_latents(), Streams(3, 0)
    teacher, student, c = frozen("teacher", seed=1), one.roles["student"], CONFIG.huber
    table = sigma_table(steps, CONFIG.teacher_shift).tolist()
    level, noise = rng.uniform("level", [0, 1]).tolist(), rng.noise("noise", [0, 1], LATENT_SHAPE)
    total = 0.0
    for i in range(2):
        row = math.floor(level[i] * steps)
        sigma, sigma_next = (torch.tensor([table[r]], dtype=torch.float64) for r in (row, row + 1))
        cond = batch.cond.map(lambda text: text[i : i + 1])  # noqa: B023
        x_t = (1 - sigma.float()) * batch.latents[i : i + 1] + sigma.float() * noise[i : i + 1]
        unconditional = teacher.velocity(x_t, sigma, no_prompt())
        v = unconditional + CONFIG.guidance_scale * (teacher.velocity(x_t, sigma, cond) - unconditional)
        x_next = x_t + (sigma_next - sigma).float() * v
        d = x_t - sigma.float() * student.velocity(x_t, sigma, cond)
        d = d - (x_next - sigma_next.float() * student.velocity(x_next, sigma_next, cond))
        total += ((d**2 + c**2).sqrt() - c).mean() / 2
    (loss,) = one.method.step(batch, 0, rng, ALONE)
    torch.testing.assert_close(loss.value, total, rtol=1e-5, atol=0)


@pytest.mark.parametrize("frames", [False, True])
def test_the_distance_of_a_vector_weights_each_step_by_its_inverse_length(frames):
    """(sqrt(mean d^2 + c^2) - c) / (N (sigma - sigma')), the mean over a sample, or over each frame of a causal one."""
    config, batch, rng = dataclasses.replace(CONFIG, distance="vector", huber=0.2), batch_with_latents(), Streams(3, 0)
    steps = torch.tensor([[0, 3], [2, 5]]) if frames else torch.tensor([1, 4])
    student, teacher, table = Recorder(), frozen("teacher", seed=1), config.table
    if frames:  # linear networks: one call for all frames, which have levels of their own
        student.velocity = lambda x, sigma, cond: 0.3 * x
        teacher.guided_velocity = lambda x, sigma, cond, uncond, scale: 0.8 * x
    loss = consistency_loss(config, 1.0, student, teacher, batch, steps, rng)
    sigma, sigma_next = table[steps], table[steps + 1]
    x_t = add_noise(batch.latents, rng.noise("noise", [0, 1], LATENT_SHAPE), sigma)
    velocity = teacher.guided_velocity(x_t, sigma, batch.cond, batch.uncond, 1.0)
    x_next = x_t + per_sample(sigma_next - sigma, x_t) * velocity
    ends = [x0_from_velocity(x, student.velocity(x, s, batch.cond), s) for x, s in ((x_t, sigma), (x_next, sigma_next))]
    square = (ends[0] - ends[1]).square()
    means = square.mean((1, 3, 4)) if frames else square.flatten(1).mean(1)
    expected = (((means + 0.04).sqrt() - 0.2) / (6 * (sigma - sigma_next))).mean()
    torch.testing.assert_close(loss.double(), expected.double(), rtol=1e-4, atol=0)


def test_calls_and_graphs():
    """The teacher runs once, cond and uncond together; the student once for the target and once with gradient."""
    one = trainer()
    teacher, student = Calls.of(one.method.teacher), Calls.of(one.roles["student"])
    one.step(0)
    assert [len(x) for x in teacher.x_t] == [4] and teacher.graph == [False]
    assert [len(x) for x in student.x_t] == [2, 2] and student.graph == [False, True]
    assert bool((student.sigma[0] < student.sigma[1]).all())


def test_a_large_huber_constant_is_the_squared_error():
    """2 c (sqrt(d^2 + c^2) - c) tends to d^2, so two large c give the same value.

    Not too large: the difference of float32 numbers near c loses d^2 / (2 c), which is 5e-4 at c = 100.
    """
    values = []
    for c in (10.0, 40.0):
        one, batch = trainer(huber=c), batch_with_latents()
        (loss,) = one.method.step(batch, 0, Streams(3, 0), ALONE)
        values.append(2 * c * loss.value.item())
    assert values[0] == pytest.approx(values[1], rel=0.05)


def test_the_gradient_does_not_depend_on_the_micro_batch():
    whole, split = trainer(batch_size=4, micro_batch=4), trainer(batch_size=4, micro_batch=1)
    whole.step(0)
    split.step(0)
    assert_near(split.roles["student"].gradients[0], whole.roles["student"].gradients[0])


@pytest.mark.slow
def test_one_step_comes_near_to_the_law_of_the_exact_teacher():
    """The distance falls from 1.26 to about 0.2."""
    sampler = SamplerConfig(num_steps=1, shift=1.0, solver="sde", guidance_scale=1.0)
    config = ConsistencyConfig(96, 96, guidance_scale=1.0, teacher_steps=8, teacher_shift=1.0, huber=1.0)
    adam = TrainableConfig(learning_rate=2e-3, lr_schedule="linear", lr_decay_updates=300)
    student = role(Trainable, "student", copy.deepcopy(pretrained()), adam)
    method = Consistency(config, sampler, student=student, teacher=role(Frozen, "teacher", Posterior(), RoleConfig()))
    captions = tuple(f"class {i // EACH}" for i in range(CLASSES * EACH)) * 8
    loader = Loader(
        Clips(captions, templates().repeat(8, 1, 1, 1, 1)), ClassCodec(), config.plan(), SHAPE, "", 0, ALONE
    )
    one, before = Trainer(method, {"student": student}, loader, ALONE, seed=0), distance(student, sampler)
    for step in range(300):
        one.step(step)
    assert distance(student, sampler) < 0.5 * before


@pytest.mark.parametrize(
    ("changes", "sampler", "message"),
    [
        ({}, dataclasses.replace(FEW_STEPS, guidance_scale=3.0), "sampler.guidance_scale must be 1, not 3.0"),
        ({}, dataclasses.replace(FEW_STEPS, chunks=ChunkConfig(1, context_noise=0.1)), "context_noise must be 0"),
    ],
)
def test_a_wrong_setting_names_its_key(changes, sampler, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes).check(setup_of(sampler))
