"""PPO in a world with a known value function: a linear policy, and a reward that is linear in x0.

The student's velocity is W x + b, so every transition is Gaussian with a linear mean. The steps are linear too, so the
value of a state is the reward at the end of the means from there on, and the gradient of the expected reward is that of
the reward at the end of the means from the start. The last step has no density: its velocity is part of the reward.
Gradients are compared over independent training steps, with their standard errors.
"""

import functools

import pytest
import torch
from exact_world import PROMPTS, SHAPE, SIZE, ClassCodec, Model
from helpers import ALONE
from torch import nn

from unified_trainer.basics.requests import Request
from unified_trainer.data.loader import Loader
from unified_trainer.data.prompts import Prompts
from unified_trainer.methods.dance_ppo import DancePPO, DancePPOConfig
from unified_trainer.methods.rl.rollouts import ScoredSamples
from unified_trainer.numerics.flow import x0_from_velocity
from unified_trainer.parallel.random import Streams
from unified_trainer.rewards.reward import RewardConfig, RewardSum, Scores
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.role import Trainable, TrainableConfig
from unified_trainer.roles.value import Value
from unified_trainer.sampling.solver import SamplerConfig

pytestmark = pytest.mark.slow

SAMPLES, STEPS = 192, 24  # of one training step, and training steps
SAMPLER = SamplerConfig(num_steps=4, shift=3.0, guidance_scale=1.0)
DIRECTION = torch.linspace(-1, 2, SIZE)  # the reward is its product with x0
PLAIN = DancePPOConfig(
    num_prompts=SAMPLES,
    prompts_per_update=SAMPLES,
    rollout_batch=SAMPLES,
    update_batch=SAMPLES,
    eta=0.6,
    timestep_fraction=1.0,
    clip_low=1.0,
    clip_high=1e9,  # no clip
    normalise_advantages=False,
    advantage_clip=1e9,
    value_clip=0.0,
)
POLICY = PLAIN.policy(SAMPLER)
LAST = SAMPLER.num_steps - 1


class Linear(nn.Module):
    """v = W x + b, at all noise levels and for all prompts."""

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(1)
        self.linear = nn.Linear(SIZE, SIZE)
        self.linear.weight.data = 0.5 * torch.eye(SIZE) + 0.1 * torch.randn(SIZE, SIZE, generator=random)
        self.linear.bias.data = 0.3 * torch.randn(SIZE, generator=random) + shift

    def forward(self, x_t, sigma, label):
        return self.linear(x_t.flatten(1)).view_as(x_t)


class Features(nn.Module):
    """As features, one block of (x, 1) for each noise level: the value function is linear in them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity(), nn.Identity()])

    def forward(self, x_t, sigma, label):
        own = (sigma[:, None] == POLICY.sigmas[:LAST].float()).float()
        ones = torch.cat([x_t.flatten(1), torch.ones(len(x_t), 1)], 1)
        self.layers[1]((own[:, :, None] * ones[:, None]).flatten(1))
        return x_t


class LinearModel(Model):
    feature_size = LAST * (SIZE + 1)


def end_of_means(network: nn.Module, x: torch.Tensor, start: int) -> torch.Tensor:
    """Return the reward at the end of the transitions' means from state `start`; no gradient of the last step."""
    for s in range(start, LAST):
        x = POLICY.step(s, x, network(x, None, None))[0]
    velocity = nn.functional.linear(x.flatten(1), network.linear.weight.detach(), network.linear.bias.detach())
    return x0_from_velocity(x, velocity.view_as(x), POLICY.sigmas[LAST]).flatten(1).double() @ DIRECTION.double()


class KnownValue(Value):
    """A value function of the test's own."""

    def __init__(self, of) -> None:
        self.of = of

    def value(self, x_t, sigma, cond):
        s = POLICY.sigmas.tolist().index(float(sigma[0]))
        return self.of(x_t, s)


class LinearReward:
    """Rollouts of a role, scored after the last step of the linear student; `age` is the lag of their weights."""

    uniform, check = True, None

    def __init__(self, role, config, age: int = 0) -> None:
        self.role, self.config, self.age = role, config, age

    def samples(self, batch, step, rng):
        rollout = DancePPO.sample(self.config, SAMPLER, self.role, batch, step, rng.restarted())
        parts = true_value(rollout.states[:, -1], LAST)[:, None]
        versions = torch.full((len(batch),), step - self.age)
        scores = Scores(parts, {}, torch.zeros(len(batch), 1))
        return ScoredSamples(batch, rollout, scores, versions)

    def metrics(self):
        return {}

    def lower_ahead(self):
        """Do nothing: the lag is given."""


