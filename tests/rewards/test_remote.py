"""A scorer behind HTTP: the numbers are those of this process, wrong servers and requests are named, faults retried."""

import base64
import contextlib
import json
import socket
import threading
import urllib.request
from dataclasses import replace

import pytest
import torch
from answering import answering, posting, serving_process
from helpers import CPU, HPSV3, free_port, metrics_of, run
from small_clip import save_clip

from unified_trainer.basics.errors import UserError
from unified_trainer.rewards.base import RewardConfig, ScorerConfig
from unified_trainer.rewards.reward import VideoReward
from unified_trainer.rewards.scorers import check_reward, least_frames, load_scorers
from unified_trainer.rewards.video_json import from_json, to_json
from unified_trainer.rewards.wire import exchange
from unified_trainer.run.settings.command_line import parse
from unified_trainer.run.settings.config import check_resumable, save
from unified_trainer.tools.serve.serve_reward import reward_service, serve_reward
from unified_trainer.tools.serve.web_server import serving

pytestmark = pytest.mark.slow  # seconds together

VIDEO = torch.rand(5, 3, 4, 16, 16, generator=torch.Generator().manual_seed(0))
PROMPTS = ("a red circle", "a blue square", "a red square", "c", "")
SMALL = VIDEO[:2, :, :2, :4, :4]
SHARPNESS = RewardConfig(kind="sharpness", frames="all")


