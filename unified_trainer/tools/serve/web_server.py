"""The web server of serve and serve-reward: one application behind the guard, until it is stopped."""

import asyncio
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.wsproto_impl import WSProtocol

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.terminal import say
from unified_trainer.tools.serve.guard import Door, Guard
from unified_trainer.tools.serve.service import Service

HEADER_SECONDS = 10.0  # that a client may take for a whole header
MOST_MESSAGE = 2**24  # bytes of a message of a websocket
FILES, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # that this process may open; each connection is one
MOST_OPEN = 1024 if FILES == resource.RLIM_INFINITY else min(FILES // 5, 1024)  # for connections


class Connection(H11Protocol):
    """A connection that a client holds only while it does its part; uvicorn has no setting for this.

    One whose header takes more than HEADER_SECONDS is closed. Where more than MOST_OPEN are open, the oldest of those
    makes room whose client does not send the rest of its request, or does not take its answer.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.opened, self.header = self.loop.time(), object()  # the header that is waited for, None within a request
        self.loop.call_later(HEADER_SECONDS, self._end, self.header)
        if len(self.connections) > MOST_OPEN:
            slow = [one for one in self.connections if one.waits_for_client() and not one.transport.is_closing()]
            min(slow, key=lambda one: one.opened).transport.abort()  # at the least this one

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self.header = None
        elif self.header is None:  # of a further request
            self.header = object()
            self.loop.call_later(HEADER_SECONDS, self._end, self.header)

    def shutdown(self) -> None:
        super().shutdown()
        self.loop.call_later(HEADER_SECONDS, lambda: self.waits_for_client() and self.transport.abort())

    def waits_for_client(self) -> bool:
        """Return whether the client has not sent its whole request, or has not taken its answer."""
        return self.conn.their_state is not h11.DONE or self.transport.get_write_buffer_size() > 0

    def _end(self, header: object) -> None:
        if self.header is header:
            self.transport.abort()


class StreamConnection(WSProtocol):
    """A websocket, which counts as a connection, and ends HEADER_SECONDS after its stream whatever its client does."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.opened = self.loop.time()

    def on_task_complete(self, task: "asyncio.Task[None]") -> None:
        super().on_task_complete(task)
        self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def shutdown(self) -> None:
        super().shutdown()
        self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def waits_for_client(self) -> bool:
        """Return whether the client has not taken all that was sent."""
        return self.transport.get_write_buffer_size() > 0


def serve_until_stopped(door: Door, load: Callable[[], Service[Any, Any]], said: Callable[[str], str]) -> None:
    """Open the port, load the service, print what `said` makes of the address, and answer until SIGTERM or Ctrl-C.

    Raise UserError, before anything is loaded, if the port cannot be opened or the environment has no token, and when
    the service gives up.
    """
    door.token()
    with open_port(door.host, door.port) as listener:
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        service = load()
        service.given_up.add_done_callback(lambda _: stop.set())
        with serving(service, listener, door) as address:
            say(said(address))
            stop.wait()
    if service.given_up.done():
        raise UserError(str(service.given_up.result()))
    say("stopped")


@contextmanager
def serving(service: Service[Any, Any], listener: socket.socket, door: Door | None = None) -> Iterator[str]:
    """Answer requests at a listening socket while the context lasts, and give the address of the server.

    On leaving, requests that were received are answered first.
    """
    door = door or Door(*listener.getsockname()[:2])
    app = Guard(service.app(), door.names(), door.token())
    quiet = {"log_level": "warning", "access_log": False, "server_header": False}
    how = {"http": Connection, "lifespan": "off", "backlog": max(MOST_OPEN // 2, 1)}  # accepted at a time
    socket_of = {"ws": StreamConnection, "ws_max_size": MOST_MESSAGE, "ws_per_message_deflate": False}
    web = uvicorn.Server(uvicorn.Config(app, **how, **socket_of, **quiet))
    thread = threading.Thread(target=web.run, args=([listener],), name="server")  # no main thread: it takes no signals
    thread.start()
    try:
        host, port = listener.getsockname()[:2]
        yield f"http://{f'[{host}]' if ':' in host else host}:{port}"
    finally:
        web.should_exit = True
        thread.join()
        service.close()


def open_port(host: str, port: int) -> socket.socket:
    """Return a listening socket; UserError if the port cannot be opened."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: {error}; choose another, or 0 for a free port") from error
