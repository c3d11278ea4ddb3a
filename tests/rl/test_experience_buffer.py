"""The experience buffer: updates on fresh and stored groups, what is stored, and checkpoints of it."""

import dataclasses
import itertools
import sys

import pytest
import torch
from exact_world import CLASSES, SAMPLER
from helpers import (
    ALONE,
    CAPTIONS,
    REPO,
    Calls,
    ScriptedScorer,
    assert_near,
    assert_same,
    dance_grpo,
    setup_of,
    weights,
)
from policy_case import CONFIG, ODE, REWARDS, OlderRollouts
from reward_world import joint

from unified_trainer.checkpoint import dcp
from unified_trainer.methods.dance_grpo import DanceGRPOConfig
from unified_trainer.parallel.random import Streams
from unified_trainer.rl.chunk_credit import CreditConfig
from unified_trainer.rl.experience_buffer import ExperienceBuffer
from unified_trainer.rl.experience_config import ExperienceConfig
from unified_trainer.rl.past_streams import PastStreams, aged
from unified_trainer.rl.sde_windows import WindowConfig

sys.path.insert(0, str(REPO / "scripts"))
from compare_lag import LaggedRollouts

pytestmark = pytest.mark.slow  # seconds together

TWO_STEPS = dataclasses.replace(ODE, num_steps=2)
BOTH = ExperienceConfig(groups=2)  # both groups of the step before
FIRST_EQUAL = (2.0, 2.0, 2.0, 2.0, *REWARDS[4:])


def trainer(experience=ExperienceConfig(), rewards=REWARDS, **changes):  # noqa: B008  (frozen)
    rest = {key: changes.pop(key) for key in ("moves", "captions", "seed", "sampler") if key in changes}
    config = dataclasses.replace(CONFIG, **{"experience": experience} | changes)
    return dance_grpo(config, scorer=ScriptedScorer(rewards), **{"sampler": ODE} | rest)


def stepped(steps: int, one):
    """Return a trainer after some training steps, and the metrics of each."""
    return one, [one.step(step) for step in range(steps)]


def recorded(one) -> list[dict[str, torch.Tensor]]:
    return one.roles["student"].gradients


def mean(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], share: float = 0.5):
    return {key: share * first[key] + (1 - share) * second[key] for key in first}


# The update.


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"update_batch": 3, "best_of_n": 2},
        {"init_same_noise": True, "captions": CAPTIONS[:1], "num_prompts": 1, "prompts_per_update": 1},
        {"prompts_per_update": 1, "update_batch": 4},
    ],
)
def test_an_update_is_the_mean_over_fresh_and_stored_samples(changes):
    """While the student does not move, the gradient is the mean of those of the two steps, and the ratio stays 1."""
    groups = changes.get("prompts_per_update", 2)
    plain, _ = stepped(2, trainer(**changes))
    one, (first, second) = stepped(2, trainer(ExperienceConfig(groups=groups), **changes))
    updates = len(recorded(one)) // 2
    for number in range(updates):
        assert_same(recorded(one)[number], recorded(plain)[number])
        expected = mean(recorded(plain)[number], recorded(plain)[updates + number])
        assert_near(recorded(one)[updates + number], expected, 1e-4)
    assert (first["experience_stored"], first["experience_groups"]) == (0, 0) and "experience_age" not in first
    kept = {"experience_stored": groups * updates, "experience_groups": groups * updates, "experience_age": 1}
    assert {name: second[name] for name in kept} == kept
    assert second["approx_kl/lag_1"] < 1e-10 and second["log_ratio_abs_max"] < 1e-6  # the noise is drawn again


def test_the_states_of_equal_noise_are_those_of_one_training_step():
    """Samples that are made ahead have one version of the weights in steps 0 and 1, and not one initial noise."""
    changes = {"captions": CAPTIONS[:1], "num_prompts": 1, "prompts_per_update": 1, "init_same_noise": True}
    plain, _ = stepped(2, trainer(**changes))
    one = trainer(ExperienceConfig(groups=1), **changes)
    one.step(0)
    one.method.rollouts = OlderRollouts(one.method.rollouts, 1)
    one.step(1)
    assert_near(recorded(one)[1], mean(*recorded(plain)), 1e-4)


def test_one_stored_group_counts_by_its_samples():
    """Eight fresh samples and the four of the only group that was worth storing."""
    plain, _ = stepped(2, trainer(rewards=FIRST_EQUAL + REWARDS))
    one, (_, second) = stepped(2, trainer(ExperienceConfig(groups=1), rewards=FIRST_EQUAL + REWARDS))
    assert_near(recorded(one)[1], mean(*recorded(plain), share=4 / 12), 1e-4)
    assert (second["experience_groups"], second["experience_stored"]) == (1, 1)


