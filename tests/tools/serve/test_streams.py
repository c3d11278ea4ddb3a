"""Videos over a websocket: their frames are those of this process, prompts switch, and clients hold up nobody."""

import contextlib
import io
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from answering import posting
from helpers import ALONE, RecordingStudent, flags, small_causal, small_model, tiny_codec
from PIL import Image
from stream_client import Closed, Refused, Websocket
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import unified_trainer as ut
from unified_trainer.basics.actions import Actions
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Request
from unified_trainer.data.video_files import to_uint8
from unified_trainer.models.base import ActionForm
from unified_trainer.models.wan.actions import with_actions
from unified_trainer.models.wan.causal import CausalWanModel
from unified_trainer.rewards.video_json import from_json
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.role import TrainableConfig
from unified_trainer.run.settings.command_line import parse
from unified_trainer.sampling.solver import predict_chunks
from unified_trainer.tools.sample.latents import Stream, begin_samples
from unified_trainer.tools.serve import streams
from unified_trainer.tools.serve.guard import Door
from unified_trainer.tools.serve.serve import Live, student_service
from unified_trainer.tools.serve.web_server import serving

pytestmark = pytest.mark.slow  # seconds together

ONE, OTHER = "a red circle moving left", "a blue square moving up"
SMALL = {"recipe": "tiny", "method": "finetune", "video.frames": 9, "video.height": 32, "video.width": 32}
SMALL |= {"sampler.num-steps": 2, "sampler.solver": "sde", "sampler.guidance-scale": 1.0}
SMALL |= {"sampler.chunks.chunk-frames": 1, "algorithm.forcing": "teacher"}
MOVES = ("left", "right", "up", "down", "stop")
FORM = ActionForm(len(MOVES), 4)
START = {"protocol": 1, "prompt": ONE, "seed": 5, "frames": 9, "encoding": "uint8"}


@pytest.fixture(scope="module")
def student() -> ut.Student:
    """A causal student without a window."""
    role = RecordingStudent("student", Backbone(small_causal(), ALONE, trained=True), TrainableConfig())
    return ut.Student(parse(flags(SMALL)), role, tiny_codec())


@pytest.fixture(scope="module")
def windowed(student) -> ut.Student:
    return with_chunks(student, window_frames=2)


@pytest.fixture(scope="module")
def acting(windowed) -> ut.Student:
    """A student with a window that takes actions, with guidance."""
    model = with_actions(CausalWanModel)(small_model().network, None, FORM)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model._layer.reset_parameters()
    role = RecordingStudent("student", Backbone(model, ALONE, trained=True), TrainableConfig())
    run = replace(windowed.run, sampler=replace(windowed.run.sampler, guidance_scale=2.0))
    return replace(windowed, role=role, run=run)


def with_chunks(student: ut.Student, **changes) -> ut.Student:
    chunks = replace(student.run.sampler.chunks, **changes)
    return replace(student, run=replace(student.run, sampler=replace(student.run.sampler, chunks=chunks)))


@contextlib.contextmanager
def served(
    student: ut.Student, most: int = 2, token_variable: str = "", images: tuple[int, int] = (0, 0), **live
) -> Iterator[str]:
    service = student_service("small@0", student, student.codec, 8, 0.0, "5afe", images, Live(most, **live))
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        yield stack.enter_context(serving(service, listener, Door(*listener.getsockname(), token_variable)))


def chunk_of(client: Websocket) -> tuple[dict, np.ndarray]:
    """Return the header and the frames of the next chunk."""
    head, data = client.take(), client.take()
    if head["encoding"] == "uint8":
        return head, np.frombuffer(data, np.uint8).reshape(head["shape"])
    return head, np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).reshape(head["shape"])


def frames_of(student: ut.Student, prompts: list[str], seed: int = 5, moves: list[int] | None = None):
    """Generate the chunks of a video in this process, each with its prompt, and with one move for its frames."""
    video = Stream(student, student.codec, [Request(prompts[0])], [seed], None if moves is None else FORM)
    rows = [None] * len(prompts) if moves is None else [torch.tensor([[row_of(move)]]) for move in moves]
    made = (video.next([Request(prompt)], row) for prompt, row in zip(prompts, rows, strict=True))
    return [to_uint8(video.decode(x0))[0] for x0 in made]


