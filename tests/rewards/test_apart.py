"""Scorers in another process answer while the next part of a rollout is made; scores and faults are as without that."""

import threading

import pytest
import torch
from helpers import LATENT_SHAPE, mean_score, small_batch, tiny_codec

from unified_trainer.basics.types import Rollout
from unified_trainer.methods.rl.rollouts import LocalRollouts
from unified_trainer.parallel.random import Streams
from unified_trainer.rewards.base import ApartScorer, RewardConfig, ScorerConfig, of_images
from unified_trainer.rewards.reward import Reward
from unified_trainer.rewards.scorers import KINDS, scorer_kind

CONFIG = RewardConfig(
    kind="first", retries=1, scorers={"mean": ScorerConfig(frames="all"), "last": ScorerConfig(weight=-0.5)}
)


class Elsewhere:
    """A scorer whose answer to a part comes once the next part is begun; it notes its thread and its calls."""

    def __init__(self, parts: int, faults: int = 0) -> None:
        self.begun = [threading.Event() for _ in range(parts)]
        self.threads, self.prompts, self.faults = [], [], faults

    def __call__(self, video, prompts):
        number = len(self.prompts)
        self.threads.append(threading.current_thread())
        if self.faults:
            self.faults -= 1
            raise ConnectionError("nobody answers")
        self.prompts.append(prompts)
        if number + 1 < len(self.begun):
            assert self.begun[number + 1].wait(60), "the next part was not begun before this one was scored"
        return mean_score(video[:, :, 0], prompts)


def rollouts(first, last, begun=lambda number: None, **how) -> LocalRollouts:
    """Rollouts of two samples a part."""
    scorers = {"first": first, "mean": of_images(mean_score, 8), "last": last}

    def sample(batch, step, rng):
        begun(batch.sample_ids[0] // 2)
        return Rollout.from_x0(rng.noise("x0", batch.sample_ids, LATENT_SHAPE))

    return LocalRollouts(sample, Reward(scorers, tiny_codec(), CONFIG), 2, **how)


def scored(one: LocalRollouts) -> dict[str, torch.Tensor]:
    scores = one.samples(small_batch(6), 0, Streams(0, 0)).scores
    return {"parts": scores.parts, "thumbnails": scores.thumbnails, **scores.statistics}


@pytest.mark.slow
def test_the_next_part_is_made_while_scorers_elsewhere_answer_and_the_scores_are_the_same():
    plain = of_images(mean_score, 8)
    expected = scored(rollouts(plain, plain))
    elsewhere = Elsewhere(3)
    found = scored(rollouts(ApartScorer(elsewhere), ApartScorer(plain), lambda number: elsewhere.begun[number].set()))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    prompts = small_batch(6).prompts
    assert elsewhere.prompts == [prompts[:2], prompts[2:4], prompts[4:]]
    assert len(set(elsewhere.threads)) == 1 and elsewhere.threads[0] is not threading.main_thread()


@pytest.mark.slow
def test_faults_elsewhere_are_retried_and_raised_as_in_this_thread():
    plain = of_images(mean_score, 8)
    once = rollouts(ApartScorer(Elsewhere(0, faults=1)), plain)
    scored(once)
    assert once.metrics() == {"reward/retried": 1.0}
    with pytest.raises(ConnectionError, match="nobody answers") as failed:
        scored(rollouts(ApartScorer(Elsewhere(0, faults=2)), plain))
    assert any("reward.retries" in note for note in failed.value.__notes__)
    assert any("scorer first" in note for note in failed.value.__notes__)


def test_scorers_behind_a_server_and_in_a_python_of_their_own_are_elsewhere():
    assert {name for name, kind in KINDS.items() if kind.apart} == {"http", "vlm", "vlm_pairs"}
    assert scorer_kind(ScorerConfig(kind="own.py:f", python="python"), "reward", 1.0).apart