def test_an_update_without_a_fresh_advantage_trains_on_stored_groups():
    rewards = REWARDS + (1.0,) * 8
    plain, (_, without) = stepped(2, trainer(rewards=rewards))
    one, (_, second) = stepped(2, trainer(BOTH, rewards=rewards))
    assert without["skipped_updates"] == 1 and second["skipped_updates"] == 0 and not one.messages
    assert_near(recorded(one)[1], recorded(plain)[0], 1e-4)


def test_stored_samples_have_the_lag_of_their_weights():
    """The groups of step 0 have the highest priority and stay; fresh samples are made one step ahead."""
    rewards = tuple(9 * reward for reward in REWARDS) + REWARDS * 3
    one = trainer(ExperienceConfig(groups=2, depth=1), rewards, moves=True, correction="decoupled")
    one.method.rollouts = LaggedRollouts(one.method.rollouts, one.roles["student"], 1)
    _, metrics = stepped(4, one)
    names = [sorted(name for name in row if name.startswith("approx_kl/lag_")) for row in metrics]
    assert names[:2] == [[], ["approx_kl/lag_1"]]  # in step 1 all samples are of the weights of step 0
    assert names[2:] == [["approx_kl/lag_1", f"approx_kl/lag_{lag}"] for lag in (2, 3)]
    assert [row.get("lag", 0) for row in metrics] == [0, 1, 1, 1]  # of the fresh samples
    assert metrics[3]["approx_kl/lag_3"] > metrics[3]["approx_kl/lag_1"] > 0
    assert metrics[3]["experience_age"] == 3 and metrics[3]["importance_weight"] > 0


def test_samples_that_lag_too_far_are_drawn_no_more():
    one, _ = stepped(2, trainer(BOTH, moves=True, ess_floor=1.0, clip_low=1e-6, clip_high=1e-6))
    assert int(one.method.state_dict()["experience/max_age"]) == BOTH.max_age - 1
    assert "samples lag too far" in next(iter(one.messages))


def test_distill_rl_has_stored_groups_in_the_surrogate_alone():
    """With a student that does not move, critic and matching are those of a run without stored groups."""
    found = []
    for groups in (0, CLASSES):
        one = joint(surrogate=1.0, updates=1, rate=0.0)
        parts = (one.method.config, one.loader, SAMPLER.num_steps - 1)
        one.method.experience = ExperienceBuffer(ExperienceConfig(groups=groups), *parts)
        found.append([one.step(step) for step in (0, 1)][1])
    without, metrics = found
    assert metrics["experience_groups"] == CLASSES and metrics["approx_kl/lag_1"] < 1e-10
    for name in ("critic_loss", "critic/grad_norm", "dmd_loss", "gap_mid", "reward"):
        assert metrics[name] == without[name]
    assert metrics["student/grad_norm"] != without["student/grad_norm"]


def test_the_noise_of_a_sample_is_that_of_its_training_step():
    now, past, before = Streams(3, 7), PastStreams(Streams(3, 7)), Streams(3, 5)
    keys, shape = [4, aged(4, 2), 1, aged(0, 2)], (2, 3)
    expected = torch.cat([one.noise("n", [key], shape) for one, key in ((now, 4), (before, 4), (now, 1), (before, 0))])
    assert torch.equal(past.noise("n", keys, shape), expected)


# What is stored.


def test_groups_of_least_priority_are_overwritten_and_old_ones_are_not_drawn():
    """A simulation of one place with room for two groups; rewards 0 and r have the standard deviation r / sqrt 2."""
    spreads = [3.0, 1.0, 0.0, 2.0, 0.5, 0.5, 4.0, 1.0, 0.25, 1.0]
    config = ExperienceConfig(groups=1, depth=2, max_age=3, half_life=2.0, exponent=2.0)
    sizes = {"num_prompts": 1, "num_samples": 2, "prompts_per_update": 1, "sampler": TWO_STEPS}
    one = trainer(config, rewards=list(itertools.chain.from_iterable((0.0, r) for r in spreads)), **sizes)
    stored: list[tuple[int, float] | None] = [None, None]
    for step, spread in enumerate(spreads):

        def present(entry, now=step):
            return 0.0 if entry is None or now - entry[0] > 3 else entry[1] * 0.5 ** ((now - entry[0]) / 2)

        metrics = one.step(step)
        alive = [entry for entry in stored if present(entry)]
        assert metrics["experience_stored"] == len(alive)
        assert metrics["experience_groups"] == min(1, len(alive))
        if alive:
            assert step - metrics["experience_age"] in [made for made, _ in alive]
        at = min(range(2), key=lambda i: present(stored[i]))
        if spread**2 / 2 > present(stored[at]):
            stored[at] = (step, spread**2 / 2)
        state = one.method.state_dict()
        for number, entry in enumerate(stored):
            held = state["experience/priority"][0, 0, number], state["experience/made_in"][0, 0, number]
            assert tuple(map(float, held)) == pytest.approx((0, 0) if entry is None else (entry[1], entry[0]))