@contextlib.contextmanager
def served(config: RewardConfig, batch: int = 64, score=None):
    """Serve a reward in this process, and give its address."""
    check_reward(config, least_frames(config))
    reward = VideoReward(load_scorers(config, CPU)[0], config)
    score = score or (lambda videos, prompts: reward.total(reward.parts(videos, prompts, reward.weights)))
    service = reward_service(config.first, least_frames(config), score, CPU, batch, 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener, serving(service, listener) as url:
        yield url


def remote(url: str, retries: int = 0, **settings: str) -> VideoReward:
    """A reward of one scorer that asks the server."""
    part = ScorerConfig(kind="http", frames="all", settings={"url": url, **settings})
    config = RewardConfig(scorers={"mine": part}, retries=retries)
    check_reward(config, VIDEO.shape[2])
    return VideoReward(load_scorers(config, CPU)[0], config)


def scores(reward: VideoReward, video=VIDEO, prompts=PROMPTS) -> torch.Tensor:
    return reward.total(reward.parts(video, tuple(prompts), reward.weights))


def local(config: RewardConfig, video=VIDEO) -> torch.Tensor:
    return scores(VideoReward(load_scorers(config, CPU)[0], config), video)


HEALTHY = (200, {"name": "foreign", "protocol": 1, "min_frames": 2})


# Numbers.


@pytest.mark.parametrize(
    "config",
    [
        SHARPNESS,
        RewardConfig(kind="motion_smoothness", frames="all"),
        RewardConfig(path="tiny", frames="all"),
        RewardConfig(path="tiny", weight=0.3, scorers={"saturation": ScorerConfig(weight=2.0, frames="all")}),
        RewardConfig(kind="clip", frames="all", top_fraction=0.5),
    ],
    ids=["sharpness", "motion", "hpsv3", "sum", "clip"],
)
def test_served_scores_are_bit_for_bit_those_of_this_process(config, tmp_path):
    if config.kind == "clip":
        config = replace(config, path=str(save_clip(tmp_path)))
    with served(config) as url:
        assert torch.equal(scores(remote(url)), local(config))


def test_requests_are_cut_into_batches():
    sizes = []

    def score(videos, prompts):
        sizes.append(len(videos))
        return videos.flatten(1).mean(1)

    with served(SHARPNESS, 1, score) as url:
        part = ScorerConfig(kind="http", frames="all", batch=2, settings={"url": url})
        torch.testing.assert_close(local(RewardConfig(scorers={"mine": part})), VIDEO.flatten(1).mean(1))
    assert sizes == [2, 2, 1]


def test_clients_at_the_same_time_get_their_own_scores():
    """Videos of two sizes; the server scores equal sizes together."""
    small, calls = VIDEO[..., :8], []

    def score(videos, prompts):
        calls.append(len(videos))
        return videos.flatten(1).mean(1)

    with served(SHARPNESS, 8, score) as url:
        results: dict[int, torch.Tensor] = {}
        reward = remote(url)

        def client(i):
            results[i] = scores(reward, (VIDEO, small)[i % 2][i % 5 : i % 5 + 1], PROMPTS[i % 5 : i % 5 + 1])

        threads = [threading.Thread(target=client, args=(i,)) for i in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for i in range(20):
        torch.testing.assert_close(results[i], (VIDEO, small)[i % 2][i % 5].mean()[None])
    assert sum(calls) == 20 and max(calls) <= 8


def test_the_transport_is_exact_or_rounds_to_8_bits():
    assert torch.equal(from_json(to_json(VIDEO, "float32")), VIDEO)
    assert torch.equal(from_json(to_json(VIDEO.double(), "float32")), VIDEO)
    rounded = from_json(to_json(VIDEO, "uint8"))
    assert torch.equal(rounded, (255 * VIDEO).round() / 255)
    strided = VIDEO.movedim(1, -1).contiguous().movedim(-1, 1)
    assert to_json(strided, "float32") == to_json(VIDEO, "float32")
    with served(SHARPNESS) as url:
        assert torch.equal(scores(remote(url, encoding="uint8")), local(SHARPNESS, rounded))


# What is refused before training.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"reward\.scorers\.mine\.settings\.url must be given"),
        (
            {"url": "localhost:8000"},
            "url must begin with http:// or https:// and name a host, .* but is 'localhost:8000'",
        ),
        ({"url": "http://h", "timeout": "0"}, r"mine\.settings\.timeout must be above 0 and at most 1e\+07, not 0"),
        ({"url": "http://h", "token_variable": "NO_SUCH_TOKEN"}, "the environment has no NO_SUCH_TOKEN"),
        ({"url": "http://h", "encoding": "png"}, r"mine\.settings\.encoding must be one of float32, uint8, not 'png'"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    part = ScorerConfig(kind="http", settings=settings)
    with pytest.raises(UserError, match=message):
        check_reward(RewardConfig(scorers={"mine": part}), 5)


def test_an_absent_server_is_named():
    with pytest.raises(UserError, match=r"mine\.settings\.url: http://127\.0\.0\.1:\d+/health gave no answer: .*start"):
        remote(f"http://127.0.0.1:{free_port()}")


@pytest.mark.parametrize(
    ("answer", "settings", "message"),
    [
        ((200, {"name": "x", "protocol": 2, "min_frames": 1}), {}, "speaks protocol 2, and this program 1"),
        (
            (200, {"name": "x", "protocol": 1, "min_frames": 5}),
            {},
            "x at .* needs at least 5 frames of a video",
        ),
        (HEALTHY, {"name": "other"}, r"mine\.settings\.name is other, but the server at .* is foreign"),
        ((200, ["up"]), {}, r"/health answered \['up'\]; expected name, protocol and min_frames"),
        ((200, "<html>"), {}, "answered with no JSON: '<html>'"),
        ((404, "no such page"), {}, "/health refused the request with code 404: no such page"),
        ((503, "loading"), {}, "answered with code 503: loading; start the server first"),
    ],
)
def test_a_server_that_does_not_fit_is_refused(answer, settings, message):
    with answering(answer) as (url, _), pytest.raises(UserError, match=message):
        remote(url, **settings)


# Failures of a request.


def test_faults_are_retried_as_often_as_reward_retries_says(unchecked):
    good = (200, {"scores": [1, 2.5]})
    faults = [(503, "busy"), (429, "slow down"), (200, None)]
    with answering(HEALTHY, *faults, good) as (url, asked):
        reward = remote(url, retries=3)
        assert scores(reward, VIDEO[:2], PROMPTS[:2]).tolist() == [1.0, 2.5]
        assert reward.retried == 3 and [path for path, _, _ in asked] == ["/health"] + 4 * ["/score"]
    with answering(HEALTHY, *faults, good) as (url, _), pytest.raises(ConnectionError, match="503: busy"):
        scores(remote(url), VIDEO[:2], PROMPTS[:2])


def test_no_answer_in_time_is_a_fault():
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        part = ScorerConfig(
            kind="http", settings={"url": f"http://127.0.0.1:{silent.getsockname()[1]}", "timeout": "0.05"}
        )
        scorer = load_scorers(RewardConfig(scorers={"mine": part}), CPU)[0]["mine"]
        with pytest.raises(TimeoutError, match=r"gave no answer in 0\.05 s"):
            scorer(VIDEO, PROMPTS)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((400, "prompt 0 is too long"), "/score refused the request with code 400: prompt 0 is too long"),
        ((200, {"scores": [1.0]}), "gave 1 scores for 2 videos"),
        ((200, {"scores": [1.0, None]}), r"1 of 2 samples cannot be scored: .* answered null"),
        ((200, {"scores": [1.0, "2"]}), r"answered .*'2'.*; expected \{'scores': \[numbers or null\]\}"),
        ((200, {"scores": "many"}), "expected {'scores'"),
        ((200, '{"scores": [1.0, NaN]}'), "the score of sample 1 .* is not finite"),
    ],
)
def test_a_wrong_answer_is_not_retried(answer, message):
    with answering(HEALTHY, answer, (200, {"scores": [1, 2]})) as (url, asked):
        with pytest.raises(UserError, match=message):
            scores(remote(url, retries=5), VIDEO[:2], PROMPTS[:2])
        assert len(asked) == 2


def test_a_redirect_is_not_followed(monkeypatch):
    """The token would go to another server."""
    monkeypatch.setenv("REWARD_TOKEN", "secret")
    with contextlib.ExitStack() as servers:
        other, asked_there = servers.enter_context(answering((200, {"scores": [9.0]})))
        url, _ = servers.enter_context(answering(HEALTHY, (307, f"Location: {other}/score")))
        reward = remote(url, token_variable="REWARD_TOKEN")
        with pytest.raises(UserError, match=f"/score redirects to '{other}/score': give that server's own address"):
            scores(reward, VIDEO[:1], ["a"])
    assert asked_there == []


def test_an_answer_that_never_ends_is_a_fault():
    """One byte after the other: each comes in time, and the whole does not."""
    with socket.create_server(("127.0.0.1", 0)) as dripping:
        ended = threading.Event()

        def drip():
            client, _ = dripping.accept()
            with client, contextlib.suppress(OSError):
                client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:  # until the client hangs up
                    client.sendall(b" ")
            ended.set()

        thread = threading.Thread(target=drip)
        thread.start()
        url = f"http://127.0.0.1:{dripping.getsockname()[1]}"
        with pytest.raises((TimeoutError, UserError), match=r"gave no answer in 0\.2 s|more than 67108864 bytes"):
            exchange(url, "score", timeout=0.2)
        assert ended.wait(30)
        thread.join()


def test_an_answer_that_is_too_large_or_nested_is_one_line():
    with answering((200, "[" * 100_000)) as (url, _), pytest.raises(UserError, match="answered with no JSON"):
        exchange(url, "score", timeout=30)
    with answering((200, "1" * 2000)) as (url, _), pytest.raises(UserError, match="more than 1000 bytes"):
        exchange(url, "score", timeout=30, most_bytes=1000)


@pytest.mark.parametrize(
    "url", ["http://[::1", "http:///x", "http://a:99999999", "http://\0", "ftp://a", " http://a", ""]
)
def test_an_odd_address_is_one_line(url):
    with pytest.raises(UserError, match=r"settings\.url .*(is no address|must begin with http)"):
        check_reward(RewardConfig(kind="http", settings={"url": url} if url else {"url": " "}), 5)


def test_a_password_in_an_address_is_refused_and_not_shown():
    with pytest.raises(UserError, match=r"'http://\*\*\*@host' holds a password.*token_variable") as caught:
        check_reward(RewardConfig(kind="http", settings={"url": "http://me:hunter2@host"}), 5)
    assert "hunter2" not in str(caught.value)


def test_a_resumed_run_may_have_another_address(tmp_path):
    url = ["--reward.scorers.mine.kind", "http", "--reward.scorers.mine.settings.url"]
    save(parse([*url, "http://a"]), tmp_path / "config.yaml")
    resumed = ["--resume", str(tmp_path), "--reward.scorers.mine.settings.url", "http://b"]
    with pytest.raises(UserError, match=r"add --allow reward\.scorers\.mine\.settings\.url"):
        check_resumable(parse(resumed), tmp_path / "config.yaml")
    allowed = parse([*resumed, "--allow", "reward.scorers.mine.settings.url"])
    assert check_resumable(allowed, tmp_path / "config.yaml") == [
        "reward.scorers.mine.settings.url: 'http://a' -> 'http://b'"
    ]


def test_the_access_token_is_sent_and_never_saved(monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", "secret")
    with answering(HEALTHY, (200, {"scores": [1, 2]})) as (url, asked):
        scores(remote(url, token_variable="REWARD_TOKEN"), VIDEO[:2], PROMPTS[:2])
    assert [token for _, token, _ in asked] == ["Bearer secret"] * 2


def test_a_failure_of_the_served_scorer_reaches_the_client(capfd):
    def broken(videos, prompts):
        if "wrong" in prompts:
            raise UserError("the prompt is wrong")
        return {}[prompts[0]]

    with served(SHARPNESS, score=broken) as url:
        with pytest.raises(UserError, match="code 400: the prompt is wrong"):
            scores(remote(url, retries=1), VIDEO[:1], ["wrong"])
        reward = remote(url, retries=1)
        with pytest.raises(ConnectionError, match=r"code 500: a fault of the server: its terminal shows it"):
            scores(reward)
        assert reward.retried == 1
    assert "KeyError: 'a red circle'" in capfd.readouterr().err


def test_a_server_that_ends_answers_what_it_has_received():
    started, go, results = threading.Event(), threading.Event(), []

    def score(videos, prompts):
        started.set()
        assert go.wait(30)
        return videos.flatten(1).mean(1)

    with contextlib.ExitStack() as stack:
        url = stack.enter_context(served(SHARPNESS, score=score))
        reward, address = remote(url), ("127.0.0.1", int(url.rpartition(":")[2]))
        client = threading.Thread(target=lambda: results.append(scores(reward)))
        client.start()
        assert started.wait(30)
        closing = threading.Thread(target=stack.pop_all().close)
        closing.start()
        with pytest.raises(OSError):
            while True:  # until it takes no more
                socket.create_connection(address, timeout=1).close()
        go.set()
        client.join()
        closing.join()
    torch.testing.assert_close(results, [VIDEO.flatten(1).mean(1)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"protocol": 2}, "protocol 1"),
        ({"prompts": ["a", 1]}, "prompts must be a list of texts"),
        ({"prompts": ["a"]}, "2 videos but 1 prompts"),
        ({"videos": 3}, "videos must be an object with shape, encoding and data"),
        ({"shape": [2, 3, 0, 4, 4]}, "videos.shape must be"),
        ({"shape": [2, 3, 1, 4]}, "videos.shape must be"),
        ({"shape": [2, 3, 2, 4, 5]}, "bytes, which do not fit float32 of shape"),
        ({"encoding": "png"}, "videos.encoding must be float32 or uint8, not 'png'"),
        ({"data": "###"}, "videos.data is no base64"),
        (
            {"data": base64.b64encode((VIDEO[:2, :, :2, :4, :4] + 1).numpy().tobytes()).decode()},
            "expected values in [0, 1]",
        ),
        ({"frames": 1}, "motion_smoothness needs at least 3 frames of a video, not 2"),
    ],
)
def test_a_wrong_request_is_answered_with_its_fault(change, message):
    config = RewardConfig(kind="motion_smoothness", frames="all") if "frames" in change else SHARPNESS
    videos = to_json(SMALL, "float32")
    body = {"protocol": 1, "prompts": ["a", "b"], "videos": videos}
    body |= {key: value for key, value in change.items() if key in body}
    body["videos"] = {**videos, **change} if body["videos"] is videos else body["videos"]
    with served(config) as url, pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(posting(f"{url}/score", json.dumps(body)))
    with caught.value as error:
        assert error.code == 400 and message in error.read().decode()


