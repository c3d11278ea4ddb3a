"""A student behind HTTP: its videos are those of this process, and wrong requests, answers and faults are named."""

import base64
import contextlib
import io
import json
import signal
import socket
import threading
import urllib.request

import av
import numpy as np
import pytest
import torch
from answering import answering, posting, serving_process
from helpers import Recorder, flags, run, tiny_codec

import unified_trainer as ut
from unified_trainer.basics.requests import Image
from unified_trainer.data.video_files import to_uint8
from unified_trainer.rewards.image_json import images_to_json
from unified_trainer.rewards.video_json import from_json, to_json
from unified_trainer.run.settings.command_line import parse
from unified_trainer.run.settings.config import plain
from unified_trainer.tools.serve import serve as command
from unified_trainer.tools.serve.serve import serve, student_service
from unified_trainer.tools.serve.web_server import serving

pytestmark = pytest.mark.slow  # seconds together

PNG = images_to_json([Image.of(np.zeros((4, 4, 3), np.uint8))], 4, 4)
PROMPTS = ["a red circle moving left", "a blue square moving up", "a green triangle"]
SMALL = {"recipe": "tiny", "method": "finetune", "video.frames": 5, "video.height": 32, "video.width": 32}
SMALL |= {"sampler.num-steps": 2, "sampler.solver": "sde", "sampler.guidance-scale": 1.0}
BODY = {"protocol": 1, "prompts": PROMPTS[:2], "seeds": [0, 1], "encoding": "uint8"}


@pytest.fixture(scope="module")
def student() -> ut.Student:
    return ut.Student(parse(flags(SMALL)), Recorder(), tiny_codec())


@contextlib.contextmanager
def served(student: ut.Student, batch: int = 8, wait: float = 0.0):
    """Serve a student in this process, and give its address."""
    service = student_service("small@0", student, student.codec, batch, wait, "5afe")
    with socket.create_server(("127.0.0.1", 0)) as listener, serving(service, listener) as url:
        yield url


def posted(url: str, body) -> dict:
    with urllib.request.urlopen(posting(f"{url}/sample", json.dumps(body))) as answer:
        return json.load(answer)["videos"]


# Videos.


@pytest.mark.parametrize("batch", [8, 2])
def test_videos_are_bit_for_bit_those_of_this_process(student, batch):
    """Also if the server generates a request in parts, or the client asks in parts."""
    ours = student.sample(PROMPTS, seed=5, batch=batch)
    with served(student, batch) as url:
        assert torch.equal(ut.RemoteStudent(url).sample(PROMPTS, seed=5), ours)
    with served(student) as url:
        assert torch.equal(ut.RemoteStudent(url).sample(PROMPTS, seed=5, batch=batch), ours)
    assert ours.shape == (3, 3, 5, 32, 32) and float((ours[0] - ours[1]).abs().max()) > 0.01


def test_a_server_says_what_it_is(student):
    with served(student) as url, urllib.request.urlopen(f"{url}/health") as answer:
        about = {"name": "small@0", "protocol": 1, "frames": 5, "height": 32, "width": 32, "fps": 8.0}
        about |= {"latents": [16, 2, 2, 2], "weights": "5afe", "device": "cpu", "images": [0, 0]}
        about |= {"sampler": json.loads(json.dumps(plain(student.run)["sampler"]))}
        assert json.load(answer) == about


def test_clients_at_the_same_time_get_their_own_videos(student, monkeypatch):
    """Six clients with two samples each: the server generates four at a time, each with its own seed."""
    sizes, results = [], {}

    def counted(student, codec, prompts, seeds):
        sizes.append(len(prompts))
        return draw_latents(student, codec, prompts, seeds)

    draw_latents = command.draw_latents
    monkeypatch.setattr(command, "draw_latents", counted)
    with served(student, 4, 60.0) as url:

        def client(i):
            prompts = [PROMPTS[i % 3], PROMPTS[(i + 1) % 3]]
            results[i] = prompts, ut.RemoteStudent(url).sample(prompts, seed=100 * i)

        threads = [threading.Thread(target=client, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sizes == [4, 4, 4]
    for i, (prompts, video) in results.items():
        torch.testing.assert_close(video, student.sample(prompts, seed=100 * i), rtol=0, atol=1e-5)


def test_videos_of_8_bits_and_mp4_files(student):
    ours = student.sample(PROMPTS[:2], seed=7)
    with served(student) as url:
        rounded = (255 * ours).round() / 255
        assert torch.equal(ut.RemoteStudent(url, encoding="uint8").sample(PROMPTS[:2], seed=7), rounded)
        assert torch.equal(from_json(posted(url, BODY | {"seeds": [7, 8]})), rounded)
        files = posted(url, BODY | {"seeds": [7, 8], "encoding": "mp4"})
    assert files["shape"] == [2, 3, 5, 32, 32] and files["encoding"] == "mp4" and len(files["data"]) == 2
    for data, frames in zip(files["data"], to_uint8(ours), strict=True):
        with av.open(io.BytesIO(base64.b64decode(data))) as file:
            assert file.streams.video[0].average_rate == 8
            decoded = np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])
        assert decoded.shape == frames.shape
        assert abs(decoded.astype(float) - frames).mean() < 25  # H.264 loses a little


