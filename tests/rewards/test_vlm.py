"""The scorer vlm against a server that answers as OpenAI's does: what it is asked, and strict reading of answers."""

import base64
import contextlib
import io
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from answering import answering
from helpers import CPU
from PIL import Image

from unified_trainer.basics.errors import UnscoredError, UserError
from unified_trainer.rewards import reward
from unified_trainer.rewards.base import RewardConfig, ScorerConfig
from unified_trainer.rewards.reward import VideoReward
from unified_trainer.rewards.scorers import check_reward, load_scorers
from unified_trainer.rewards.vlm import VisionLanguageModel

VIDEO = torch.rand(2, 3, 3, 8, 12, generator=torch.Generator().manual_seed(0))
PROMPTS = ("a red circle", "blue {curly} square")


def completion(text: object) -> dict[str, object]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


@contextlib.contextmanager
def model(*answers, **settings: str):
    """A scorer of the server's answers, and the list of what it asked; one request at a time."""
    with answering((200, {"data": []}), *answers) as (url, asked):
        part = ScorerConfig(kind="vlm", frames="all", batch=1, settings={"url": f"{url}/v1", "model": "m", **settings})
        config = RewardConfig(scorers={"mine": part})
        check_reward(config, 3)
        assert asked[0][0] == "/v1/models"
        yield load_scorers(config, CPU)[0]["mine"], asked


def test_it_asks_about_every_frame_and_reads_the_number():
    with model((200, completion("7")), (200, completion(" 2.5\n"))) as (scorer, asked):
        assert scorer(VIDEO, PROMPTS).tolist() == [7.0, 2.5]
    for (path, _, body), video, prompt in zip(asked[1:], VIDEO, PROMPTS, strict=True):
        assert path == "/v1/chat/completions" and (body["model"], body["temperature"]) == ("m", 0)
        (message,) = body["messages"]
        *images, question = message["content"]
        assert f"\n\n{prompt}\n\n" in question["text"] and "number" in question["text"]
        for image, frame in zip(images, video.unbind(1), strict=True):
            head, _, data = image["image_url"]["url"].partition(",")
            assert head == "data:image/png;base64"
            pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
            assert np.array_equal(pixels, (255 * frame).round().byte().movedim(0, -1).numpy())


@pytest.mark.parametrize("answer", ["", "good", "7 out of 10", "7/10", "11", "-1", "nan", "seven", "7 8", "1e1"])
def test_an_answer_that_is_no_number_is_an_error(answer):
    with model((200, completion(answer))) as (scorer, _):
        shown = re.escape(f"m answered {answer!r} about 'a red circle', which is no number from 0 to 10")
        with pytest.raises(UserError, match=shown):
            scorer(VIDEO[:1], PROMPTS[:1])


@pytest.mark.parametrize(
    "answer",
    [{}, {"choices": []}, completion(None), [], completion([{"type": "text"}])],
    ids=lambda answer: str(answer)[:20],
)
def test_another_answer_is_an_error(answer):
    with model((200, answer)) as (scorer, _), pytest.raises(UserError, match="is no chat completion with a text"):
        scorer(VIDEO[:1], PROMPTS[:1])


def test_a_pattern_reads_a_longer_answer():
    settings = {"pattern": r".*score: (\d+)", "template": "Rate {prompt}.", "lowest": "1", "highest": "100"}
    with model((200, completion("It moves.\nscore: 85")), **settings) as (scorer, asked):
        assert scorer(VIDEO[:1], PROMPTS[:1]).tolist() == [85.0]
        assert asked[1][2]["messages"][0]["content"][-1]["text"] == "Rate a red circle."
    optional = VisionLanguageModel(url="http://h", model="m", pattern=r"none|(\d)")
    with pytest.raises(UserError, match="answered 'none' about 'a', which is no number"):
        optional.number_of("none", "a")


@pytest.mark.slow
def test_requests_run_at_the_same_time_and_stay_in_order():
    video, prompts = VIDEO[:1].expand(12, -1, -1, -1, -1), tuple(f"number {i}" for i in range(12))

    def answer(body):
        return completion(body["messages"][0]["content"][-1]["text"].split("number ")[1].split("\n")[0])

    with answering((200, answer)) as (url, _):
        part = ScorerConfig(kind="vlm", batch=5, settings={"url": url, "model": "m", "highest": "20"})
        scorer = load_scorers(RewardConfig(scorers={"mine": part}), CPU)[0]["mine"]
        assert scorer(video, prompts).tolist() == [float(i) for i in range(12)]


