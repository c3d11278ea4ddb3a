"""distill_rl: each term alone has the losses of the method it comes from, and what holds for their sum."""

import dataclasses
import functools
import re

import pytest
import torch
from helpers import (
    ALONE,
    CAPTIONS,
    FEW_STEPS,
    LATENT_SHAPE,
    Calls,
    Recording,
    RecordingCritic,
    ScriptedScorer,
    assert_near,
    dance_grpo,
    dmd2,
    mean_score,
    reward_of,
    reward_parts,
    setup_of,
    small_model,
    tiny_codec,
)

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Request
from unified_trainer.data.loader import Loader
from unified_trainer.data.prompts import Prompts
from unified_trainer.methods.dance_grpo import DanceGRPOConfig
from unified_trainer.methods.distill_rl import DistillRL
from unified_trainer.methods.distill_rl_settings import (
    DistillRLConfig,
    GradientTermConfig,
    MatchingTermConfig,
    TermConfig,
    TiltConfig,
)
from unified_trainer.methods.dmd2 import DMD2Config
from unified_trainer.methods.reward_gradient import RewardGradient, RewardGradientConfig
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.parallel.random import Streams
from unified_trainer.rewards.reward import RewardSum
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.role import Frozen, RoleConfig, TrainableConfig
from unified_trainer.run.trainer import Trainer

GROUPS = {"num_prompts": 2, "num_samples": 2, "prompts_per_update": 2, "rollout_batch": 4, "update_batch": 4}
POLICY = {"timestep_fraction": 1.0, "clip_low": 1e-3, "clip_high": 1e-3}
NONE, ONE = {"weight": 0.0}, {"weight": 1.0}
LAST = FEW_STEPS.num_steps - 1


def config(*, matching=NONE, surrogate=NONE, gradient=NONE, **changes) -> DistillRLConfig:
    terms = {
        "matching": MatchingTermConfig(**{"guidance_scale": 2.0} | matching),
        "surrogate": TermConfig(**surrogate),
        "reward_gradient": GradientTermConfig(**gradient),
    }
    return DistillRLConfig(**GROUPS | POLICY | terms | changes)


def trainer(
    scorer=mean_score, *, sampler=FEW_STEPS, moves=False, student=None, shape=LATENT_SHAPE, mesh=ALONE, **changes
) -> Trainer:
    """A trainer of three small networks, those of `helpers.dmd2`; student and critic record."""
    settings, adam = config(**changes), TrainableConfig(max_grad_norm=0.0)
    student = student or Recording("student", Backbone(small_model(), mesh, trained=True), adam, moves=moves)
    critic = RecordingCritic("critic", Backbone(small_model(2), mesh, trained=True), adam, moves=moves)
    loader = Loader(Prompts(Request.of(CAPTIONS)), tiny_codec(), settings.plan(), shape, "", 0, mesh)
    parts = reward_parts(DistillRL, settings, sampler, student, reward_of(scorer), loader)
    teacher = Frozen("teacher", Backbone(small_model(1), mesh), RoleConfig())
    if settings.kl_coefficient:
        parts["reference"] = Frozen("reference", Backbone(small_model(), mesh), RoleConfig())
    method = DistillRL(settings, sampler, student=student, teacher=teacher, critic=critic, **parts)
    return Trainer(method, {"student": student, "critic": critic}, loader, mesh, seed=0)


class SameNoise(Streams):
    """Streams in which the rollouts of all methods draw the noise of equal transitions under equal names."""

    def noise(self, name, keys, shape):
        name = re.sub(r"^(student|transition) (noise|initial)$", "initial", name)
        return super().noise(re.sub(r"^student (\d)$", r"transition \1", name), keys, shape)


def losses(one: Trainer, step: int, batch=None) -> dict[str, list]:
    """Return the losses of a training step by role, and leave their gradients in the roles."""
    found = {"student": [], "critic": []}
    for loss in one.method.step(batch or one.loader.batch(step), step, SameNoise(0, step), ALONE):
        if loss.value.requires_grad:
            loss.value.backward()
        found[loss.role].append(loss)
    return found