def role_of(network: nn.Module) -> Trainable:
    return Trainable("student", Backbone(Model(network), ALONE, trained=True), TrainableConfig())


def ppo(value: Value, config: DancePPOConfig = PLAIN, *, older: nn.Module | None = None, seed: int = 0) -> DancePPO:
    """PPO of the linear student, whose rewards keep their unit; another network may have made the samples."""
    student = role_of(Linear())
    rollouts = LinearReward(role_of(older) if older else student, config, age=1 if older else 0)
    loader = Loader(Prompts(Request.of(PROMPTS)), ClassCodec(), config.plan(), SHAPE, "", seed, ALONE)
    reward = RewardSum(RewardConfig(kind="linear"))
    method = DancePPO(config, SAMPLER, student=student, value=value, reward=reward, loader=loader, rollouts=rollouts)
    method.load_state_dict({"reward_scale": torch.tensor([0.0, 1.0])})
    return method


def gradients(method: DancePPO) -> torch.Tensor:
    """Return the student's gradient of each training step, flattened: [steps, weights]."""
    network, rows = method.update.student.network, []
    for step in range(STEPS):
        for loss in method.step(method.loader.batch(step), step, Streams(0, step), ALONE):
            if loss.role == "student":
                loss.value.backward()
        rows.append(torch.cat([p.grad.flatten() for p in network.parameters()]).double())
        network.zero_grad()
    return torch.stack(rows)


