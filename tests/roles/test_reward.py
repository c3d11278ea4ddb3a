"""The reward: which frames are scored, their mean, the scale, and no silent numbers."""

import dataclasses
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import CAPTIONS, LATENT_SHAPE, ScriptedScorer, mean_score, reward_of

from unified_trainer.basics.errors import NotFiniteError, UnscoredError, UserError
from unified_trainer.methods.rl.rollouts import LocalRollouts
from unified_trainer.rewards import reward as reward_module
from unified_trainer.rewards.pixels import motion_energy
from unified_trainer.rewards.reward import Reward, RewardConfig, ScorerConfig, VideoReward

PROMPTS = CAPTIONS[:3]
VIDEO = torch.rand(3, 3, 9, 8, 8, generator=torch.Generator().manual_seed(0))
LATENTS = torch.randn(3, *LATENT_SHAPE, generator=torch.Generator().manual_seed(1))
BONUS = torch.tensor([len(prompt) / 100 for prompt in PROMPTS])  # what mean_score adds for a prompt


def reward(codec, scorer=mean_score, **config) -> Reward:
    return reward_of(scorer, codec, **config)


def of_video(one: Reward, video, prompts) -> torch.Tensor:
    """The reward of decoded videos."""
    return one.total(one.parts(video, prompts, one.weights))


def of_latents(one: Reward, x0, prompts) -> torch.Tensor:
    """The reward of clean latents."""
    return one.total(one.score(x0, prompts).parts)


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
    got = of_video(reward(codec, batch=batch, **config), VIDEO, PROMPTS)
    by_hand = torch.stack([VIDEO[:, :, frame].flatten(1).mean(1) for frame in frames]).mean(0) + BONUS
    torch.testing.assert_close(got, by_hand)


def test_the_scale(codec):
    once, thrice = (of_video(reward(codec, scale=scale), VIDEO, PROMPTS) for scale in (1.0, 3.0))
    torch.testing.assert_close(thrice, 3 * once)


@pytest.mark.parametrize("frames", ["first", "all"])
def test_the_first_frame_of_latents_needs_only_the_first_latent_frame(codec, frames):
    """The codec is causal: decoded alone, the first latent frame is the first frame of the whole."""
    config = {"frames": frames}
    from_latents = of_latents(reward(codec, **config), LATENTS, PROMPTS)
    from_video = of_video(reward(codec, **config), codec.decode(LATENTS), PROMPTS)
    torch.testing.assert_close(from_latents, from_video, rtol=1e-5, atol=1e-6)


