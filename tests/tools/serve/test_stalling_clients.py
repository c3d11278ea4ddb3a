"""Clients that stall: with half a header or body, a byte at a time, or an answer that they do not take."""

import http.client
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress

import pytest
from helpers import REPO, environment, read_until
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from unified_trainer.tools.serve import web_server
from unified_trainer.tools.serve.service import Service
from unified_trainer.tools.serve.web_server import serving

pytestmark = pytest.mark.slow  # seconds together

HALF = b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Half: "
HALF_A_BODY = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9999\r\n\r\n{"
LARGE = 2**23  # bytes, more than a connection's buffers hold
NEVER = 3600.0


def answer(request):
    return PlainTextResponse("x" * (LARGE if request.url.path == "/large" else 4))


class Pages(Service):
    """A service whose requests a function answers, in a thread."""

    def __init__(self, answer=answer):
        vars(self)["answer"] = answer

    def app(self):
        return Starlette(routes=[Route("/{path:path}", self.answer)])

    def close(self):
        pass


@pytest.fixture
def place(monkeypatch):
    """The address of a server with room for eight connections, whose clients have an hour for a header."""
    monkeypatch.setattr(web_server, "MOST_OPEN", 8)
    monkeypatch.setattr(web_server, "HEADER_SECONDS", NEVER)
    with web_server.open_port("127.0.0.1", 0) as listener, serving(Pages(), listener):
        yield listener.getsockname()


def asked(place, path="/"):
    connection = http.client.HTTPConnection(*place, timeout=60)
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def closed(client):
    """Whether the server closes the connection, within a minute."""
    client.settimeout(60)
    with suppress(ConnectionError):
        while client.recv(2**16):
            pass
    return True


@pytest.mark.parametrize("sent", [b"", HALF, HALF_A_BODY, b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_others_are_answered_while_more_clients_stall_than_there_is_room_for(place, sent, capfd):
    with ExitStack() as opened:
        for number in range(30):
            client = opened.enter_context(socket.create_connection(place, timeout=60))
            client.sendall(sent)
            if number % 7 == 0:
                assert asked(place) == (200, b"xxxx")
        assert asked(place, "/large") == (200, b"x" * LARGE)
    assert asked(place) == (200, b"xxxx")
    assert capfd.readouterr().err == ""


def test_who_has_waited_longest_makes_room(place):
    with ExitStack() as opened:
        clients = []
        for _ in range(9):
            clients.append(opened.enter_context(socket.create_connection(place, timeout=60)))
            clients[-1].sendall(HALF)
        for later in (clients[8], clients[1]):
            later.sendall(b"x\r\n\r\n")
            assert later.recv(15) == b"HTTP/1.1 200 OK"
        assert closed(clients[0])


def test_an_answer_under_way_makes_no_room(monkeypatch):
    """A client that has sent its whole request keeps its place, and another one in its turn is sent away."""
    monkeypatch.setattr(web_server, "MOST_OPEN", 1)
    begun, go = threading.Event(), threading.Event()

    def slow(request):
        begun.set()
        assert go.wait(60)
        return answer(request)

    with web_server.open_port("127.0.0.1", 0) as listener, serving(Pages(slow), listener):
        answers = []
        first = threading.Thread(target=lambda: answers.append(asked(listener.getsockname())))
        first.start()
        assert begun.wait(60)
        with socket.create_connection(listener.getsockname()) as second:
            assert closed(second)
        go.set()
        first.join()
    assert answers == [(200, b"xxxx")]


@pytest.mark.parametrize("before", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"], ids=["first", "second"])
def test_a_header_that_comes_byte_by_byte_has_an_end(monkeypatch, before, capfd):
    """It ends by time, and not by the bytes at which the parser refuses it with a warning."""
    monkeypatch.setattr(web_server, "HEADER_SECONDS", 0.5)
    received, kind = threading.Semaphore(0), web_server.Connection
    receive, lose = kind.data_received, kind.connection_lost

    def noted(self, data):
        receive(self, data)
        received.release()

    def lost(self, error):
        lose(self, error)
        received.release(2**20)

    monkeypatch.setattr(kind, "data_received", noted)
    monkeypatch.setattr(kind, "connection_lost", lost)
    with ExitStack() as opened:
        listener = opened.enter_context(web_server.open_port("127.0.0.1", 0))
        opened.enter_context(serving(Pages(), listener))
        with socket.create_connection(listener.getsockname(), timeout=60) as client:
            if before:
                client.sendall(before)
                while not client.recv(2**16).endswith(b"xxxx"):
                    pass
                assert received.acquire(timeout=60)
            count = 0
            with suppress(ConnectionError):
                while count < 2**16:
                    client.sendall(b"G")
                    assert received.acquire(timeout=60)
                    count += 1
    assert count > 0 and capfd.readouterr().err == ""


@pytest.mark.parametrize("sent", [HALF, HALF_A_BODY, b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_a_server_that_is_stopped_waits_for_nobody_who_stalls(monkeypatch, sent):
    monkeypatch.setattr(web_server, "HEADER_SECONDS", 0.05)
    listener = web_server.open_port("127.0.0.1", 0)
    with listener, socket.socket() as client, serving(Pages(), listener):
        client.connect(listener.getsockname())
        client.sendall(sent)
        assert asked(listener.getsockname())[0] == 200


def test_300_clients_stall_and_exhaust_no_open_files(tmp_path):
    """A process that may open 256 files, as a user's shell may say, answers, ends, and prints no traceback."""
    limited = "import resource, runpy; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)); "
    limited += "runpy.run_module('unified_trainer', run_name='__main__')"
    words = [sys.executable, "-c", limited, "serve-reward", "--reward", "sharpness", "--port", "0", "--device", "cpu"]
    how = {"cwd": REPO, "env": environment(), "stdout": subprocess.PIPE, "text": True}
    with (
        open(tmp_path / "err", "w") as err,
        subprocess.Popen(words, stderr=err, **how) as process,
        ExitStack() as opened,
    ):
        address = re.search(r"http://([\d.]+):(\d+)", read_until(process, "http://"))
        place = (address[1], int(address[2]))
        for number in range(300):
            client = opened.enter_context(socket.create_connection(place, timeout=60))
            client.sendall(HALF if number % 2 else HALF_A_BODY)
            if number % 50 == 0:
                assert asked(place, "/health")[0] == 200
        assert asked(place, "/health")[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert "Traceback" not in (tmp_path / "err").read_text()
