"""The scorer vlm_pairs: shares of won comparisons within the groups of a call, and rollouts that hold whole groups."""

import base64
import contextlib
import io

import numpy as np
import pytest
import torch
from answering import answering
from helpers import ALONE, CPU, SMALL, metrics_of, run
from PIL import Image

from unified_trainer.basics import requests
from unified_trainer.basics.errors import UnscoredError, UserError
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.rewards.base import RewardConfig, ScorerConfig
from unified_trainer.rewards.scorers import check_reward, load_scorers
from unified_trainer.run.plan.plan import check
from unified_trainer.run.settings.command_line import parse

LEVELS = (0.2, 0.9, 0.4, 0.7, 0.1)  # of five gray videos, two prompts among them
PROMPTS = ("a dog", "a dog", "a cat", "a dog", "a bird")
VIDEO = torch.tensor(LEVELS).view(5, 1, 1, 1, 1).expand(5, 3, 2, 8, 8)


def level(part: dict) -> float:
    data = part["image_url"]["url"].partition(",")[2]
    return float(np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))).mean())


def brighter(body: dict) -> dict:
    """The answer of a model that prefers the brighter video."""
    first, second = (level(part) for part in body["messages"][0]["content"] if part["type"] == "image_url")
    return {"choices": [{"message": {"content": " 1\n" if first > second else "2"}}]}


def always(text: str) -> dict:
    return {"choices": [{"message": {"content": text}}]}


@contextlib.contextmanager
def comparing(answer, **settings: str):
    with answering((404, "no models"), (200, answer)) as (url, asked):
        part = ScorerConfig(kind="vlm_pairs", batch=2, settings={"url": f"{url}/v1", "model": "m", **settings})
        config = RewardConfig(scorers={"mine": part})
        check_reward(config, 3)
        assert asked[0][0] == "/v1/models"
        yield load_scorers(config, CPU)[0]["mine"], asked


@pytest.mark.parametrize(("both", "count"), [("true", 6), ("false", 3)])
def test_a_score_is_the_share_of_comparisons_that_a_video_wins_in_its_group(both, count):
    with comparing(brighter, both_orders=both) as (scorer, asked):
        assert scorer(VIDEO[:, :, :1], PROMPTS).tolist() == [0.0, 1.0, 0.5, 0.5, 0.5]
    assert len(asked) == 1 + count and all(
        "\n\na dog\n\n" in body["messages"][0]["content"][-1]["text"] for *_, body in asked[1:]
    )


def test_videos_of_one_text_and_other_images_are_not_compared():
    images = [requests.Image.of(np.full((4, 4, 3), shade, np.uint8)) for shade in (0, 1)]
    prompts = [requests.Prompt("a dog", (images[i],)) for i in (0, 0, 1, 1, 1)]
    with comparing(brighter, both_orders="false") as (scorer, asked):
        assert scorer(VIDEO[:, :, :1], prompts).tolist() == [0.0, 1.0, 0.5, 1.0, 0.0]
    assert len(asked) == 5


def test_a_model_that_prefers_what_it_sees_first_tells_nothing_apart():
    with comparing(always("1")) as (scorer, _):
        assert scorer(VIDEO[:, :, :1], PROMPTS).tolist() == [0.5] * 5


def test_an_answer_that_names_no_video_is_an_error():
    with comparing(always("both")) as (scorer, _), pytest.raises(UserError, match="m answered 'both' about two videos"):
        scorer(VIDEO[:, :, :1], PROMPTS)


@pytest.mark.parametrize(
    ("words", "mesh", "message"),
    [
        (["--algorithm.rollout-batch", "3"], ALONE, r"rollout_batch \(3\) must be a multiple of algorithm.num_samples"),
        ([], Mesh(CPU, 0, 4), r"because the samples of a prompt are compared on one rank"),
    ],
)
def test_a_rollout_is_scored_in_whole_groups(words, mesh, message, request):
    server = answering((200, {"data": []}))
    url, _ = server.__enter__()
    request.addfinalizer(lambda: server.__exit__(None, None, None))
    pairs = ["--reward.scorers.vlm-pairs.settings.url", url, "--reward.scorers.vlm-pairs.settings.model"]
    held_out = ["--reward.scorers.vlm-pairs.weight", "0"]
    with pytest.raises(UserError, match=message):
        check(parse([*SMALL["dance_grpo"], *pairs, "m", *words]), mesh)
    if mesh is ALONE:
        check(parse([*SMALL["dance_grpo"], *pairs, "m", *held_out, *words]), mesh)


@pytest.mark.slow
def test_a_run_learns_from_comparisons(tmp_path):
    """In groups of two videos, one wins: the mean is one half, and the std in a group of 0 and 1 is sqrt(1 / 2)."""
    with answering((200, {"data": []}), (200, brighter)) as (url, asked):
        words = {"url": f"{url}/v1", "model": "m", "both-orders": "false"}
        flags = [word for key, value in words.items() for word in (f"--reward.settings.{key}", value)]
        run("dance_grpo", tmp_path / "run", "--reward.kind", "vlm_pairs", "--reward.frames", "first", *flags)
    (row,) = (row for row in metrics_of(tmp_path / "run") if "train/reward" in row)
    assert row["train/reward"] == 0.5 and row["train/reward_std_in_groups"] == pytest.approx(0.5**0.5)
    assert len(asked) == 1 + 2 and row["train/skipped_updates"] == 0


def test_a_video_that_the_server_refuses_has_no_score_and_the_others_of_its_prompt_do():
    """The dog of level 0.9 explains all refusals; the other two dogs keep their comparison."""

    def picky(body: dict) -> dict:
        shown = [level(part) for part in body["messages"][0]["content"] if part["type"] == "image_url"]
        return always("refused") if max(shown) > 200 else brighter(body)

    with comparing(picky, redraws="1") as (scorer, _), pytest.raises(UnscoredError, match="1 of 5 samples") as failed:
        scorer(VIDEO[:, :, :1], PROMPTS)
    assert failed.value.scores == [0.0, None, 0.5, 1.0, 0.5]
