"""Stored samples of an older policy have the gradient of the present one, by quadrature instead of draws.

A sample has two elements, x_0 -> x_1 -> the end, and x_1 is normal around a mean that the student decides. The stored
samples are the nodes of a Gauss-Hermite rule of the older policy, and each has its weight of the rule in its advantage.
"""

import numpy as np
import pytest
import torch
from exact_world import ClassCodec, role
from helpers import ALONE
from torch import nn

from unified_trainer.data.loader import Loader
from unified_trainer.data.prompts import Prompts
from unified_trainer.methods.dance_grpo import DanceGRPOConfig
from unified_trainer.parallel.random import Streams
from unified_trainer.rl.experience_buffer import ExperienceBuffer
from unified_trainer.rl.experience_config import ExperienceConfig
from unified_trainer.rl.groups import Advantages, AllSamples
from unified_trainer.rl.policy_update import PolicyUpdate
from unified_trainer.rl.rollouts import ScoredSamples
from unified_trainer.roles.reward import Scores
from unified_trainer.roles.role import Trainable, TrainableConfig
from unified_trainer.sampling import SamplerConfig
from unified_trainer.types import Rollout

SHAPE, SAMPLER = (1, 1, 1, 2), SamplerConfig(num_steps=2, guidance_scale=1.0)
STARTS, NODES = 3, 14
OLD, NOW = (0.4, -0.2), (0.7, 0.25)  # slope and offset of the velocity: the mean of x_1 moves by one deviation


class Line(nn.Module):
    """The velocity a x + b."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(2))

    def forward(self, x_t, sigma, label):
        return self.weights[0] * x_t + self.weights[1]


def rule(nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return nodes and weights of the expectation of a standard normal number."""
    x, w = np.polynomial.hermite_e.hermegauss(nodes)
    return torch.tensor(x), torch.tensor(w / w.sum())


def nodes(update: PolicyUpdate, weights: tuple[float, float]) -> tuple[torch.Tensor, ...]:
    """Return x_0, x_1, the weight of the pair and the density of x_1 under the policy with these weights."""
    with torch.no_grad():
        update.student.network.weights.copy_(torch.tensor(weights))
    (starts, of_start), (noise, of_noise) = rule(STARTS), rule(NODES)
    x_0 = starts.repeat_interleave(NODES**2)[:, None].expand(-1, 2).float().view(-1, *SHAPE)
    mean, std = update.policy.step(0, x_0, update.student.network.forward(x_0, None, None).detach())
    x_1 = mean + float(std) * torch.cartesian_prod(noise, noise).repeat(STARTS, 1).float().view(-1, *SHAPE)
    weight = (of_start[:, None, None] * of_noise[:, None] * of_noise).flatten()
    return x_0, x_1, weight, update.policy.log_prob(x_1, mean, std)


def advantage(x_1: torch.Tensor) -> torch.Tensor:
    a, b = x_1.flatten(1).double().unbind(1)
    return a.square() + a * b - 0.3 * a


def samples_of(loader: Loader, x_0: torch.Tensor, x_1: torch.Tensor, log_prob: torch.Tensor, step: int):
    rollout = Rollout(torch.stack([x_0, x_1], 1), log_prob[:, None], x_1, x_1[:, None][:, :0])
    none = torch.zeros(len(x_1), 0)
    made = torch.full((len(x_1),), step)
    return ScoredSamples(loader.batch(step), rollout, Scores(none, {}, none), made)


def advantages_of(values: torch.Tensor, *, useful: bool) -> Advantages:
    filtered = torch.full_like(values, float(useful)).bool()
    of_all = AllSamples(torch.zeros(len(values), dtype=torch.int64), values, values, filtered)
    return Advantages(values.float(), [[]], {"skipped_updates": 1.0}, (), of_all)


def gradients(correction: str, density: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of an update on stored samples alone, and that of exact samples of the present policy."""
    count = STARTS * NODES**2
    config = DanceGRPOConfig(
        num_prompts=1,
        num_samples=count,
        prompts_per_update=1,
        update_batch=count,
        objective="none",
        correction=correction,
        weight_density=density,
        weight_max=1e9,
        experience=ExperienceConfig(groups=1),
    )
    student = role(Trainable, "student", Line(), TrainableConfig())
    update = PolicyUpdate(config, SAMPLER, student, None, count)
    loader = Loader(Prompts(("class 0",)), ClassCodec(), config.plan(), SHAPE, "", 0, ALONE)
    buffer = ExperienceBuffer(config.experience, config, loader, 1)

    x_0, x_1, weight, log_prob = nodes(update, OLD)
    stored = advantages_of(count * weight * advantage(x_1), useful=True)
    buffer.mix(samples_of(loader, x_0, x_1, log_prob, 0), stored, 0, Streams(0, 0))

    x_0, x_1, weight, log_prob = nodes(update, NOW)
    fresh = advantages_of(weight, useful=False)
    mixed = buffer.mix(samples_of(loader, x_0, x_1, log_prob, 1), fresh, 1, Streams(0, 1))
    ((minibatch,),) = updates = mixed.advantages.minibatches
    trajectories = update.trajectories(mixed.samples, 1, range(1), mixed.rng)
    start_update = update.begin(trajectories, mixed.advantages.values[:, None], [0], updates, ALONE)
    (found,) = torch.autograd.grad(start_update([minibatch])(minibatch, 0, True).value, [student.network.weights])

    mean, std = update.policy.step(0, x_0, student.network.forward(x_0, None, None))
    density = update.policy.log_prob(x_1, mean, std)
    (expected,) = torch.autograd.grad(-(weight * advantage(x_1) * density).sum(), [student.network.weights])
    return found, expected


@pytest.mark.parametrize("correction", ["decoupled", "truncated"])
def test_the_expected_gradient_of_stored_samples_is_that_of_the_present_policy(correction):
    """Without a clip and with the joint density, the weights of whole samples."""
    found, expected = gradients(correction, "joint")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_without_weights_of_whole_samples_it_is_another_one():
    for correction in ("none", "truncated"):
        found, expected = gradients(correction, "mean")
        assert float((found / expected - 1).abs().max()) > 0.05