def gradients(role) -> dict[str, torch.Tensor]:
    return {key: p.grad.clone() for key, p in role.weights.items() if p.grad is not None}


def assert_equal_gradients(one, other) -> None:
    found, expected = gradients(one), gradients(other)
    assert found.keys() == expected.keys() and any(bool(value.any()) for value in found.values())
    for key, value in found.items():
        assert torch.equal(value, expected[key]), key


# One term alone.


@pytest.mark.slow
def test_the_surrogate_alone_is_dance_grpo_bit_for_bit():
    """Two steps of two updates each, the weights moving: losses, gradients and metrics."""
    changes = {"prompts_per_update": 1, "init_same_noise": True}
    one = trainer(surrogate=ONE, moves=True, **changes)
    settings = DanceGRPOConfig(**GROUPS | POLICY | changes)
    other = dance_grpo(settings, sampler=FEW_STEPS, moves=True)
    for step in range(2):
        assert one.step(step) == other.step(step)
    pairs = list(zip(one.roles["student"].gradients, other.roles["student"].gradients, strict=True))
    assert len(pairs) == 4 and one.roles["critic"].gradients == []
    for found, expected in pairs:
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def step_with_exit(call: int) -> int:
    """Return a training step whose first exit in dmd2 is this call."""
    return next(step for step in range(99) if int(Streams(0, step).shared.integers(LAST + 1)) == call)


def test_matching_alone_is_dmd2_at_the_last_exit_bit_for_bit():
    one, step = trainer(matching=ONE), step_with_exit(LAST)
    other = dmd2(DMD2Config(batch_size=4, micro_batch=4, guidance_scale=2.0, student_every=1, critic_samples="shared"))
    batch = one.loader.batch(step)
    found, expected = losses(one, step, batch), losses(other, step, batch)
    for role in ("student", "critic"):
        (own,), (theirs,) = found[role], expected[role]
        assert torch.equal(own.value, theirs.value) and own.step_after
        assert all(torch.equal(own.metrics[key], value) for key, value in theirs.metrics.items())
        assert_equal_gradients(one.roles[role], other.roles[role])


def test_the_reward_gradient_alone_is_that_of_the_method_bit_for_bit():
    one, settings = trainer(gradient=ONE), RewardGradientConfig(batch_size=4, micro_batch=4)
    student = Recording("student", Backbone(small_model(), ALONE, trained=True), TrainableConfig())
    method = RewardGradient(settings, FEW_STEPS, student=student, reward=reward_of(), loader=None)
    batch = one.loader.batch(0)
    (found,) = losses(one, 0, batch)["student"]
    (expected,) = method.step(batch, 0, SameNoise(0, 0), ALONE)
    expected.value.backward()
    assert torch.equal(found.value, expected.value)
    assert_equal_gradients(one.roles["student"], student)


# All terms together.

ALL = {"matching": {"weight": 0.5}, "surrogate": {"weight": 2.0}, "gradient": {"weight": 0.1}}
TILT = TiltConfig(beta=0.02)


@pytest.mark.slow
def test_the_gradient_is_the_weighted_sum_of_the_terms():
    total = trainer(**ALL)
    losses(total, 0)
    parts = []
    for name, term in ALL.items():
        one = trainer(**{name: ONE})
        losses(one, 0)
        parts.append((term["weight"], gradients(one.roles["student"])))
    for key, value in gradients(total.roles["student"]).items():
        expected = sum(weight * part[key] for weight, part in parts)
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(("update_batch", "rollout_batch"), [(1, 4), (2, 2)])
def test_the_gradient_does_not_depend_on_the_passes(update_batch, rollout_batch):
    whole, parts = (
        trainer(**ALL, tilt=TILT, critic_updates=2, update_batch=a, rollout_batch=b, clip_low=0.01, clip_high=0.01)
        for a, b in ((4, 4), (update_batch, rollout_batch))
    )
    metrics = [one.step(0) for one in (whole, parts)]
    for name in ("student", "critic"):
        for found, expected in zip(parts.roles[name].gradients, whole.roles[name].gradients, strict=True):
            assert_near(found, expected)
    assert metrics[1]["dmd_loss"] == pytest.approx(metrics[0]["dmd_loss"], rel=1e-4)