def row_of(move: int) -> list[float]:
    return [float(i == move) for i in range(FORM.size)]


def last_words(client: Websocket) -> tuple[str, int]:
    """Return the error with which a websocket ends, and its code."""
    said = client.take()
    with pytest.raises(Closed) as closed:
        client.take()
    return said["error"], closed.value.code


# Frames.


def test_a_stream_is_the_video_of_the_request(student):
    """POST /sample, and so Student.sample, gives the same frames: here in chunks of 1, 4 and 4."""
    whole = to_uint8(student.sample([ONE], seed=5))[0]
    with served(student) as url, Websocket(url) as client:
        client.send(START)
        chunks = [chunk_of(client) for _ in range(3)]
        end = client.take()
        with pytest.raises(Closed) as closed:
            client.take()
    assert np.array_equal(np.concatenate([frames for _, frames in chunks]), whole)
    heads = [head for head, _ in chunks]
    assert [head["chunk"] for head in heads] == [0, 1, 2] and [head["frames"] for head in heads] == [1, 4, 4]
    assert {head["prompt"] for head in heads} == {ONE} and {head["first"] for head in heads} == {end["first"]}
    assert end["end"] and end["frames"] == 9 and closed.value.code == 1000
    assert end["seconds"] == pytest.approx(sum(head["seconds"] for head in heads)) and end["first"] > 0


def test_pictures_hold_the_frames_below_one_another(student):
    """PNG keeps every bit; JPEG loses a little."""
    raw = frames_of(student, [ONE] * 2)
    with served(student) as url:
        for encoding, error in (("png", 0), ("jpeg", 6)):
            with Websocket(url) as client:
                client.send(START | {"encoding": encoding})
                for frames in raw:
                    assert abs(chunk_of(client)[1].astype(float) - frames).mean() <= error


@pytest.mark.parametrize("chunks", [{}, {"independent_first_frame": True, "chunk_frames": 2}])
def test_an_endless_video_draws_new_noise_where_that_of_a_video_ends(windowed, chunks):
    """The frames up to there are those of a video; with the prompt of the start no chunk equals an earlier one."""
    student = with_chunks(windowed, **chunks)
    made = frames_of(student, [ONE] * 8)
    whole = np.concatenate(made)
    assert np.array_equal(whole[:9], to_uint8(student.sample([ONE], seed=5))[0])
    later = [frames for frames in made if len(frames) > 1]
    assert all((one != other).mean() > 0.1 for i, one in enumerate(later) for other in later[:i])
    assert {len(frames) for frames in made[1:]} == {4 * student.run.sampler.chunks.chunk_frames}


def test_a_prompt_switches_at_the_next_chunk(student):
    """The client asks for chunks one by one, and sends a prompt with the request for the third."""
    ours, same = frames_of(student, [ONE, ONE, OTHER]), frames_of(student, [ONE] * 3)
    with served(student) as url, Websocket(url) as client:
        client.send(START | {"chunks": 2})
        seen = [chunk_of(client), chunk_of(client)]
        client.send({"prompt": OTHER, "chunks": 1})
        seen.append(chunk_of(client))
    assert [head["prompt"] for head, _ in seen] == [ONE, ONE, OTHER]
    assert all(np.array_equal(frames, own) for (_, frames), own in zip(seen, ours, strict=True))
    assert np.array_equal(ours[1], same[1]) and not np.array_equal(ours[2], same[2])


def test_chunks_cost_the_same_once_the_window_is_full(student, windowed):
    """Counted, not timed: FLOPs of networks and VAE, with attention as products, which torch counts on a CPU."""
    costs = {}
    for name, one in (("all", student), ("window", windowed)):
        video, costs[name] = Stream(one, one.codec, [Request(ONE)], [0]), []
        for _ in range(7):
            with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
                video.decode(video.next())
            costs[name].append(counter.get_total_flops())
    window, rises = costs["window"], np.diff(costs["all"][1:])
    assert window[0] < window[1] < window[2] < window[3] and len({*window[3:]}) == 1
    assert rises[0] > 0 and len({*rises[1:]}) == 1  # every chunk costs as much more than the one before it
    assert costs["all"][:3] == window[:3]


