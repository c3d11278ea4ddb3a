"""The reward: which frames are scored, their mean, the scale, and no silent numbers."""

import pytest
import torch
from helpers import CAPTIONS, LATENT_SHAPE, MeanScorer, ScriptedScorer

from unified_trainer.roles.reward import Reward, RewardConfig

PROMPTS = CAPTIONS[:3]
VIDEO = torch.rand(3, 3, 9, 8, 8, generator=torch.Generator().manual_seed(0))
LATENTS = torch.randn(3, *LATENT_SHAPE, generator=torch.Generator().manual_seed(1))
BONUS = torch.tensor([len(prompt) / 100 for prompt in PROMPTS])  # what MeanScorer adds for a prompt


def reward(codec, scorer=None, **config) -> Reward:
    return Reward(scorer or MeanScorer(), codec, RewardConfig(**config))


@pytest.mark.parametrize(
    ("config", "frames"),
    [
        ({"frames": "first"}, [0]),
        ({"frames": "every", "frame_stride": 4}, [0, 4, 8]),
        ({"frames": "every", "frame_stride": 5}, [0, 5]),
        ({"frames": "every", "frame_stride": 100}, [0]),
        ({"frames": "all"}, list(range(9))),
    ],
)
@pytest.mark.parametrize("batch", [1, 4, 64])
def test_a_reward_is_the_mean_score_of_the_chosen_frames(codec, config, frames, batch):
    got = reward(codec, batch=batch, **config).score_video(VIDEO, PROMPTS)
    by_hand = torch.stack([VIDEO[:, :, frame].flatten(1).mean(1) for frame in frames]).mean(0) + BONUS
    torch.testing.assert_close(got, by_hand)


def test_the_scale(codec):
    once, thrice = (reward(codec, scale=scale).score_video(VIDEO, PROMPTS) for scale in (1.0, -3.0))
    torch.testing.assert_close(thrice, -3 * once)


@pytest.mark.parametrize("frames", ["first", "all"])
def test_the_first_frame_of_latents_needs_only_the_first_latent_frame(codec, frames):
    """The codec is causal: decoded alone, the first latent frame is the first frame of the whole."""
    config = {"frames": frames}
    from_latents = reward(codec, **config).score(LATENTS, PROMPTS)
    from_video = reward(codec, **config).score_video(codec.decode(LATENTS), PROMPTS)
    torch.testing.assert_close(from_latents, from_video, rtol=1e-5, atol=1e-6)


def test_a_reward_has_no_gradient_and_is_float32(codec):
    scores = reward(codec).score(LATENTS.clone().requires_grad_(), PROMPTS)
    assert not scores.requires_grad and scores.dtype == torch.float32


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_score_that_is_not_finite_names_its_sample(codec, value):
    """One bad frame of three is enough."""
    scorer = ScriptedScorer([1.0, 1.0, 1.0, 1.0, value, 1.0, 1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match=rf"the score of sample 1 \('{PROMPTS[1]}'\) is not finite"):
        reward(codec, scorer, frames="every", frame_stride=4).score_video(VIDEO, PROMPTS)


def test_as_many_prompts_as_videos(codec):
    with pytest.raises(ValueError, match="reward: 3 videos but 2 prompts"):
        reward(codec).score_video(VIDEO, PROMPTS[:2])


class Forgetful(MeanScorer):
    """Loses the last image."""

    def score(self, images, prompts):
        return super().score(images, prompts)[:-1]


@pytest.mark.parametrize("config", [{"frames": "first"}, {"frames": "all"}, {"frames": "all", "batch": 9}])
def test_a_scorer_that_returns_another_count_is_refused(codec, config):
    with pytest.raises(ValueError, match="scores"):
        reward(codec, Forgetful(), **config).score_video(VIDEO, PROMPTS)


@pytest.mark.parametrize("config", [{"frame_stride": 0}, {"batch": 0}])
def test_strides_and_batches_start_at_one(codec, config):
    with pytest.raises(ValueError, match=r"reward\.frame_stride and reward\.batch must be at least 1"):
        reward(codec, **config)