def test_a_reward_has_no_gradient_and_is_float32(codec):
    scores = of_latents(reward(codec), LATENTS.clone().requires_grad_(), PROMPTS)
    assert not scores.requires_grad and scores.dtype == torch.float32


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_score_that_is_not_finite_names_its_sample(codec, value):
    """One bad frame of three is enough."""
    scorer = ScriptedScorer([1.0, 1.0, 1.0, 1.0, value, 1.0, 1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match=rf"the score of sample 1 \('{PROMPTS[1]}'\) is not finite"):
        of_video(reward(codec, scorer, frames="every", frame_stride=4), VIDEO, PROMPTS)


def test_as_many_prompts_as_videos(codec):
    with pytest.raises(ValueError, match="reward: 3 videos but 2 prompts"):
        of_video(reward(codec), VIDEO, PROMPTS[:2])


def forgetful(images, prompts):
    """Loses the last image."""
    return mean_score(images, prompts)[:-1]


@pytest.mark.parametrize("config", [{"frames": "first"}, {"frames": "all"}, {"frames": "all", "batch": 9}])
def test_a_scorer_that_returns_another_count_is_refused(codec, config):
    with pytest.raises(ValueError, match="scores"):
        of_video(reward(codec, forgetful, **config), VIDEO, PROMPTS)


# Sets of scorers.


def brightness(video, prompts):
    """Scorer of videos: the mean of the frames it is given."""
    return video.flatten(1).mean(1)


def count(video, prompts):
    """Scorer of videos: how many frames it is given."""
    return torch.full((len(video),), float(video.shape[2]))


def reward_set(codec, scorers, retries=0, **configs) -> Reward:
    """brightness of all frames with weight 2, and what is named."""
    parts = {name: ScorerConfig(**config) for name, config in configs.items()}
    config = RewardConfig(kind="first", frames="all", weight=2.0, scorers=parts, retries=retries)
    return Reward({"first": brightness, **scorers}, codec, config)


def test_a_set_is_the_weighted_sum_of_its_scaled_parts(codec):
    one = reward_set(codec, {"n": count}, n={"frames": "every", "frame_stride": 4, "scale": 0.1, "weight": -3.0})
    bright = VIDEO.flatten(1).mean(1)
    torch.testing.assert_close(of_video(one, VIDEO, PROMPTS), 2 * bright - 3 * 0.1 * 3)
    torch.testing.assert_close(one.parts(VIDEO, PROMPTS, one.weights), torch.stack([bright, torch.full((3,), 0.3)], 1))


def test_a_scorer_of_weight_zero_is_held_out(codec):
    """It is not asked for a reward, and gives its part when it is named."""
    asked = []
    one = reward_set(codec, {"n": lambda v, p: (asked.append(1), count(v, p))[1]}, n={"weight": 0.0})
    assert list(one.weights) == ["first"] and one.held_out == ("n",)
    one.score(LATENTS, PROMPTS)
    assert asked == []
    assert one.parts(VIDEO, PROMPTS, one.held_out).tolist() == [[1.0]] * 3


def test_metrics_of_a_set(codec):
    """Metrics of each part and of the pixels of all nine frames, so that motion is among them."""
    one = reward_set(codec, {"n": count}, n={"frames": "all"})
    scores = one.score(LATENTS, PROMPTS)
    metrics = one.metrics(scores, ["a", "a", "a"])
    frames = codec.decode(LATENTS)
    assert metrics["reward/first"] == pytest.approx(float(frames.mean()), rel=1e-5)
    assert metrics["reward/n"] == frames.shape[2] and metrics["reward/n_std_in_groups"] == 0
    assert metrics["pixels/motion_energy"] == pytest.approx(float(motion_energy(frames).mean()), rel=1e-5)
    assert metrics["pixels/diversity"] > 0 and "reward/retried" not in metrics


def test_pixel_statistics_of_every_nth_step_leave_the_diversity(codec):
    """The hacking monitor reads the diversity of every training step, and statistics of validations alone."""
    one = Reward({"hpsv3": brightness}, codec, RewardConfig(path="tiny", statistics_every=3))
    scores = [one.score(LATENTS, PROMPTS, step) for step in range(4)]
    assert [len(each.statistics) for each in scores] == [3, 0, 0, 3]
    assert all(torch.equal(each.thumbnails, scores[0].thumbnails) for each in scores)
    metrics = one.metrics(scores[1], ["a", "a", "a"])
    assert {name for name in metrics if name.startswith("pixels/")} == {"pixels/diversity"}


def test_the_first_frame_is_decoded_alone_only_if_all_scorers_look_at_it_alone(codec):
    """Held-out scorers have no say in it."""
    first = {"frames": "first"}
    for config, frames in ((first, 1), (first | {"weight": 0.0}, 1), ({"frames": "all"}, 5)):
        one = Reward(
            {"hpsv3": brightness, "n": count, "w": count},
            codec,
            RewardConfig(
                path="tiny", scorers={"n": ScorerConfig(**config), "w": ScorerConfig(frames="all", weight=0.0)}
            ),
        )
        assert ("motion_energy" in one.score(LATENTS, PROMPTS).statistics) == (frames > 1)


class Failing:
    """Fails so often, then answers."""

    def __init__(self, times: int, fault: Exception) -> None:
        self.left, self.fault, self.asked = times, fault, 0

    def __call__(self, video, prompts):
        self.asked += 1
        self.left -= 1
        if self.left >= 0:
            raise self.fault
        return brightness(video, prompts)


@pytest.mark.parametrize("fault", [ConnectionError("gone"), RuntimeError("out of memory")])
def test_a_failed_call_is_repeated_as_often_as_configured(codec, fault):
    scorer = Failing(2, fault)
    one = reward_set(codec, {"weak": scorer}, retries=2, weak={"frames": "all"})
    torch.testing.assert_close(of_video(one, VIDEO, PROMPTS), 3 * VIDEO.flatten(1).mean(1))
    assert scorer.asked == 3
    assert one.retried == 2 and LocalRollouts(lambda *_: None, one, 1).metrics() == {"reward/retried": 2}


def test_a_failure_that_stays_keeps_its_traceback_and_names_its_scorer_and_prompts(codec):
    scorer = Failing(9, ConnectionError("gone"))
    one = reward_set(codec, {"weak": scorer}, retries=2, weak={})
    with pytest.raises(ConnectionError, match="gone") as caught:
        of_video(one, VIDEO, PROMPTS)
    assert scorer.asked == 3 and caught.value is scorer.fault
    failed, at_work = caught.value.__notes__
    assert failed.startswith("reward: scorer weak failed 3 times")
    assert at_work == f"while working on scorer weak, prompts {', '.join(map(repr, PROMPTS))}"


def test_a_scorer_that_ends_the_program_is_an_error_that_names_it(codec):
    def leaving(video, prompts):
        sys.exit(3)

    one = reward_set(codec, {"weak": leaving}, retries=2, weak={})
    with pytest.raises(RuntimeError, match=r"^the scorer called sys\.exit\(3\), which would end the run") as caught:
        of_video(one, VIDEO, PROMPTS)
    assert caught.value.__notes__[0].startswith("while working on scorer weak")


@pytest.mark.parametrize("frames", ["all", "first"])
def test_a_scorer_that_changes_its_videos_is_refused(codec, frames):
    """Others would score what it left."""
    one = reward_set(codec, {"weak": lambda video, _: video.mul_(0).flatten(1).sum(1)}, weak={"frames": frames})
    with pytest.raises(UserError, match=r"^reward: weak changed the videos that it was given.*videos\.clone\(\)$"):
        of_video(one, VIDEO.clone(), PROMPTS)


def test_an_error_of_a_scorer_names_the_first_prompts_of_many(codec):
    one = reward_set(codec, {"weak": Failing(1, KeyError("score"))}, weak={})
    with pytest.raises(KeyError) as caught:
        of_video(one, VIDEO.repeat(2, 1, 1, 1, 1), PROMPTS * 2)
    assert caught.value.__notes__ == [f"while working on scorer weak, prompts {', '.join(map(repr, PROMPTS))}, ..."]


def test_a_scorer_must_return_a_tensor_with_one_number_for_each_video(codec):
    for wrong, said in (([1.0, 2.0, 3.0], "a list"), (torch.zeros(3, 1), r"scores of shape \[3, 1\]")):
        one = Reward({"hpsv3": lambda v, p, wrong=wrong: wrong}, codec, RewardConfig(path="tiny"))
        with pytest.raises(ValueError, match=f"reward: hpsv3 gave {said}, expected one real number for each"):
            of_video(one, VIDEO, PROMPTS)


def test_a_wrong_input_is_not_asked_about_again(codec):
    scorer = Failing(9, UserError("a special token"))
    with pytest.raises(UserError, match="a special token"):
        of_video(reward_set(codec, {"weak": scorer}, retries=5, weak={}), VIDEO, PROMPTS)
    assert scorer.asked == 1


def test_a_sample_without_a_score_is_nan_and_never_a_number(codec, capsys):
    """Other samples keep their scaled scores; `total`, gradients and videos of no run refuse it."""
    lost = Failing(9, UnscoredError("it is dark", [1.0, None, 3.0]))
    one = reward_set(codec, {"weak": lost}, weak={"scale": 0.5})
    parts = one.score(LATENTS, PROMPTS).parts
    assert parts[[0, 2], 1].tolist() == [0.5, 1.5] and parts[:, 1].isnan().tolist() == [False, True, False]
    assert (
        not parts[:, 0].isnan().any() and "weak: 1 of 3 samples cannot be scored: it is dark" in capsys.readouterr().out
    )
    assert one.partial_total(parts).isnan().tolist() == [False, True, False]
    assert torch.equal(one.partial_total(parts)[[0, 2]], one.total(parts[[0, 2]]))
    with pytest.raises(NotFiniteError, match=re.escape(PROMPTS[1])):
        one.total(parts, PROMPTS)
    strict = Reward(one.scorers, codec, dataclasses.replace(one.config, unscored=0.0))
    for other in (strict, VideoReward(one.scorers, one.config)):
        with pytest.raises(UnscoredError, match="1 of 3 samples cannot be scored: it is dark"):
            other.parts(VIDEO, PROMPTS, ["weak"])


def test_a_set_needs_a_scorer_for_each_name(codec):
    with pytest.raises(ValueError, match="reward: scorers first for settings of first, n"):
        reward_set(codec, {}, n={})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"weight": 0.0}, r"every scorer has weight 0 \(hpsv3\)"),
        ({"weight": -1.0}, r"sum to -1 \(hpsv3 -1\): .* or set --reward\.allow-negative"),
        ({"scorers": {"n": ScorerConfig(scale=-2.0)}}, r"sum to -1 \(hpsv3 1, n -2\)"),
        ({"scorers": {"hpsv3": ScorerConfig()}}, r"reward\.scorers\.hpsv3 has the name of the scorer that"),
    ],
)
def test_sets_that_cannot_be(config, message):
    with pytest.raises(ValueError, match=message):
        RewardConfig(**{"path": "tiny"} | config).check()


@pytest.mark.parametrize(
    "config",
    [
        {"scorers": {"penalty": ScorerConfig(weight=-1.0)}},
        {"weight": -1.0, "scale": -1.0},
        {"weight": 0.0, "scorers": {"n": ScorerConfig()}},
        {"weight": -1.0, "allow_negative": True},
    ],
)
def test_sets_with_a_penalty_can_be(config):
    RewardConfig(**{"path": "tiny"} | config).check()


def test_retries_wait_twice_as_long_each_time_and_a_minute_at_most(codec, monkeypatch):
    """Ten retries bridge four minutes, in which a server can start again; before, they took .03 seconds."""
    pauses, faults = [], iter([True] * 10)

    def scorer(video, prompts):
        if next(faults, False):
            raise ConnectionError("refused")
        return brightness(video, prompts)

    monkeypatch.setattr(reward_module, "FIRST_PAUSE", 0.5)
    monkeypatch.setattr(reward_module, "LATER", SimpleNamespace(wait=pauses.append))
    of_video(reward_set(codec, {"weak": scorer}, retries=10, weak={}), VIDEO, PROMPTS)
    assert pauses == [0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert reward_module.pause_after(10**6) == 60
