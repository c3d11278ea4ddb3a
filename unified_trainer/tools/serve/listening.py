"""Opening a port, as a socket that listens, and waiting for the end that a user asks for."""

import signal
import socket
import threading

from unified_trainer.basics.errors import UserError


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