def test_a_buffer_that_is_off_stores_nothing():
    one, (metrics,) = stepped(1, trainer())
    assert not [key for key in one.method.state_dict() if "experience" in key]
    assert not [name for name in metrics if "experience" in name]


# Checkpoints.


def test_a_run_continues_from_its_checkpoint_bit_for_bit(tmp_path):
    def new():
        return trainer(ExperienceConfig(groups=1, depth=2), moves=True, sampler=TWO_STEPS, dynamic_sampling_rounds=1)

    straight, metrics = stepped(4, new())
    half, _ = stepped(2, new())
    dcp.save(tmp_path / "checkpoints", 2, half.tensors(), ALONE)
    again = new()
    assert again.resume(tmp_path) == (2, [])
    again.method.update.on_policy.over = True
    again.method.rollouts._reward.scorers["mean_score"] = half.method.rollouts._reward.scorers["mean_score"]
    assert [again.step(step) for step in (2, 3)] == metrics[2:]
    assert_same(again.tensors(), straight.tensors())


def test_groups_whose_prompts_have_changed_are_forgotten():
    one, _ = stepped(1, trainer(BOTH))
    state = {key: value.clone() for key, value in one.method.state_dict().items()}
    changed = list(CAPTIONS)
    first, second = dict.fromkeys(one.loader.batch(0).prompt_ids)
    changed[first] = "another prompt"
    for captions, left in ((CAPTIONS, 2), (tuple(changed), 1), (CAPTIONS[: min(first, second)], 0)):
        other = trainer(BOTH, captions=captions or ("one",))
        for key, value in other.method.state_dict().items():
            value.copy_(state[key])
        other.method.load_state_dict(other.method.state_dict())
        assert int((other.method.state_dict()["experience/priority"] > 0).sum()) == left


# A large update from several parts.


def test_an_update_on_many_prompts_is_the_mean_over_parts_that_are_made_one_after_another():
    """Four prompts in one update have the mean gradient of two updates of two prompts, and no call has more samples."""
    sizes = {"num_prompts": 4, "rollout_batch": 4, "update_batch": 4}
    apart, (of_two,) = stepped(1, trainer(rewards=REWARDS + REWARDS[::-1], **sizes))
    large = trainer(rewards=REWARDS + REWARDS[::-1], **sizes, prompts_per_update=4)
    calls = Calls.of(large.roles["student"])
    metrics = large.step(0)
    assert len(recorded(apart)) == 2 and len(recorded(large)) == 1
    assert_near(recorded(large)[0], mean(*recorded(apart)), 1e-5)
    assert {name: metrics[name] for name in metrics if "reward" in name} == {
        name: of_two[name] for name in of_two if "reward" in name
    }
    assert max(map(len, calls.x_t)) == 4
    assert_same(weights(large.roles["student"].network), weights(trainer().roles["student"].network))


# Wrong settings.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"experience": ExperienceConfig(groups=3)},
            r"experience\.groups \(3\) must divide .*prompts_per_update \(2\)",
        ),
        ({"credit": CreditConfig(per_chunk=True)}, r"experience\.groups must be 0 with algorithm\.credit\.per_chunk"),
        ({"window": WindowConfig(size=2)}, r"experience\.groups must be 0 with a window that moves"),
    ],
)
def test_a_wrong_setting_names_its_key(changes, message):
    config = dataclasses.replace(CONFIG, **{"experience": BOTH} | changes)
    with pytest.raises(ValueError, match=message):
        config.experience.check(config, config, ODE)
    if "credit" not in changes:
        with pytest.raises(ValueError, match=message):
            config.check(setup_of(ODE))


def test_a_window_that_stays_is_no_window_that_moves():
    config = DanceGRPOConfig(experience=ExperienceConfig(groups=2), window=WindowConfig(size=3))
    config.check(setup_of(ODE))