def off_by(rows: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return how far the mean of the rows is from the expected values, in standard errors."""
    return (rows.mean(0) - expected).abs() / (rows.std(0) / len(rows) ** 0.5)


@functools.cache
def expected_gradient() -> torch.Tensor:
    """Return the gradient of -E[reward] / (D transitions): log-densities are means over elements and transitions."""
    network = Linear()
    loss = -end_of_means(network, torch.zeros(1, *SHAPE), 0).mean() / (SIZE * LAST)
    return torch.cat([p.flatten() for p in torch.autograd.grad(loss, list(network.parameters()))]).double()


def true_value(x_t: torch.Tensor, s: int) -> torch.Tensor:
    with torch.no_grad():
        return end_of_means(Linear(), x_t, s)


@functools.cache
def with_true_value(gae_lambda: float) -> torch.Tensor:
    return gradients(ppo(KnownValue(true_value), with_lambda(gae_lambda)))


def with_lambda(gae_lambda: float, **changes) -> DancePPOConfig:
    return DancePPOConfig(**vars(PLAIN) | {"gae_lambda": gae_lambda} | changes)


WORST = 4.5  # standard errors: of 72 weights, one is beyond with a probability of 1 in 100 (t with 23 degrees: 4.1)


@pytest.mark.parametrize("gae_lambda", [1.0, 0.5, 0.0])
def test_with_the_true_values_the_gradient_is_that_of_the_expected_reward(gae_lambda):
    assert float(off_by(with_true_value(gae_lambda), expected_gradient()).max()) < WORST


def test_any_baseline_leaves_the_gradient_of_lambda_1_and_no_other():
    """Values that are wrong by a function of the state: unbiased at lambda 1, and seen to be biased at lambda 0."""

    def wrong(x_t, s):
        return true_value(x_t, s) + 2 * s * x_t.flatten(1).sum(1)

    found = gradients(ppo(KnownValue(wrong)))
    assert float(off_by(found, expected_gradient()).max()) < WORST
    biased = gradients(ppo(KnownValue(wrong), with_lambda(0.0)))
    assert float(off_by(biased, expected_gradient()).max()) > 1.5 * WORST


def test_values_lower_the_variance_and_lambda_0_lowers_it_further():
    """A smaller lambda leaves out the noise of later transitions."""
    without = gradients(ppo(KnownValue(lambda x_t, s: torch.zeros(len(x_t)))))
    assert float(off_by(without, expected_gradient()).max()) < WORST
    spreads = [rows.var(0).sum() for rows in (without, with_true_value(1.0), with_true_value(0.0))]
    assert spreads[1] < 0.5 * spreads[0] and spreads[2] < 0.8 * spreads[1]


def value_on_features(scale: float) -> Value:
    """A value function whose head holds the true values times a scale."""
    role = Value("value", Backbone(LinearModel(Features()), ALONE, trained=True), TrainableConfig())
    basis, zero = torch.eye(SIZE).view(SIZE, *SHAPE), torch.zeros(1, *SHAPE)
    for s in range(LAST):
        offset = true_value(zero, s)
        weights = torch.cat([true_value(basis, s) - offset, offset])
        role._heads[""].weight.data[0, s * (SIZE + 1) : (s + 1) * (SIZE + 1)] = scale * weights
    return role


def value_gradients(value: Value) -> torch.Tensor:
    """Return the gradient of the value loss of each training step."""
    method, rows = ppo(value), []
    for step in range(STEPS):
        for loss in method.step(method.loader.batch(step), step, Streams(0, step), ALONE):
            if loss.role == "value":
                loss.value.backward()
        rows.append(value._heads[""].weight.grad[0].clone().double())
        value._heads[""].weight.grad = None
    return torch.stack(rows)


def test_the_value_loss_is_least_at_the_true_values():
    """Its expected gradient is zero there, and at values that are too small it points to them."""
    value = value_on_features(1.0)
    x_t = torch.randn(5, *SHAPE)
    for s in range(LAST):
        got = value.value(x_t, POLICY.sigmas[s].expand(5), ClassCodec().encode_text(["class 0"] * 5))
        torch.testing.assert_close(got.double(), true_value(x_t, s), rtol=1e-4, atol=1e-4)
    assert float(off_by(value_gradients(value), torch.zeros(1)).max()) < WORST
    found = value_gradients(value_on_features(0.5))
    assert float(off_by(found, torch.zeros(1)).max()) > 3 * WORST
    assert float(found.mean(0) @ value._heads[""].weight[0].detach().double()) < 0


def targets_of(config: DancePPOConfig, values, shift: float) -> torch.Tensor:
    """Return the value targets of the first states minus their true values, for samples of another policy."""
    method, rows = ppo(KnownValue(values), config, older=Linear(shift)), []
    compare = method._compare

    def watched(trajectories, returns, values, mesh):
        targets, advantages = compare(trajectories, returns, values, mesh)
        rows.append(targets[:, 0] - true_value(trajectories.rollout.states[:, 0], 0))
        return targets, advantages

    method._compare = watched
    for step in range(STEPS):
        next(method.step(method.loader.batch(step), step, Streams(0, step), ALONE))
    return torch.cat(rows)[:, None]


def test_targets_of_an_older_policy_are_corrected():
    """Without truncation the target of every state is its value under the present policy, whatever the values are.

    The ratio of densities averaged over elements corrects a part only, and none at all is further off.
    """

    def nothing(x_t, s):
        return torch.zeros(len(x_t))

    bars = {"correction": "vtrace", "rho_bar": 1e9, "c_bar": 1e9}
    exact = targets_of(with_lambda(1.0, weight_density="joint", **bars), nothing, shift=0.1)
    part = targets_of(with_lambda(1.0, weight_density="mean", **bars), nothing, shift=0.1)
    assert float(off_by(exact, torch.zeros(1))) < 3
    assert float(off_by(part, torch.zeros(1))) > WORST
    truncated = targets_of(with_lambda(1.0, correction="vtrace", weight_density="joint"), true_value, shift=0.1)
    assert truncated.std() < exact.std()
    uncorrected = targets_of(with_lambda(1.0), nothing, shift=0.1)
    assert float(off_by(uncorrected, torch.zeros(1))) > float(off_by(part, torch.zeros(1)))


def first_metrics(method: DancePPO, step: int) -> dict[str, float]:
    return next(method.step(method.loader.batch(step), step, Streams(0, step), ALONE)).metrics


def test_the_lag_is_reported():
    metrics = first_metrics(ppo(KnownValue(true_value), older=Linear(0.1)), 3)
    assert metrics["lag"] == metrics["lag_max"] == 1
    assert "lag" not in first_metrics(ppo(KnownValue(true_value)), 3)


def test_explained_variance_is_that_of_the_closed_form():
    """It rises from state to state, and is above 0 at pure noise, from which most of a sample follows."""
    method = ppo(KnownValue(true_value))
    metrics = first_metrics(method, 0)
    rollout = method.rollouts.samples(method.loader.batch(0), 0, Streams(0, 0)).rollout
    rewards = true_value(rollout.states[:, -1], LAST)
    for s in range(LAST):
        left = (rewards - true_value(rollout.states[:, s], s)).var(correction=0) / rewards.var(correction=0)
        assert metrics[f"explained_variance/{s}"] == pytest.approx(1 - float(left), abs=1e-4)
    assert metrics["explained_variance/0"] < metrics["explained_variance/1"] < metrics["explained_variance/2"]
    assert metrics["value_mean"] == pytest.approx(
        float(torch.stack([true_value(rollout.states[:, s], s) for s in range(LAST)]).mean()), abs=1e-4
    )
