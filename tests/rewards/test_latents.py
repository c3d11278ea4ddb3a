"""Scorers that read latents: nothing is decoded for them, and they mix with scorers of videos."""

import pytest
import torch
from forked import program
from helpers import ALONE, CAPTIONS, LATENT_SHAPE, mean_score

from unified_trainer.basics.errors import UserError
from unified_trainer.rewards.base import LatentScorer, RewardConfig, ScorerConfig
from unified_trainer.rewards.latents import LatentReward, reward_of
from unified_trainer.rewards.reward import Reward

PROMPTS = CAPTIONS[:3]
LATENTS = torch.randn(3, *LATENT_SHAPE, generator=torch.Generator().manual_seed(1))
PLUG_IN = '''
from dataclasses import dataclass

from unified_trainer.rewards.own_settings import ScorerSettings


@dataclass(frozen=True)
class Level(ScorerSettings):
    """The mean of a channel of the latents."""

    channel: int = 0
    of_latents = True

    def load(self, config, device):
        return lambda latents, prompts: latents[:, self.channel].flatten(1).mean(1)
'''


@pytest.fixture
def no_codec(codec, monkeypatch):
    """A codec that may not decode."""

    def decode(latents):
        raise AssertionError("latents were decoded")

    monkeypatch.setattr(codec, "decode", decode)
    return codec


def level(latents, prompts):
    return latents[:, 0].flatten(1).mean(1)


def latents_alone(codec, **config) -> Reward:
    return reward_of({"level": LatentScorer(level)}, codec, RewardConfig(kind="level", **config))


def test_scorers_of_latents_alone_decode_nothing(no_codec):
    scores = latents_alone(no_codec, frames="all", scale=2.0).score(LATENTS, PROMPTS)
    torch.testing.assert_close(scores.parts[:, 0], 2 * LATENTS[:, 0].flatten(1).mean(1))
    assert scores.statistics == {}
    assert "pixels/diversity" not in latents_alone(no_codec).metrics(scores.gathered(ALONE), ["a", "a", "a"])


def test_frames_count_latent_frames(no_codec):
    latents = LATENTS[:, :, [0, 1, 0]]
    for frames, chosen in {"first": [0], "every": [0, 2], "all": [0, 1, 2]}.items():
        scores = latents_alone(no_codec, frames=frames, frame_stride=2).score(latents, PROMPTS)
        torch.testing.assert_close(scores.parts[:, 0], latents[:, 0, chosen].flatten(1).mean(1))


def test_the_gradient_needs_no_decoder(no_codec):
    """The reward is the mean of n numbers of channel 0, so its gradient is 1 / n there and 0 elsewhere."""
    x0 = LATENTS.clone().requires_grad_()
    latents_alone(no_codec, frames="all").score_with_gradient(x0, PROMPTS).sum().backward()
    wanted = torch.zeros_like(LATENTS)
    wanted[:, 0] = 1 / LATENTS[0, 0].numel()
    torch.testing.assert_close(x0.grad, wanted)


def test_a_reward_of_both_is_the_weighted_sum(codec):
    config = RewardConfig(kind="mean", scorers={"level": ScorerConfig(weight=-0.5)})
    both = reward_of({"mean": mean_score, "level": LatentScorer(level)}, codec, config)
    scores = both.score(LATENTS, PROMPTS)
    alone = Reward({"mean": mean_score}, codec, RewardConfig(kind="mean")).score(LATENTS, PROMPTS)
    torch.testing.assert_close(both.total(scores.parts), alone.parts[:, 0] - 0.5 * level(LATENTS[:, :, :1], PROMPTS))
    torch.testing.assert_close(scores.thumbnails, alone.thumbnails)


def test_videos_alone_are_refused(codec):
    one = latents_alone(codec)
    assert isinstance(one, LatentReward)
    with pytest.raises(UserError, match="level reads latents"):
        one.parts(torch.rand(3, 3, 1, 8, 8), PROMPTS, ["level"])


@pytest.mark.slow
def test_a_run_decodes_in_validations_alone(tmp_path):
    """The time of decoding is logged where something was decoded: a rollout that is scored by its latents has none."""
    (tmp_path / "level.py").write_text(PLUG_IN)
    ran = program(
        "-m", "unified_trainer", "--method", "dance_grpo", "--output", tmp_path / "run", "--steps", 1,
        "--algorithm.num-prompts", 2, "--algorithm.num-samples", 2,
        "--algorithm.prompts-per-update", 2, "--validation.num-samples", 2,
        "--reward.path", "", "--reward.kind", tmp_path / "level.py:Level", "--reward.frames", "all",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert '"train/reward/Level"' in lines
    assert '"train/seconds/decode"' not in lines
    assert '"validation/reward/Level"' in lines
    refused = program("-m", "unified_trainer", "evaluate", tmp_path / "run", "--prompts", CAPTIONS[0])
    assert "Level reads latents, but here are videos alone" in " ".join(refused.stderr.split())