def test_the_critic_learns_the_rollouts_samples_before_the_student_moves():
    one = trainer(**ALL, moves=True)
    critic = Calls.of(one.roles["critic"])
    order = []
    for name, role in one.roles.items():
        role.step = functools.partial(lambda name, step: (order.append(name), step())[1], name, role.step)
    watched = []
    made = one.method.rollouts.samples
    one.method.rollouts.samples = lambda *given: watched.append(made(*given)) or watched[-1]
    one.step(0)
    assert order == ["critic", "student"]
    sigma = critic.sigma[0].float().view(-1, 1, 1, 1, 1)
    noise = Streams(0, 0).noise("critic tau noise", one.loader.batch(0).sample_ids, LATENT_SHAPE)
    torch.testing.assert_close(critic.x_t[0], (1 - sigma) * watched[0].rollout.x0 + sigma * noise)


def test_every_critic_update_of_a_step_draws_its_own_levels_and_noise():
    one = trainer(matching=ONE, critic_updates=3)
    calls = Calls.of(one.roles["critic"])
    found = losses(one, 0)
    assert [loss.step_after for loss in found["critic"]] == [True] * 3
    assert len({tuple(sigma.tolist()) for sigma in calls.sigma[:3]}) == 3


def test_the_tilt_weighs_the_critics_errors_away_from_the_reward():
    """w = exp(-(R - mean of the other samples) / beta), divided by its mean."""
    rewards = (0.0, 1.0, -0.5, 0.5)
    tilted, plain = (trainer(ScriptedScorer(rewards), matching=ONE, tilt=TiltConfig(beta=b)) for b in (0.5, 0.0))
    batch = tilted.loader.batch(0)
    assert batch.prompt_ids[0] == batch.prompt_ids[1] != batch.prompt_ids[2]
    found, errors = losses(tilted, 0)["critic"][0], losses(plain, 0)["critic"][0].metrics["critic_loss"]
    weights = torch.tensor([2.0, -2.0, 2.0, -2.0]).exp()
    weights = weights / weights.mean()
    torch.testing.assert_close(found.value, (weights * errors).mean())
    assert float(found.metrics["tilt_ess"]) == pytest.approx(float(1 / weights.square().mean()))


def test_the_share_of_cut_weights_is_a_metric():
    tilt = TiltConfig(beta=0.5, max_weight=2.0)
    one = trainer(ScriptedScorer((0.0, 1.0, -0.5, -0.5)), matching=ONE, tilt=tilt)  # exponents 2, -2, 0, 0
    assert one.step(0)["tilt_capped"] == 0.25


@pytest.mark.slow
def test_the_hinge_ends_at_the_margin():
    """-mean R below the margin, and no gradient from samples above it."""
    plain = trainer(gradient=ONE)
    rewards = plain.method.rollouts.samples(plain.loader.batch(0), 0, Streams(0, 0)).scores.parts[:, 0]
    margin = float(rewards.sort().values[1:3].mean())
    one = trainer(gradient=ONE | {"margin": margin})
    (loss,) = losses(one, 0)["student"]
    torch.testing.assert_close(loss.value, (margin - rewards).relu().mean())
    reached = trainer(gradient=ONE | {"margin": float(rewards.min()) - 1})
    losses(reached, 0)
    assert not any(bool(value.any()) for value in gradients(reached.roles["student"]).values())