# Failures.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"protocol": 2}, "must be an object with protocol 1"),
        ({"prompts": "a red circle"}, "prompts must be a list of texts"),
        ({"prompts": [], "seeds": []}, "prompts must not be empty"),
        ({"seeds": [0]}, "2 prompts but 1 seeds, expected one seed for each"),
        ({"seeds": [0, 1.5]}, "seeds must be a list of integers"),
        ({"seeds": [0, True]}, "seeds must be a list of integers"),
        ({"seeds": [0, 2**63]}, "seeds must be a list of integers of 64 bits"),
        ({"seeds": 3}, "seeds must be a list of integers"),
        ({"encoding": "gif"}, "encoding must be float32, uint8 or mp4, not 'gif'"),
        ({"images": ["aaaa", "aaaa"]}, "image 1 is no PNG file in base64"),
        ({"images": 2 * PNG}, f"small@0 takes 0 condition images, not 1 ({PROMPTS[0]!r}): leave images out"),
        ({"encodng": "mp4"}, "key of a request 'encodng' is not known; did you mean encoding?"),
    ],
)
def test_a_wrong_request_is_answered_with_its_fault(student, change, message):
    with served(student) as url, pytest.raises(urllib.error.HTTPError) as caught:
        posted(url, BODY | change)
    with caught.value as error:
        assert error.code == 400 and message in error.read().decode()


def test_a_failure_of_the_student_reaches_the_client_and_the_server_goes_on(student, monkeypatch, capfd):
    def broken(*_):
        raise KeyError("absent")

    ours = student.sample(PROMPTS)
    with served(student) as url:
        with monkeypatch.context() as patch:
            patch.setattr(command, "draw_latents", broken)
            with pytest.raises(ConnectionError, match=r"code 500: a fault of the server: its terminal shows it$"):
                ut.RemoteStudent(url).sample(PROMPTS)
            assert "KeyError: 'absent'" in capfd.readouterr().err
        assert torch.equal(ut.RemoteStudent(url).sample(PROMPTS), ours)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((400, "no such seed"), "/sample refused the request with code 400: no such seed"),
        ((200, ["videos"]), r"/sample answered \['videos'\]; expected an object with videos"),
        ((200, {"scores": [1.0]}), "videos must be an object with shape, encoding and data"),
        ((200, {"videos": to_json(torch.zeros(1, 3, 1, 2, 2), "uint8")}), "gave 1 videos for 2 prompts"),
    ],
)
def test_a_wrong_answer_is_named(answer, message):
    with answering(answer) as (url, _), pytest.raises(ut.UserError, match=message):
        ut.RemoteStudent(url).sample(PROMPTS[:2])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"url": "localhost:8000"},
            "url must begin with http:// or https:// and name a host, .* but is 'localhost:8000'",
        ),
        ({"url": "http://h", "timeout": 0.0}, r"timeout must be above 0 and at most 1e\+07, not 0"),
    ],
)
def test_wrong_settings_of_a_client_are_refused(settings, message):
    with pytest.raises(ut.UserError, match=message):
        ut.RemoteStudent(**settings)
    with pytest.raises(ut.UserError, match="at least one prompt and a batch of at least 1, not 0, 8"):
        ut.RemoteStudent("http://h").sample([])


# The command.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"run": "absent", "port": 0}, "absent"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, unchanged_signals):
    with pytest.raises(ut.UserError, match=message):
        serve(**arguments)


@pytest.fixture
def unchanged_signals():
    """The handlers of this process, which a command that serves replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_command_serves_a_run_and_answers_what_it_has_received(tmp_path):
    """A request whose body comes after SIGTERM is answered: the server had begun to read it."""
    run("finetune", tmp_path / "mine", "--student.ema-decay", "0.5", "--student.learning-rate", "1e-2")
    spec = f"{tmp_path / 'mine'}:ema"
    ours = ut.Student.load(spec, device="cpu").sample(PROMPTS[:2], seed=3)
    with serving_process("serve", spec, "--device", "cpu") as (line, process):
        url = line.split()[-1].removesuffix("/sample")
        assert line == f"{spec} at {url}: POST {url}/sample\n"
        with urllib.request.urlopen(f"{url}/health") as answer:
            assert json.load(answer)["name"] == "mine@1:ema"
        assert torch.equal(ut.RemoteStudent(url).sample(PROMPTS[:2], seed=3), ours)
        body = json.dumps(BODY | {"seeds": [3, 4]}).encode()
        head = "POST /sample HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as asking:
            reply = asking.makefile("rb")
            asking.sendall(head.encode())
            assert reply.readline().startswith(b"HTTP/1.1 100") and reply.readline() == b"\r\n"
            process.send_signal(signal.SIGTERM)
            asking.sendall(body)
            answered = reply.read()
    headers, _, text = answered.partition(b"\r\n\r\n")
    assert headers.startswith(b"HTTP/1.1 200")
    assert torch.equal(from_json(json.loads(text)["videos"]), (255 * ours).round() / 255)


def test_a_batch_whose_cache_does_not_fit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "serve_until_stopped", lambda door, load, said: load())
    causal = {"sampler.chunks.chunk-frames": 1, "sampler.guidance-scale": 1.0, "algorithm.forcing": "teacher"}
    run("finetune", tmp_path / "causal", *flags(causal))
    with pytest.raises(ut.UserError, match=r"the student's KV cache needs .*: lower --batch"):
        serve(str(tmp_path / "causal"), batch=10**9)
