"""A web server of pages that are only read: it answers GET and HEAD, and nothing to requests for other host names.

Checking the name keeps a page of another site, whose name was rebound to this machine's address, from reading these.
"""

import gzip
import ipaddress
import socket
import socketserver
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.terminal import say
from unified_trainer.tools.serve.listening import address_of, open_port, stop_asked

TEXT = "text/plain; charset=utf-8"
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Connection": "close",
}
CLOSED = "default-src 'none'"
PACKED = 10_000  # bytes of a text from which on it is compressed
SECONDS = 30  # that a client may be silent


class RefusedError(UserError):
    """A request that is answered with a code and a sentence."""

    def __init__(self, status: HTTPStatus, said: str) -> None:
        super().__init__(said)
        self.status = status


@dataclass(frozen=True)
class Answer:
    """An answer to a request; `tag` changes with the body, which is made unless the asker has that tag."""

    tag: str
    body: Callable[[], bytes]
    kind: str  # media type
    policy: str = CLOSED  # content security policy
    seconds: int = 0  # that a browser may keep it without asking


Query = Mapping[str, Sequence[str]]
Answering = Callable[[str, Query], Answer]  # path and query; RefusedError


def serve_pages(host: str, port: int, answering: Answering, said: Callable[[str], str]) -> None:
    """Open the port, print what `said` makes of the address, and answer until SIGTERM or Ctrl-C.

    Raise UserError if the port cannot be opened.
    """
    with open_port(host, port) as listener:
        stop = stop_asked()
        with serving_pages(listener, host, answering) as address:
            say(said(address))
            stop.wait()
    say("stopped")


@contextmanager
def serving_pages(listener: socket.socket, host: str, answering: Answering) -> Iterator[str]:
    """Answer requests at a listening socket while the context lasts, and give the address of the server."""
    web = _Server(listener, {"localhost", socket.gethostname().lower(), host.lower()}, answering)
    thread = threading.Thread(target=web.serve_forever, args=(0.1,), name="server")
    thread.start()
    try:
        yield address_of(listener)
    finally:
        web.shutdown()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, listener: socket.socket, names: set[str], answering: Answering) -> None:
        socketserver.BaseServer.__init__(self, listener.getsockname(), _Handler)
        self.socket, self.names, self.answering = listener, names, answering

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that went away; other exceptions show their traceback."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = SECONDS
    server_version, sys_version = "unified-trainer", ""

    def do_GET(self) -> None:
        """Answer a request, or say why not."""
        try:
            self._check_host()
            answer = self.server.answering(*self._asked())
            tag = f'"{answer.tag}"'
            if self.headers.get("If-None-Match") == tag:
                self._send(HTTPStatus.NOT_MODIFIED, b"", answer.kind, {"ETag": tag})
                return
            keep = f"private, max-age={answer.seconds}" if answer.seconds else "no-cache"
            more = {"ETag": tag, "Cache-Control": keep, "Content-Security-Policy": answer.policy}
            body = answer.body()
            if answer.kind.startswith("text/"):
                more["Vary"] = "Accept-Encoding"
                if len(body) > PACKED and "gzip" in self.headers.get("Accept-Encoding", ""):
                    body, more["Content-Encoding"] = gzip.compress(body, 1), "gzip"
            self._send(HTTPStatus.OK, body, answer.kind, more)
        except RefusedError as error:
            self.refuse(error.status, str(error))
        except OSError:
            raise  # of the connection
        except Exception:  # noqa: BLE001 - a bug: the server goes on
            sys.stderr.write(traceback.format_exc())
            self.refuse(HTTPStatus.INTERNAL_SERVER_ERROR, "a fault of the program: its terminal shows it")

    do_HEAD = do_GET  # _send leaves the body out

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what http.server itself does not accept: other methods, and requests that are none."""
        if code == HTTPStatus.NOT_IMPLEMENTED:
            self.refuse(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are answered", {"Allow": "GET, HEAD"})
        else:
            self.refuse(HTTPStatus(code), message or HTTPStatus(code).phrase)

    def refuse(self, status: HTTPStatus, said: str, more: Mapping[str, str] | None = None) -> None:
        """Send a code and a sentence."""
        self._send(status, f"{said}\n".encode(errors="replace"), TEXT, {"Cache-Control": "no-store", **(more or {})})

    def log_message(self, format: str, *args: object) -> None:
        """Write no line for a request."""

    def _check_host(self) -> None:
        given = self.headers.get_all("Host") or []
        name = _host_of(given[0]) if len(given) == 1 else None
        if name is None:
            raise RefusedError(HTTPStatus.BAD_REQUEST, "the request must have one header Host")
        if name not in self.server.names and not _is_number(name):
            known = "open it by the address that the program printed, or name the host with --host"
            raise RefusedError(
                HTTPStatus.MISDIRECTED_REQUEST, f"this server does not answer to the name {name}: {known}"
            )

    def _asked(self) -> tuple[str, Query]:
        try:
            parts = urlsplit(self.path)
            query = parse_qs(parts.query, max_num_fields=100, errors="surrogateescape")
        except ValueError as error:
            raise RefusedError(HTTPStatus.BAD_REQUEST, f"the request has no valid URL: {error}") from error
        return parts.path, query

    def _send(self, status: HTTPStatus, body: bytes, kind: str, more: Mapping[str, str]) -> None:
        headers = {**HEADERS, "Content-Security-Policy": CLOSED, **more}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _host_of(header: str) -> str | None:
    """Return the name or address in a header Host, without the port."""
    try:
        return urlsplit(f"//{header}").hostname
    except ValueError:
        return None


def _is_number(name: str) -> bool:
    """Return whether a host is an IP address, which no other site can be reached by."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
