"""A small HTTP server for tests of what asks one, and the servers of the product as processes."""

import contextlib
import json
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from helpers import REPO, command, environment

Asked = list[tuple[str, str | None, Any]]  # path, Authorization and JSON body of every request


@contextlib.contextmanager
def answering(*answers: tuple[int, Any]) -> Iterator[tuple[str, Asked]]:
    """Give the answers in order, the last one again and again: code and JSON, text, function of the body, or None.

    None hangs up.
    """
    asked: Asked = []

    class Handler(BaseHTTPRequestHandler):
        def respond(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked.append((self.path, self.headers.get("Authorization"), json.loads(body) if body else None))
            code, answer = answers[min(len(asked), len(answers)) - 1]
            if answer is None:
                return
            answer = answer(asked[-1][2]) if callable(answer) else answer
            self.send_response(code)
            if 300 <= code < 400:
                self.send_header(*answer.split(": ", 1))
            self.end_headers()
            self.wfile.write((answer if isinstance(answer, str) else json.dumps(answer)).encode())

        do_GET = do_POST = respond

        def log_message(self, *_): ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def posting(url: str, body: str, **headers: str) -> urllib.request.Request:
    """Return a POST of JSON."""
    return urllib.request.Request(url, body.encode(), {"Content-Type": "application/json", **headers})


@contextlib.contextmanager
def serving_process(*words: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a command that serves at a free port, and give the line that it prints; SIGTERM must end it with code 0."""
    started = command(*words, "--port", "0")
    process = subprocess.Popen(started, stdout=subprocess.PIPE, text=True, env=environment(), cwd=REPO)
    try:
        yield process.stdout.readline(), process
    finally:
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and said == "stopped\n"