# Actions.


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_a_stream_makes_the_chunks_of_predict_chunks(acting, scale):
    """Bit for bit, of actions that are known before, with a row for each of a chunk's frames or one for all."""
    chunks = {"chunk_frames": 2, "independent_first_frame": True, "window_frames": 3, "context_noise": 0.1}
    student = with_chunks(acting, **chunks)
    student = replace(student, run=replace(student.run, sampler=replace(student.run.sampler, guidance_scale=scale)))
    whole = torch.randn(2, 9, FORM.size, generator=torch.Generator().manual_seed(1))
    whole[:, 1:] = whole[:, 1:2]
    plain = [Request(ONE), Request(OTHER)]
    known = [replace(request, actions=Actions.of(one, "")) for request, one in zip(plain, whole.numpy(), strict=True)]
    batch_of, draw = begin_samples(student, student.codec, [5, 6])
    expected = predict_chunks(student.role, draw(0), batch_of(known), student.run.sampler, draw, [1, 1]).detach()
    for own in (whole[:, 1:], whole[:, 1:2]):
        stream, parts = Stream(student, student.codec, plain, [5, 6], FORM), []
        for rows in (whole[:, :1], own):
            for wrong in (None, torch.zeros(2, 3, FORM.size), rows[:1], rows[..., 1:], rows * torch.nan):
                with pytest.raises(UserError, match=r"actions of a chunk|a chunk takes actions"):
                    stream.next(actions=wrong)
            parts.append(stream.next(actions=rows))
        assert torch.equal(torch.cat(parts, 2), expected)
    with pytest.raises(UserError, match="a chunk takes no actions, not"):
        Stream(student, student.codec, known, [5, 6]).next(actions=whole)


def test_a_client_steers_chunk_by_chunk(acting):
    """Actions hold until others come, also past a switch of prompts; a chunk takes a row for each of its frames too."""
    ours = frames_of(acting, [ONE, ONE, OTHER, OTHER], moves=[4, 4, 4, 1])
    with served(acting, form=FORM, names=MOVES) as url, Websocket(url) as client:
        client.send(START | {"frames": 0, "chunks": 2, "actions": [row_of(4)]})
        seen = [chunk_of(client)[1], chunk_of(client)[1]]
        client.send({"prompt": OTHER, "chunks": 1})
        seen.append(chunk_of(client)[1])
        client.send({"actions": [row_of(1)] * 4, "chunks": 1})
        seen.append(chunk_of(client)[1])
        with urllib.request.urlopen(f"{url}/health") as answer:
            about = json.load(answer)["stream"]
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(posting(f"{url}/sample", '{"protocol": 1, "prompts": ["a"], "seeds": [0]}'))
        with refused.value as error:
            assert error.code == 400 and error.read().decode().startswith("this student takes actions")
    assert all(np.array_equal(frames, own) for frames, own in zip(seen, ours, strict=True))
    assert about == {"most_frames": 0, "streams": 2, "action_size": 5, "actions": list(MOVES)}


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({}, "actions are missing: this student takes rows of 5"),
        ({"actions": [[1, 0]]}, "actions must be rows of 5 numbers, not 2"),
        ({"actions": [[1, 0, 0, 0, None]]}, "actions of frame 0 are not finite"),
        ({"actions": [[0] * 5] * 3}, "a chunk takes actions [1, 1, 5], or one row for all its frames, not [1, 3, 5]"),
    ],
)
def test_wrong_actions_are_refused(acting, sent, message):
    with served(acting, form=FORM) as url, Websocket(url) as client:
        client.send(START | sent)
        said, code = last_words(client)
    assert message in said and code == 4400


# Several clients.


@pytest.fixture
def ended(monkeypatch) -> threading.Event:
    """Set when the server has done with a client."""
    done, serve = threading.Event(), streams.Streams._serve

    async def watched(self, websocket):
        await serve(self, websocket)
        done.set()

    monkeypatch.setattr(streams.Streams, "_serve", watched)
    return done


@pytest.fixture
def large(monkeypatch):
    """Pictures of 8 MiB, more than the buffers of a connection hold; raw numbers are as they were."""
    encoded = streams._encoded
    monkeypatch.setattr(
        streams, "_encoded", lambda frames, kind: bytes(2**23) if kind == "png" else encoded(frames, kind)
    )


def test_requests_are_answered_while_a_client_takes_nothing(windowed, large):
    """A client of large chunks reads no byte: others get their chunks, and POST its videos."""
    body = json.dumps({"protocol": 1, "prompts": [ONE], "seeds": [5], "encoding": "uint8"})
    whole = to_uint8(windowed.sample([ONE], seed=5))[0]
    with served(windowed) as url, Websocket(url) as stalled, Websocket(url) as client:
        stalled.send(START | {"frames": 0, "encoding": "png"})
        client.send(START)
        frames = np.concatenate([chunk_of(client)[1] for _ in range(3)])
        with urllib.request.urlopen(posting(f"{url}/sample", body)) as answer:
            video = from_json(json.load(answer)["videos"])
        assert np.array_equal(frames, whole) and np.array_equal(to_uint8(video)[0], whole)


def test_a_client_that_takes_nothing_is_sent_away(windowed, large, ended, monkeypatch):
    monkeypatch.setattr(streams, "IDLE_SECONDS", 0.5)
    with served(windowed, most=1) as url, Websocket(url) as stalled:
        stalled.send(START | {"frames": 0, "encoding": "png"})
        assert ended.wait(60)
        with Websocket(url) as client:
            client.send(START)
            assert chunk_of(client)[0]["chunk"] == 0


def test_a_stream_ends_at_the_last_position_of_the_network(windowed):
    """This network has 16 latent frames, of which the first has one frame."""
    with served(windowed) as url, Websocket(url) as client:
        client.send(START | {"frames": 0})
        frames = sum(len(chunk_of(client)[1]) for _ in range(16))
        said, code = last_words(client)
    assert frames == 61 and code == 4400 and said.startswith("latent frame 16 is beyond the 16 positions of this Wan")


def test_more_streams_than_there_is_room_for(student):
    with served(student, most=1) as url:
        with Websocket(url) as first:
            first.send(START | {"chunks": 1})
            chunk_of(first)
            with Websocket(url) as second:
                said, code = last_words(second)
            assert code == 4429 and said.startswith("1 videos are streamed already")
            first.send({"chunks": 2})
            assert [chunk_of(first)[0]["frames"] for _ in range(2)] == [4, 4]
            assert first.take()["end"]
            with pytest.raises(Closed):
                first.take()
        with Websocket(url) as third:
            third.send(START)
            assert chunk_of(third)[0]["frames"] == 1


def test_a_client_that_leaves_makes_room(student, ended):
    with served(student, most=1) as url:
        with Websocket(url) as client:
            client.send(START | {"chunks": 1})
            chunk_of(client)
        assert ended.wait(60)
        with Websocket(url) as client:
            client.send(START)
            assert chunk_of(client)[0]["chunk"] == 0


@pytest.mark.parametrize("sent", [[], [START | {"chunks": 1}]])
def test_an_idle_client_is_sent_away(student, monkeypatch, sent):
    monkeypatch.setattr(streams, "IDLE_SECONDS", 0.5)
    with served(student) as url, Websocket(url) as client:
        for message in sent:
            client.send(message)
            chunk_of(client)
        assert last_words(client) == ("the client sent or took nothing for 0.5 seconds", 4400)


def test_a_server_ends_while_it_streams(windowed):
    with served(windowed) as url:
        client = Websocket(url)
        client.send(START | {"frames": 0})
        chunk_of(client)
    with pytest.raises(Closed) as closed:
        while True:
            client.take()
    assert closed.value.code == 1012
    client.close()


# What is refused.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"protocol": 2}, "the message: protocol must be 1, not 2"),
        ({"prompt": 3}, "the message: prompt must be a valid string, not 3"),
        ({"seed": 1.5}, "the message: seed must be a valid integer, not 1.5"),
        ({"frames": -1}, "the message: frames must be greater than or equal to 0, not -1"),
        ({"frames": 0}, "frames must be from 1 to 9, not 0: a longer stream, or one without end, needs a student with"),
        ({"frames": 13}, "frames must be from 1 to 9, not 13"),
        ({"frames": 6}, "video.frames must be 4k + 1 for this VAE, not 6: set 5 or 9"),
        ({"encoding": "gif"}, "the message: encoding must be 'png', 'jpeg' or 'uint8', not 'gif'"),
        ({"chunks": -1}, "the message: chunks must be greater than or equal to 0, not -1"),
        ({"actions": [[1.0]]}, "this student takes no actions: leave actions out"),
        ({"image": "aaaa"}, "image 1 is no PNG file in base64"),
        ({"promt": OTHER}, "key of a message 'promt' is not known; did you mean prompt?"),
    ],
)
def test_a_wrong_start_is_answered_with_its_fault(student, change, message):
    with served(student) as url, Websocket(url) as client:
        client.send(START | change)
        said, code = last_words(client)
    assert message in said and code == 4400


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ("[" * 10_000, "the message is nested too deeply"),
        ("[1]", "the message must hold a JSON object"),
        ({"prompt": None}, "prompt must be a valid string"),
        ({"seed": 3}, "key of a message 'seed' is not known"),
        ({"prompt": "x" * 70_000}, "a message must be text in JSON of at most 65536 characters"),
    ],
)
def test_a_wrong_message_ends_the_stream(student, sent, message):
    with served(student) as url, Websocket(url) as client:
        client.send(START | {"chunks": 1})
        chunk_of(client)
        client.send(sent)
        said, code = last_words(client)
    assert message in said and code == 4400


def test_a_fault_of_the_student_ends_the_stream_and_not_the_server(student, monkeypatch, capfd):
    def broken(*_):
        raise KeyError("absent")

    with served(student) as url:
        with monkeypatch.context() as patch, Websocket(url) as client:
            patch.setattr(Stream, "next", broken)
            client.send(START)
            assert last_words(client) == ("a fault of the server: its terminal shows it", 4500)
        assert "KeyError: 'absent'" in capfd.readouterr().err
        with Websocket(url) as client:
            client.send(START)
            assert chunk_of(client)[0]["chunk"] == 0


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "evil.example"}, 421),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 421),
    ],
)
def test_a_page_of_another_site_opens_no_stream(student, headers, code):
    """A browser sends the origin of the page that opens a websocket, and asks no server whether it may."""
    with served(student) as url, pytest.raises(Refused) as refused:
        Websocket(url, **headers)
    assert refused.value.code == code


def test_a_stream_needs_the_token_of_its_server(student, monkeypatch):
    monkeypatch.setenv("SERVER_TOKEN", "abc")
    with served(student, token_variable="SERVER_TOKEN") as url:
        with pytest.raises(Refused) as refused:
            Websocket(url)
        assert refused.value.code == 401
        with Websocket(url, Authorization="Bearer abc", Host="node7.cluster:8000") as client:
            client.send(START)
            assert chunk_of(client)[0]["frames"] == 1


def test_a_student_of_images_asks_for_one(windowed):
    with served(windowed, images=(1, 1)) as url, Websocket(url) as client:
        client.send(START)
        said, _ = last_words(client)
    assert said == f"small@0 takes 1 condition images, not 0 ({ONE!r}): send image"


def test_a_student_that_streams_nothing(student):
    whole = with_chunks(student, chunk_frames=0)
    for one, most in ((whole, 2), (student, 0)):
        with served(one, most=most) as url:
            with urllib.request.urlopen(f"{url}/health") as answer:
                assert "stream" not in json.load(answer)
            with pytest.raises(Refused) as refused:
                Websocket(url)
            assert refused.value.code == 403