def test_faults_and_refusals():
    with model((503, "busy"), (200, completion("1"))) as (scorer, _), pytest.raises(ConnectionError, match="503: busy"):
        scorer(VIDEO[:1], PROMPTS[:1])
    with model((401, "no key")) as (scorer, _), pytest.raises(UserError, match="code 401: no key"):
        scorer(VIDEO[:1], PROMPTS[:1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": ""}, r"mine\.settings\.model must be given"),
        ({"template": "Rate it."}, r"mine\.settings\.template must hold \{prompt\}"),
        ({"pattern": "("}, r"mine\.settings\.pattern '\(' is no regular expression"),
        ({"pattern": "(a)(b)"}, r"mine\.settings\.pattern must have one group, the number, but has 2"),
        ({"lowest": "10"}, r"mine\.settings\.lowest must be below .*\.highest"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    part = ScorerConfig(kind="vlm", settings={"url": "http://h", "model": "m", **settings})
    with pytest.raises(UserError, match=message):
        check_reward(RewardConfig(scorers={"mine": part}), 5)


def test_an_answer_that_is_no_number_is_drawn_again():
    """The first answer is at temperature 0, and would be the same again; one sample without a number spares others."""
    refuses = (400, "content filter")
    with model((200, completion("I cannot tell")), (200, completion("4")), refuses, (200, completion("5"))) as one:
        scorer, asked = one
        assert scorer(VIDEO, PROMPTS).tolist() == [4.0, 5.0]
        assert [body["temperature"] for *_, body in asked[1:]] == [0, 1, 0, 1] and "seed" not in asked[2][2]
    with model((200, completion("4")), (200, completion("?")), redraws="1") as (scorer, asked):
        with pytest.raises(UnscoredError, match=r"1 of 2 samples cannot be scored: m answered '\?'") as failed:
            scorer(VIDEO, PROMPTS)
        assert failed.value.scores == [4.0, None] and len(asked) == 4


def test_the_server_is_looked_at_before_the_run():
    """A server that is down, or loads, or refuses the token, is found by the check; one without /models is not."""
    for code, message in ((503, r"mine\.settings\.url: .*503.*start the server first"), (401, "code 401")):
        with pytest.raises(UserError, match=message), answering((code, "no")) as (url, _):
            part = ScorerConfig(kind="vlm", settings={"url": url, "model": "m"})
            check_reward(RewardConfig(scorers={"mine": part}), 5)
    with pytest.raises(UserError, match="start the server first"):
        check_reward(RewardConfig(kind="vlm", settings={"url": url, "model": "m"}), 5)


def test_a_model_sees_several_frames_unless_told_otherwise():
    given = {name: ScorerConfig(kind="vlm", frames=frames) for name, frames in (("a", ""), ("b", "first"))}
    named = RewardConfig(kind="sharpness", scorers={**given, "vlm_pairs": ScorerConfig()}).named()
    assert {name: part.frames for name, part in named.items()} == {
        "sharpness": "first", "a": "several", "b": "first", "vlm_pairs": "several"
    }  # fmt: skip
    assert [len(range(0, frames, named["a"].stride(frames))) for frames in (1, 5, 8, 9, 17, 81)] == [1, 5, 8, 5, 6, 8]


def test_faults_of_servers_are_retried_by_default(monkeypatch):
    calls = []

    def busy(video, prompts):
        calls.append(len(prompts))
        raise ConnectionError("busy")

    monkeypatch.setattr(reward, "LATER", SimpleNamespace(wait=lambda seconds: None))
    for kind, given, wanted in (("vlm", None, 6), ("http", None, 6), ("sharpness", None, 1), ("vlm", 2, 3)):
        one = VideoReward({kind: busy}, RewardConfig(kind=kind, retries=given))
        with pytest.raises(ConnectionError):
            one.parts(VIDEO, PROMPTS, [kind])
        assert len(calls) == wanted
        calls.clear()
