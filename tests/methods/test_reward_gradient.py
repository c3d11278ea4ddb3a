"""The gradient of a reward through decoder, scorer and one sampling step, against finite differences."""

import dataclasses

import pytest
import torch
from helpers import (
    ALONE,
    CAPTIONS,
    CPU,
    HPSV3,
    LATENT_SHAPE,
    Calls,
    Recorder,
    assert_near,
    mean_score,
    reward_of,
    setup_of,
    small_batch,
    tiny_codec,
    trainable,
)

from unified_trainer.basics.requests import Request
from unified_trainer.data.loader import Loader
from unified_trainer.data.prompts import Prompts
from unified_trainer.methods.reward_gradient import RewardGradient, RewardGradientConfig
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.parallel.random import Streams
from unified_trainer.rewards.hpsv3 import HPSv3
from unified_trainer.rewards.reward import Reward, RewardConfig
from unified_trainer.rewards.scorers import load_scorers
from unified_trainer.run.trainer import Trainer
from unified_trainer.sampling.solver import SamplerConfig

SAMPLER = SamplerConfig(num_steps=3, guidance_scale=1.0)
CONFIG = RewardGradientConfig(batch_size=4, micro_batch=4)
SIZE = 1e-2  # of a finite difference in latents
STEP = 2e-3  # in weights


def hpsv3_reward(**config) -> Reward:
    """Return the tiny HPSv3 as a run loads it."""
    settings = RewardConfig(**{"path": "tiny"} | config)
    return Reward(load_scorers(settings, CPU)[0], tiny_codec(), settings)


def trainer(reward: Reward, sampler: SamplerConfig = SAMPLER, **changes) -> Trainer:
    config, student = dataclasses.replace(CONFIG, **changes), Recorder()
    loader = Loader(Prompts(Request.of(CAPTIONS)), tiny_codec(), config.plan(), LATENT_SHAPE, "", 0, ALONE)
    method = RewardGradient(config, sampler, student=student, reward=reward, loader=loader)
    return Trainer(method, {"student": student}, loader, ALONE, seed=0)


def slope(function, x: torch.Tensor, direction: torch.Tensor) -> float:
    with torch.no_grad():
        return float(function(x + SIZE * direction) - function(x - SIZE * direction)) / (2 * SIZE)


# HPSv3.


