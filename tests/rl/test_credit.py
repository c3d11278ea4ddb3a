"""Credit of chunks on a small causal student: its gradient, its branches, and what a reward of one chunk is worth."""

import dataclasses

import pytest
import torch
from helpers import (
    ALONE,
    CAPTIONS,
    FEW_STEPS,
    Recording,
    assert_near,
    mean_score,
    reward_of,
    reward_parts,
    setup_of,
    small_causal,
    tiny_codec,
)

from unified_trainer.data.loader import Loader
from unified_trainer.data.prompts import Prompts
from unified_trainer.errors import UserError
from unified_trainer.methods.dance_grpo import DanceGRPO, DanceGRPOConfig
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.parallel.random import Streams
from unified_trainer.rewards.base import RewardConfig
from unified_trainer.rl.chunk_credit import BranchStreams, CreditConfig
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.causal import CausalStudent
from unified_trainer.roles.reward import Reward, RewardSum, Scores
from unified_trainer.roles.role import TrainableConfig
from unified_trainer.trainer import Trainer

pytestmark = pytest.mark.slow  # seconds together

SHAPE = (16, 5, 2, 2)
CONFIG = DanceGRPOConfig(
    num_prompts=2,
    num_samples=4,
    prompts_per_update=2,
    rollout_batch=8,
    update_batch=8,
    timestep_fraction=1.0,
    clip_low=0.1,
    clip_high=0.1,
)
PER_CHUNK = CreditConfig(per_chunk=True)


class Student(Recording, CausalStudent):
    """A causal student that keeps its gradients."""


class Planted(Reward):
    """A reward of latents: the mean of the first channel in each chunk, counted in the planted chunks only."""

    def __init__(self, chunks: tuple[int, ...]) -> None:
        super().__init__({"planted": mean_score}, tiny_codec(), RewardConfig(kind="planted"))
        self.chunks = list(chunks)

    def score(self, x0, prompts, step=0):
        return Scores(x0[:, 0, self.chunks].flatten(1).mean(1)[:, None], {}, torch.zeros(len(x0), 1))

    def score_chunks(self, x0, prompts, ranges, *, past):
        values = torch.zeros(len(x0), len(ranges))
        values[:, self.chunks] = x0[:, 0, self.chunks].flatten(2).mean(2)
        return values


def trainer(reward: Reward, *, chunk_frames: int = 1, **changes) -> Trainer:
    config = dataclasses.replace(CONFIG, **changes)
    sampler = dataclasses.replace(FEW_STEPS, chunks=ChunkConfig(chunk_frames=chunk_frames))
    student = Student("student", Backbone(small_causal(), ALONE, trained=True), TrainableConfig(max_grad_norm=0.0))
    loader = Loader(Prompts(CAPTIONS), tiny_codec(), config.plan(), SHAPE, "", 0, ALONE)
    method = DanceGRPO(
        config, sampler, student=student, **reward_parts(DanceGRPO, config, sampler, student, reward, loader)
    )
    return Trainer(method, {"student": student}, loader, ALONE, seed=0)


def gradients(one: Trainer, count: int) -> torch.Tensor:
    """Return the student's gradient of each training step, whose noise differs and whose weights do not."""
    metrics = [one.step(step) for step in range(count)]
    assert all(0 <= each["log_ratio_abs_max"] < 1e-5 for each in metrics)
    found = [torch.cat([value.flatten() for value in each.values()]) for each in one.roles["student"].gradients]
    return torch.stack(found)


def test_one_chunk_is_one_reward_per_clip_bit_for_bit():
    clip, chunk = (trainer(reward_of(), chunk_frames=5, credit=c) for c in (CreditConfig(), PER_CHUNK))
    assert clip.step(0) == chunk.step(0)
    (found,), (expected,) = chunk.roles["student"].gradients, clip.roles["student"].gradients
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_equal_rewards_in_all_chunks_are_one_reward_per_clip():
    """sum over chunks of (frames / all) A r_chunk has the gradient of A r where the ratios are 1."""

    class Everywhere(Planted):
        def score_chunks(self, x0, prompts, ranges, *, past):
            return self.score(x0, prompts).parts.expand(-1, len(ranges))

    clip = trainer(Everywhere((2,)))
    chunk = trainer(Everywhere((2,)), credit=dataclasses.replace(PER_CHUNK, discount=0.0))
    for one in (clip, chunk):
        one.step(0)
    assert_near(chunk.roles["student"].gradients[0], clip.roles["student"].gradients[0])