# The command.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reward": "nice"}, "reward.kind nice is no scorer; have"),
        ({"reward": "clip"}, "reward.path must be the folder of a clip scorer"),
        ({"reward": "absent.yaml"}, "--reward absent.yaml: no such file"),
        ({"reward": "absent.yaml", "path": "x"}, "leave --path out"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        serve_reward(**arguments)


def test_a_port_in_use_is_refused():
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(UserError, match="choose another, or 0 for a free"),
    ):
        serve_reward("sharpness", port=taken.getsockname()[1])


def test_a_run_has_the_metrics_of_the_local_one(tmp_path):
    """A set of two scorers in one server, by a file; and a run that resumes with it."""
    part = "{kind: hpsv3, path: %s, weight: 0.5, frames: every}" % HPSV3  # noqa: UP031
    (tmp_path / "set.yaml").write_text(f"reward: {{scorers: {{a: {part}, sharpness: {{weight: 0.5, scale: 3}}}}}}")
    (tmp_path / "sum.py").write_text(SUM.replace("FOLDER", str(HPSV3)))
    # The first scorer is held out, so that both runs train on the served one alone.
    same = ["--reward.weight", "0", "--reward.scorers.mine.frames", "all", "--validate-every", "1", "--steps", "2"]
    run("dance_grpo", tmp_path / "local", *same, "--reward.scorers.mine.kind", f"{tmp_path / 'sum.py'}:score")
    with serving_process("serve-reward", "--reward", str(tmp_path / "set.yaml"), "--device", "cpu") as (line, _):
        url = line.split()[-1]
        assert line.startswith(f"set at {url}: --reward.scorers.NAME.kind http ")
        asked = ["--reward.scorers.mine.kind", "http", "--reward.scorers.mine.settings.url", url]
        run("dance_grpo", tmp_path / "remote", *same, *asked)
    assert metrics_of(tmp_path / "remote") == metrics_of(tmp_path / "local")


SUM = """
from functools import cache

import torch

from unified_trainer.rewards.base import RewardConfig, ScorerConfig
from unified_trainer.rewards.scorers import load_scorers
from unified_trainer.rewards.reward import VideoReward


@cache
def reward():
    a = ScorerConfig(kind="hpsv3", path="FOLDER", weight=0.5, frames="every")
    config = RewardConfig(scorers={"a": a, "sharpness": ScorerConfig(weight=0.5, scale=3.0)})
    return VideoReward(load_scorers(config, torch.device("cpu"))[0], config)


def score(videos, prompts):
    return reward().total(reward().parts(videos, prompts, reward().weights))
"""