def test_hpsv3_with_gradient_is_hpsv3_to_the_rounding_of_its_bytes():
    hpsv3 = HPSv3.load(HPSV3, CPU, torch.float32)
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    images = torch.nn.functional.avg_pool2d(images, 5, 1, 2)  # smooth, like decoded frames
    rounded = hpsv3.score(images, CAPTIONS[:2])
    exact = hpsv3.score(images.requires_grad_(), CAPTIONS[:2])
    assert exact.requires_grad
    torch.testing.assert_close(exact, rounded, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("frames", ["first", "all"])
def test_the_rewards_gradient_to_the_latents(frames):
    """Compare along the gradient's own direction, where a finite difference is largest against rounding."""
    reward = hpsv3_reward(frames=frames)
    x0 = torch.randn(2, *LATENT_SHAPE, generator=torch.Generator().manual_seed(1)).requires_grad_()
    (gradient,) = torch.autograd.grad(reward.score_with_gradient(x0, CAPTIONS[:2]).sum(), x0)
    direction = gradient / gradient.norm()

    def total(latents: torch.Tensor) -> torch.Tensor:
        return reward.score_with_gradient(latents.requires_grad_(), CAPTIONS[:2]).sum().detach()

    start = x0.detach()
    rise = float(total(start + SIZE * direction) - total(start - SIZE * direction)) / (2 * SIZE)
    assert rise == pytest.approx(float(gradient.norm()), rel=0.03)
    assert (float(gradient[:, :, 1:].abs().max()) > 0) == (frames == "all")


# The method.


def test_the_update_is_the_slope_of_the_mean_reward():
    """Weights moved along the gradient change the mean reward by its norm; the sampler has one call, so none is cut."""
    one = trainer(hpsv3_reward(frames="first"), dataclasses.replace(SAMPLER, num_steps=1))
    one.step(0)
    (gradient,) = one.roles["student"].gradients
    weights = dict(one.roles["student"].network.named_parameters())
    norm = torch.stack([value.norm() for value in gradient.values()]).norm()

    def loss(size: float) -> float:
        for key, value in gradient.items():
            weights[key].data.add_(size / norm * value)
        batch, rng = one.loader.batch(0), Streams(0, 0)
        (only,) = one.method.step(batch, 0, rng, ALONE)
        for key, value in gradient.items():
            weights[key].data.sub_(size / norm * value)
        assert float(only.value.detach()) == pytest.approx(-float(only.metrics["reward"].mean()), rel=1e-6)
        return float(only.value.detach())

    assert (loss(STEP) - loss(-STEP)) / (2 * STEP) == pytest.approx(float(norm), rel=0.03)


def test_only_the_last_call_has_a_graph():
    one = trainer(reward_of())
    calls = Calls.of(one.roles["student"])
    metrics = one.step(0)
    assert calls.graph == [False, False, True]
    reward = one.method.reward
    scores = reward.score(end_of(calls), one.loader.batch(0).prompts)
    assert metrics["reward"] == pytest.approx(float(reward.total(scores.parts).mean()))


def end_of(calls: Calls) -> torch.Tensor:
    """Return x0 = x - sigma v of the last call, with the initial student."""
    batch = trainer(reward_of()).loader.batch(0)
    with torch.no_grad():
        return calls.x_t[-1] - calls.sigma[-1][0].float() * trainable().velocity(
            calls.x_t[-1], calls.sigma[-1], batch.cond
        )


@pytest.mark.slow
def test_any_of_the_last_calls():
    one = trainer(reward_of(), last_calls=2)
    ends = set()
    for step in range(8):
        calls = Calls.of(one.roles["student"])
        one.step(step)
        assert calls.graph == [False] * (len(calls.graph) - 1) + [True]
        ends.add(len(calls.graph))
    assert ends == {2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [SAMPLER, dataclasses.replace(SAMPLER, solver="sde", guidance_scale=2.0)])
def test_the_gradient_does_not_depend_on_the_micro_batch(sampler):
    found = []
    for size in (4, 1):
        one = trainer(reward_of(), sampler, micro_batch=size)
        one.step(0)
        found.append(one.roles["student"].gradients[0])
    assert_near(found[1], found[0], 1e-4)


def test_a_reward_without_gradient_is_refused():
    blind = reward_of(lambda images, prompts: mean_score(images, prompts).detach())
    with pytest.raises(ValueError, match="none of mean_score has a gradient"):
        trainer(blind).step(0)


def test_score_keeps_no_graph():
    """Only score_with_gradient keeps a graph; decoding keeps one if its input needs it."""
    x0 = torch.randn(2, *LATENT_SHAPE).requires_grad_()
    scores = reward_of().score(x0, CAPTIONS[:2])
    assert not scores.parts.requires_grad and not scores.thumbnails.requires_grad
    assert not any(values.requires_grad for values in scores.statistics.values())
    assert not tiny_codec().decode(x0.detach()).requires_grad and tiny_codec().decode(x0).requires_grad
    assert small_batch().latents is None


@pytest.mark.parametrize(
    ("changes", "sampler", "message"),
    [
        ({"last_calls": 4}, SAMPLER, r"algorithm\.last_calls must be at most sampler\.num_steps \(3\), not 4"),
        ({}, dataclasses.replace(SAMPLER, chunks=ChunkConfig(chunk_frames=1)), r"chunk_frames must be 0"),
    ],
)
def test_a_wrong_setting_names_its_key(changes, sampler, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes).check(setup_of(sampler))