def test_credit_of_chunks_has_a_smaller_variance_where_one_chunk_is_rewarded():
    """The noise of chunks that cannot change the reward leaves the gradient; its mean stays."""
    clip, later, own = (
        gradients(trainer(Planted((2,)), credit=credit), 8)
        for credit in (CreditConfig(), PER_CHUNK, dataclasses.replace(PER_CHUNK, discount=0.0))
    )
    variance = [float(each.var(0).sum()) for each in (clip, later, own)]
    assert variance[1] < 0.8 * variance[0] and variance[2] < 0.5 * variance[0]


def test_samples_of_a_branch_share_their_first_chunks_bit_for_bit_and_then_differ():
    """Two branches of two samples of each prompt share two of five chunks; the replay draws the same noise again."""
    credit = dataclasses.replace(PER_CHUNK, shared_chunks=2, branches=2)
    one = trainer(Planted((4,)), credit=credit)
    x0 = one.method.rollouts.samples(one.loader.batch(0), 0, Streams(0, 0)).rollout.x0
    first, second = x0[0::2], x0[1::2]
    assert torch.equal(first[:, :, :2], second[:, :, :2])
    assert not any(torch.equal(a, b) for a, b in zip(first[:, :, 2], second[:, :, 2], strict=True))
    assert len({row.sum().item() for row in x0[:, :, 0]}) == 4  # the branches of a prompt begin apart
    assert 0 <= one.step(0)["log_ratio_abs_max"] < 1e-5


def test_the_noise_of_shared_frames_is_that_of_the_branchs_first_sample():
    streams = BranchStreams(Streams(0, 3), frames=2, size=2)
    shape, plain = (1, 3, 1, 1), Streams(0, 3).noise("initial", [4, 5, 6], (1, 3, 1, 1))
    found = streams.noise("initial", [4, 5, 6], shape)
    assert torch.equal(found[:, :, 2:], plain[:, :, 2:]) and torch.equal(found[[0, 2]], plain[[0, 2]])
    assert torch.equal(found[1, :, :2], plain[0, :, :2])
    assert torch.equal(
        streams.numbered(1).noise("a", [5], shape)[:, :, :2], Streams(0, 3).numbered(1).noise("a", [4], shape)[:, :, :2]
    )


def test_chunks_are_scored_by_their_own_frames_or_by_those_up_to_them():
    """Three latent frames are 1, 4 and 4 frames; the scorer counts them, and means them."""

    def count(clips, prompts):
        return clips.flatten(1).mean(1) + 100 * clips.shape[2]

    reward = Reward({"count": count}, tiny_codec(), RewardConfig(kind="count", frames="all"))
    x0 = torch.randn(2, 16, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    video, ranges = tiny_codec().decode(x0), [(0, 1), (1, 2), (2, 3)]
    parts = video.split([1, 4, 4], 2)
    own, up_to = (reward.score_chunks(x0, ("a", "b"), ranges, past=past) for past in (False, True))
    torch.testing.assert_close(own, torch.stack([count(part, None) for part in parts], 1))
    torch.testing.assert_close(up_to[:, 1], count(video[:, :, :5], None))
    torch.testing.assert_close(up_to[:, 2], count(video, None))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"credit": {"shared_chunks": 1}}, r"shared_chunks needs --algorithm\.credit\.per-chunk"),
        ({"credit": {"per_chunk": True}, "objective": "gspo"}, r"objective than gspo"),
        ({"credit": {"per_chunk": True}, "correction": "truncated"}, r"correction none"),
        ({"credit": {"per_chunk": True}, "advantage": "gdpo"}, r"advantage than gdpo"),
        ({"credit": {"per_chunk": True, "shared_chunks": 1, "branches": 3}}, r"branches must divide"),
        ({"credit": {"per_chunk": True, "shared_chunks": 1, "branches": 4}}, r"at least two samples"),
        ({"credit": {"per_chunk": True, "shared_chunks": 1}, "init_same_noise": True}, r"init_same_noise must be"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, message):
    sampler = dataclasses.replace(FEW_STEPS, chunks=ChunkConfig(chunk_frames=1))
    config = dataclasses.replace(CONFIG, **changes | {"credit": CreditConfig(**changes["credit"])})
    with pytest.raises(UserError, match=message):
        config.check(setup_of(sampler))


def test_credit_needs_chunks_to_tell_apart_and_scorers_in_the_process():
    config = dataclasses.replace(CONFIG, credit=PER_CHUNK)
    with pytest.raises(UserError, match=r"needs a causal student"):
        config.check(setup_of(FEW_STEPS))
    with pytest.raises(UserError, match=r"below the 5 chunks"):
        trainer(Planted((4,)), credit=dataclasses.replace(PER_CHUNK, shared_chunks=5)).step(0)
    one = trainer(Planted((4,)), credit=PER_CHUNK)
    one.method.reward = RewardSum(RewardConfig(kind="planted"))
    with pytest.raises(UserError, match=r"rollouts\.workers 0"):
        one.step(0)
