"""A rollout in CPU memory trains as one on the device does, and its samples are joined and selected as they are."""

import dataclasses

import pytest
import test_diffusion_nft
import test_distill_rl
import torch
from helpers import FEW_STEPS, StubbornScorer, assert_same, dance_grpo, dance_ppo, frozen

from unified_trainer.basics.types import Rollout
from unified_trainer.methods.dance_grpo import DanceGRPOConfig
from unified_trainer.methods.dance_ppo import DancePPOConfig
from unified_trainer.methods.rl.kept_rollout import HostRollout, RolloutParts, join
from unified_trainer.numerics.chunks import ChunkConfig

GROUPS = {"num_prompts": 2, "num_samples": 2, "prompts_per_update": 1, "rollout_batch": 3, "update_batch": 1}
WIDE = {"clip_low": 0.5, "clip_high": 0.5}
CAUSAL = dataclasses.replace(FEW_STEPS, chunks=ChunkConfig(chunk_frames=2, independent_first_frame=True))


def grpo(place: str):
    """With a KL in the reward, which reads all states, and groups that are replaced."""
    changes = {"dynamic_sampling_rounds": 1, "kl_coefficient": 0.1, "kl_in": "reward", "trajectories": place}
    scorer = StubbornScorer(("a blue square moving up", "a red circle moving left"))
    return dance_grpo(
        DanceGRPOConfig(**GROUPS | WIDE | changes), scorer=scorer, reference=frozen("reference", seed=3), moves=True
    )


def ppo(place: str):
    return dance_ppo(
        DancePPOConfig(num_prompts=4, prompts_per_update=2, rollout_batch=3, trajectories=place, **WIDE), moves=True
    )


def nft(place: str):
    return test_diffusion_nft.trainer(rollout_batch=3, update_batch=2, trajectories=place, moves=True)


def distilled(place: str):
    return test_distill_rl.trainer(matching={"weight": 1.0}, trajectories=place, moves=True, **GROUPS | WIDE)


def rewarded(place: str):
    """The states of the policy are replayed, by a causal student that attends to its own x0."""
    from test_self_forcing import causal_student

    how = {"sampler": CAUSAL, "student": causal_student(), "shape": (16, 5, 2, 2)}
    terms = {"surrogate": {"weight": 1.0}, "matching": {"weight": 0.1}}
    return test_distill_rl.trainer(**terms, trajectories=place, **how | GROUPS | WIDE)


@pytest.mark.slow
@pytest.mark.parametrize("maker", [grpo, ppo, nft, distilled, rewarded])
def test_training_is_the_same_bit_for_bit_wherever_the_rollout_is_kept(maker):
    here, there = maker("device"), maker("cpu")
    for step in range(2):
        assert there.step(step) == here.step(step)
    for name, role in here.roles.items():
        assert role.gradients
        for found, expected in zip(there.roles[name].gradients, role.gradients, strict=True):
            assert_same(found, expected)


def drawn(samples: int, seed: int = 0) -> Rollout:
    random = torch.Generator().manual_seed(seed)
    states = torch.randn(samples, 4, 2, 1, 2, 2, generator=random)
    log_probs = torch.randn(samples, 3, dtype=torch.float64, generator=random)
    return Rollout(states, log_probs, torch.randn(samples, 2, 1, 2, 2, generator=random))


def assert_equal(found: HostRollout, expected: Rollout) -> None:
    rows = [*reversed(range(len(expected.x0))), 0, 0]
    assert torch.equal(found.log_probs, expected.log_probs) and torch.equal(found.end(rows), expected.end(rows))
    for number in range(4):
        assert torch.equal(found.state(number, rows), expected.states[rows, number])


def test_samples_in_cpu_memory_are_joined_and_selected_without_a_copy():
    first, second = drawn(3), drawn(2, 1)
    kept = [HostRollout.of(one, torch.device("cpu")) for one in (first, second)]
    assert_equal(kept[0], first)
    both, order = join(kept), [4, 0, 3, 0]
    assert_equal(both, Rollout.cat([first, second]))
    assert_equal(both.take(order), Rollout.cat([first, second]).take(order))
    assert both.take(order).states[1].data_ptr() == kept[0].states[0].data_ptr()


@pytest.mark.parametrize("place", ["device", "cpu"])
def test_parts_are_joined_in_their_order(place):
    made = [drawn(size, size) for size in (3, 3, 1)]
    parts = RolloutParts(place, 7)
    for one in made:
        parts.add(one)
    if place == "cpu":
        assert_equal(parts.joined(), Rollout.cat(made))
    else:
        for field in dataclasses.fields(Rollout):
            expected = torch.cat([getattr(one, field.name) for one in made])
            assert torch.equal(getattr(parts.joined(), field.name), expected)


def test_a_single_part_on_the_device_is_not_copied():
    parts, made = RolloutParts("device", 3), drawn(3)
    parts.add(made)
    assert parts.joined() is made
