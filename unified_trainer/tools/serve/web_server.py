"""The web server of serve, serve-reward and watch: one application behind the guard, until it is stopped."""

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.terminal import say
from unified_trainer.tools.serve.guard import Door, Guard


class Site(Protocol):
    """An application and its end."""

    @property
    def given_up(self) -> "Future[Exception]":
        """Why, once it can give no further answer."""
        ...

    def app(self) -> ASGIApp:
        """Return the web application."""
        ...

    def close(self) -> None:
        """End, when the last request was answered."""
        ...


def serve_until_stopped(door: Door, load: Callable[[], Site], said: Callable[[str], str]) -> None:
    """Open the port, load the site, print what `said` makes of the address, and answer until SIGTERM or Ctrl-C.

    Raise UserError, before anything is loaded, if the port cannot be opened or the environment has no token, and when
    the site gives up.
    """
    door.token()
    with open_port(door.host, door.port) as listener:
        stop, site = stop_asked(), load()
        site.given_up.add_done_callback(lambda _: stop.set())
        with serving(site, listener, door) as address:
            say(said(address))
            stop.wait()
    if site.given_up.done():
        raise UserError(str(site.given_up.result()))
    say("stopped")


@contextmanager
def serving(site: Site, listener: socket.socket, door: Door | None = None) -> Iterator[str]:
    """Answer requests at a listening socket while the context lasts, and give the address of the server.

    On leaving, requests that were received are answered first.
    """
    door = door or Door(*listener.getsockname()[:2])
    app = Guard(site.app(), door.names(), door.token())
    settings = uvicorn.Config(app, log_level="warning", lifespan="off", access_log=False, server_header=False)
    web = uvicorn.Server(settings)
    thread = threading.Thread(target=web.run, args=([listener],), name="server")  # no main thread: it takes no signals
    thread.start()
    try:
        yield address_of(listener)
    finally:
        web.should_exit = True
        thread.join()
        site.close()


def open_port(host: str, port: int) -> socket.socket:
    """Return a listening socket; UserError if the port cannot be opened."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: {error}; choose another, or 0 for a free port") from error


def address_of(listener: socket.socket) -> str:
    """Return the URL of a server at a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def stop_asked() -> threading.Event:
    """Return an event that SIGTERM and Ctrl-C set from now on."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop
