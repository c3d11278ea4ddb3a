"""What servers refuse: names that were rebound, pages of other sites, wrong tokens, requests beyond their limits."""

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Sequence

import pytest
from helpers import free_port

import unified_trainer as ut
from unified_trainer.basics.errors import UserError
from unified_trainer.tools.serve.batch_queue import Batcher
from unified_trainer.tools.serve.guard import Door
from unified_trainer.tools.serve.service import FOLDERS, MOST, Asked, Service, texts
from unified_trainer.tools.serve.web_server import serve_until_stopped, serving

pytestmark = pytest.mark.slow  # seconds together

JSON = {"Content-Type": "application/json"}


def service(work=None, limit: int = 4, wait: float = 0.0) -> Service:
    """Return a service that answers with the lengths of texts."""

    def lengths(requests: Sequence[Asked]) -> list[list[int]]:
        return [[len(text) for text in one.prompts] for one in requests]

    def read(asked):
        return Asked(texts(asked, "prompts"))

    batcher = Batcher(work or lengths, limit, wait)
    return Service({"name": "words"}, "/words", read, lambda _, found: {"lengths": found}, batcher, 20_000)


@contextlib.contextmanager
def open_to(site, token_variable: str = ""):
    """Serve a site, and give a function that asks it: method, path, body, headers -> code, headers and text."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = listener.getsockname()
        with serving(site, listener, Door(*place, token_variable)):

            def request(method: str, path: str, body: str | None = None, **headers: str):
                connection = http.client.HTTPConnection(*place, timeout=60)
                named = {name.replace("_", "-"): value for name, value in headers.items()}
                connection.request(method, path, body, (JSON if body is not None else {}) | named)
                answer = connection.getresponse()
                text = answer.read().decode()
                connection.close()
                return answer.status, answer.headers, text

            request.place = place
            yield request


def body(*prompts: str) -> str:
    return json.dumps({"protocol": 1, "prompts": prompts})


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, 200),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "[::1]:80"}, 200),
        ({"Host": "evil.example"}, 421),
        ({"Host": "127.0.0.1.evil.example:80"}, 421),
        ({"Host": "["}, 400),
        ({"Host": "localhost:7", "Origin": "http://localhost:7"}, 200),
        ({"Host": "localhost:7", "Origin": "http://localhost:8"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": "application/json; charset=utf-8"}, 200),
    ],
)
def test_a_request_of_another_site_is_refused(headers, code):
    with open_to(service()) as request:
        found, _, text = request("POST", "/words", body("ab", "c"), **headers)
    assert found == code and ("lengths" in text) == (code == 200)


def test_a_token_opens_the_server_under_any_name(monkeypatch):
    monkeypatch.setenv("SERVER_TOKEN", "tökén")
    with open_to(service(), "SERVER_TOKEN") as request:
        code, headers, _ = request("GET", "/health")
        assert code == 401 and headers["WWW-Authenticate"] == "Bearer"
        assert request("GET", "/health", Authorization="Bearer token")[0] == 401
        assert request("GET", "/health", Authorization="bearer tökén", Host="node7.cluster:8000")[0] == 200


def test_clients_show_the_token_that_a_variable_holds(monkeypatch):
    monkeypatch.setenv("SERVER_TOKEN", "abc")
    with open_to(service(), "SERVER_TOKEN") as request:
        url = "http://{}:{}".format(*request.place)
        with pytest.raises(UserError, match="code 401: give the server's token"):
            ut.RemoteStudent(url).exchange("health")
        assert ut.RemoteStudent(url, token_variable="SERVER_TOKEN").exchange("health")["name"] == "words"
    with pytest.raises(UserError, match="the environment has no ABSENT"):
        ut.RemoteStudent(url, token_variable="ABSENT")
    with pytest.raises(UserError, match="--token-variable: the environment has no ABSENT"):
        serve_until_stopped(Door("127.0.0.1", free_port(), "ABSENT"), service, str)


@pytest.mark.parametrize(
    ("asked", "code", "said"),
    [
        ("[" * 15_000, 400, "the request is no JSON"),
        ('{"protocol": 1e400', 400, "the request is no JSON"),
        (body("x" * 20_001), 413, "a request may have 20000 bytes"),
        (body(*["x"] * (MOST + 1)), 400, f"a request has at most {MOST} videos, not {MOST + 1}"),
    ],
)
def test_a_request_beyond_the_limits_is_refused(asked, code, said):
    with open_to(service()) as request:
        found, _, text = request("POST", "/words", asked)
        assert found == code and said in text
        assert request("POST", "/words", body("abc"))[0] == 200


def test_a_body_without_length_is_counted_while_it_comes():
    with open_to(service()) as request:
        connection = http.client.HTTPConnection(*request.place, timeout=60)
        parts = iter([b'"'] + [b"x" * 1000] * 21)
        connection.request("POST", "/words", parts, JSON, encode_chunked=True)
        assert connection.getresponse().status == 413
        connection.close()


def test_work_whose_client_left_is_not_done():
    """The first client leaves while its request waits behind one at work."""
    begun, go, worked = threading.Event(), threading.Event(), []

    def work(requests):
        begun.set()
        assert go.wait(30)
        worked.extend(one.prompts for one in requests)
        return [[0]] * len(requests)

    site = service(work, 1)
    with open_to(site) as request:
        answers: list[int] = []
        first = threading.Thread(target=lambda: answers.append(request("POST", "/words", body("first"))[0]))
        first.start()
        assert begun.wait(30)
        queued, submit = threading.Event(), site.batcher.submit
        gone = threading.Event()

        def watched(*args):
            future = submit(*args)
            future.add_done_callback(lambda one: gone.set() if one.cancelled() else None)
            queued.set()
            return future

        object.__setattr__(site.batcher, "submit", watched)
        with socket.create_connection(request.place) as leaving:
            head = ["POST /words HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
            head += [f"Content-Length: {len(body('left'))}", "", ""]
            leaving.sendall("\r\n".join(head).encode() + body("left").encode())
            assert queued.wait(30)
        assert gone.wait(30)
        go.set()
        first.join()
        assert answers == [200] and request("POST", "/words", body("last"))[0] == 200
    assert worked == [["first"], ["last"]]


def test_a_fault_tells_the_client_no_path_and_no_code(capfd):
    def work(requests):
        if requests[0].prompts == ["user"]:
            raise UserError("/home/me/runs/one/config.yaml: no such file; ask http://host/health instead")
        raise RuntimeError("broken in /home/me/scorer.py")

    with open_to(service(work)) as request:
        assert request("POST", "/words", body("user"))[::2] == (
            400,
            "config.yaml: no such file; ask http://host/health instead",
        )
        assert request("POST", "/words", body("bug"))[::2] == (500, "a fault of the server: its terminal shows it")
    assert "RuntimeError: broken in /home/me/scorer.py" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("--reward ~/a/b.yaml: no such file", "--reward b.yaml: no such file"),
        ("'../x/y.py:score' and 1/2 of a/b", "'y.py:score' and 1/2 of a/b"),
        ("https://host:80/a/b?c", "https://host:80/a/b?c"),
    ],
)
def test_the_folders_of_a_message(said, shown):
    assert FOLDERS.sub("", said) == shown