@pytest.mark.slow
def test_terms_begin_at_their_steps_and_rise():
    term = TermConfig(weight=2.0, first_step=3, ramp_steps=3)
    assert [term.weight_at(step) for step in range(8)] == [0, 0, 0, 0.5, 1.0, 1.5, 2.0, 2.0]
    assert [TermConfig(weight=0.3, first_step=1).weight_at(step) for step in range(3)] == [0, 0.3, 0.3]
    one = trainer(matching=ONE, surrogate=ONE | {"first_step": 1}, gradient=ONE | {"first_step": 2})
    assert [len(losses(one, step)["student"]) for step in range(2)] == [1, LAST + 1]
    assert "reward_gradient_loss" not in one.step(1) and "reward_gradient_loss" in one.step(2)


def test_before_its_terms_begin_the_student_rests_while_the_critic_learns():
    one = trainer(matching=ONE | {"first_step": 1}, moves=True)
    metrics = one.step(0)
    assert one.roles["student"].gradients == [] and len(one.roles["critic"].gradients) == 1
    assert {"reward", "critic_loss"} <= metrics.keys() and "dmd_loss" not in metrics


def test_matching_takes_all_samples_where_the_surrogate_drops_equal_groups():
    """The first update has no advantage and still moves the student; the replay of the second then differs."""
    scorer = ScriptedScorer((1.0, 1.0, 0.0, 2.0))
    one = trainer(scorer, matching=ONE, surrogate=ONE, prompts_per_update=1, update_batch=2, moves=True)
    calls = Calls.of(one.roles["student"])
    metrics = one.step(0)
    assert len(one.roles["student"].gradients) == 2 and metrics["frac_zero_std_groups"] == 0.5
    assert sum(calls.graph) == 1 + LAST + 1  # matching; three transitions and matching


@pytest.mark.slow
def test_a_causal_student_is_matched_and_rewarded_on_its_own_rollout():
    from test_self_forcing import causal_student

    sampler = dataclasses.replace(FEW_STEPS, chunks=ChunkConfig(chunk_frames=2, independent_first_frame=True))
    one = trainer(**ALL, sampler=sampler, student=causal_student(), shape=(16, 5, 2, 2), tilt=TILT)
    batch = one.loader.batch(0)
    rollout = one.method.rollouts.samples(batch, 0, Streams(0, 0)).rollout
    metrics = one.step(0)
    x_t = rollout.states[:, LAST]
    assert 0 <= metrics["log_ratio_abs_max"] < 1e-5
    assert metrics["reward_gradient_loss"] == pytest.approx(-metrics["reward"], abs=1e-5)  # the replay is the rollout
    assert x_t.shape == rollout.x0.shape and metrics["dmd_loss"] > 0
    assert any(bool(value.any()) for value in one.roles["student"].gradients[0].values())


# Refusals.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "without a term"),
        ({"surrogate": ONE, "tilt": TILT}, r"tilt\.beta needs algorithm\.matching\.weight"),
        ({"matching": {"tau_range": (0.5, 0.2)}}, r"algorithm\.matching\.tau_range"),
        ({"matching": ONE, "kernel": "dance"}, r"algorithm\.kernel auto"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        config(**changes).check(setup_of(FEW_STEPS))


@pytest.mark.parametrize("changes", [ALL, {"matching": ONE, "tilt": TILT}])
def test_other_settings_pass(changes):
    config(**changes).check(setup_of(FEW_STEPS))


def test_a_sampler_without_renoising_is_refused():
    with pytest.raises(UserError, match=r"sampler\.solver must be sde"):
        config(**ALL).check(setup_of(dataclasses.replace(FEW_STEPS, solver="ode")))


def test_the_reward_gradient_needs_the_scorers_in_this_process():
    one = trainer(**ALL)
    method = one.method
    roles = {"student": method.student, "teacher": method.matching.teacher, "critic": method.matching.critic}
    parts = {"loader": one.loader, "rollouts": method.rollouts, "reward": RewardSum(method.reward.config)}
    with pytest.raises(UserError, match=r"rollouts\.workers 0"):
        DistillRL(method.config, FEW_STEPS, **roles, **parts)
