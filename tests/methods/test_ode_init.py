"""ODE regression: the teacher's trajectory, the states that are trained on, and the student after training."""

import copy
import dataclasses
import itertools

import pytest
import torch
from exact_world import PROMPTS, SHAPE, ClassCodec, Posterior, distance, pretrained, role
from helpers import (
    ALONE,
    CAPTIONS,
    FEW_STEPS,
    LATENT_SHAPE,
    Calls,
    Recorder,
    Recording,
    RecordingStudent,
    assert_near,
    frozen,
    no_prompt,
    setup_of,
    small_batch,
    small_model,
    tiny_codec,
)

from unified_trainer.basics.requests import Request
from unified_trainer.data.loader import Loader
from unified_trainer.data.prompts import Prompts
from unified_trainer.methods.ode_init import ODEInit, ODEInitConfig
from unified_trainer.models.wan.causal import CausalWanModel
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.role import Frozen, RoleConfig, Trainable, TrainableConfig
from unified_trainer.run.trainer import Trainer
from unified_trainer.sampling.solver import SamplerConfig

# Of the teacher, 3u / (1 + 2u) at u = 1, 5/6 ... 0, and of the student, 5u / (1 + 4u) at 1, 3/4, 1/2, 1/4.
LEVELS = [1.0, 0.9375, 6 / 7, 5 / 6, 0.75, 0.625, 0.6, 0.375, 0.0]
CONFIG = ODEInitConfig(batch_size=2, micro_batch=2, guidance_scale=3.0, teacher_steps=6, teacher_shift=3.0)


def trainer(sampler: SamplerConfig = FEW_STEPS, student: Recording | None = None, **changes) -> Trainer:
    config = dataclasses.replace(CONFIG, **changes)
    student = student or Recorder()
    method = ODEInit(config, sampler, student=student, teacher=frozen("teacher", seed=1))
    loader = Loader(Prompts(Request.of(CAPTIONS)), tiny_codec(), config.plan(), LATENT_SHAPE, "", 0, ALONE)
    return Trainer(method, {"student": student}, loader, ALONE, seed=0)


def trajectory_by_hand(noise: torch.Tensor, batch, levels: list[float]) -> dict[float, torch.Tensor]:
    """Return the states of Euler steps x + (sigma' - sigma) (u + w (c - u)) by noise level; 0 is the end."""
    teacher, uncond = frozen("teacher", seed=1), no_prompt().map(lambda text: text.expand(2, -1, -1))
    seen, x = {}, noise
    for sigma, sigma_next in itertools.pairwise(levels):
        seen[sigma] = x
        at = torch.full((2,), sigma, dtype=torch.float64)
        cond, unconditional = teacher.velocity(x, at, batch.cond), teacher.velocity(x, at, uncond)
        x = x + (sigma_next - sigma) * (unconditional + CONFIG.guidance_scale * (cond - unconditional))
    return seen | {0.0: x}


def test_the_loss_is_half_the_squared_error_to_the_end_of_the_teachers_ode():
    """Compare at each of the student's noise levels, on trajectories computed here call by call."""
    one = trainer()
    batch, rng = small_batch(2), Streams(3, 0)
    states = trajectory_by_hand(rng.noise("noise", [0, 1], LATENT_SHAPE), batch, LEVELS)
    student = one.roles["student"]
    losses = list(one.method.step(batch, 0, rng, ALONE))
    assert len(losses) == FEW_STEPS.num_steps
    for loss, level in zip(losses, FEW_STEPS.sigmas()[:-1].tolist(), strict=True):
        x_t = states[level]
        x0 = x_t - level * student.velocity(x_t, torch.full((2,), level, dtype=torch.float64), batch.cond)
        torch.testing.assert_close(loss.value, 0.5 * (x0 - states[0.0]).square().mean(), rtol=1e-5, atol=0)


def test_calls_are_the_minimum():
    """The teacher runs once per step, cond and uncond together, the student once per level and pass."""
    one = trainer(passes=2)
    teacher, student = Calls.of(one.method.teacher), Calls.of(one.roles["student"])
    one.step(0)
    assert [len(x) for x in teacher.x_t] == [4] * (len(LEVELS) - 1) and not any(teacher.graph)
    assert [len(x) for x in student.x_t] == [2] * 8 and all(student.graph)
    assert len(one.roles["student"].gradients) == 8


@pytest.mark.slow
def test_the_gradient_does_not_depend_on_the_micro_batch():
    whole, split = trainer(batch_size=4, micro_batch=4), trainer(batch_size=4, micro_batch=1)
    whole.step(0)
    split.step(0)
    for one, other in zip(whole.roles["student"].gradients, split.roles["student"].gradients, strict=True):
        assert_near(other, one)


def test_a_causal_student_sees_each_chunk_at_every_level():
    """In each call the chunks are at different levels, and over the calls each chunk is at every level."""
    shape, sampler = (16, 5, 2, 2), dataclasses.replace(FEW_STEPS, chunks=ChunkConfig(chunk_frames=1))
    student = RecordingStudent(
        "student",
        Backbone(CausalWanModel(small_model().network), ALONE, trained=True),
        TrainableConfig(max_grad_norm=0.0),
    )
    method = ODEInit(CONFIG, sampler, student=student, teacher=frozen("teacher", seed=1))
    loader = Loader(Prompts(Request.of(CAPTIONS)), tiny_codec(), CONFIG.plan(), shape, "", 0, ALONE)
    seen = []
    masked = student.masked_velocity
    student.masked_velocity = lambda x_t, sigma, *rest: (seen.append(sigma[0].tolist()), masked(x_t, sigma, *rest))[1]
    Trainer(method, {"student": student}, loader, ALONE, seed=0).step(0)
    levels = sampler.sigmas()[:-1].tolist()
    assert all(sorted(chunk, reverse=True) == levels for chunk in zip(*seen, strict=True))
    assert all(len(set(row)) == 4 for row in seen)


@pytest.mark.slow
def test_a_student_learns_where_the_ode_of_the_exact_teacher_ends():
    """After regression, one step of the student is at most half as far from the templates as before."""
    sampler = SamplerConfig(num_steps=1, shift=1.0, solver="ode", guidance_scale=1.0)
    config = ODEInitConfig(batch_size=96, micro_batch=96, guidance_scale=1.0, teacher_steps=20, teacher_shift=1.0)
    network = copy.deepcopy(pretrained())
    student = role(Trainable, "student", network, TrainableConfig(learning_rate=2e-3, betas=(0.9, 0.99)))
    teacher = role(Frozen, "teacher", Posterior(), RoleConfig())
    method = ODEInit(config, sampler, student=student, teacher=teacher)
    loader = Loader(Prompts(Request.of(PROMPTS)), ClassCodec(), config.plan(), SHAPE, "", 0, ALONE)
    one, before = Trainer(method, {"student": student}, loader, ALONE, seed=0), distance(student, sampler)
    for step in range(200):
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
