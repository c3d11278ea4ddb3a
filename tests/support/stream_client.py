"""A client of a websocket, for tests of a server that streams."""

import json
import socket
from typing import Any
from urllib.parse import urlsplit

from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Ping,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)

SECONDS = 60


class Closed(Exception):
    """The server has closed the websocket; `code` says why."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Refused(Exception):
    """The server refused the handshake with this code of HTTP."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Websocket:
    """A context manager: an open websocket."""

    def __init__(self, url: str, path: str = "/stream", **headers: str) -> None:
        place = urlsplit(url)
        self._socket = socket.create_connection((place.hostname, place.port), timeout=SECONDS)
        self._connection, self._waiting, self._parts = WSConnection(ConnectionType.CLIENT), [], []
        host = headers.pop("Host", place.netloc)
        extra = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._send(Request(host=host, target=path, extra_headers=extra))
        event = self._event()
        if isinstance(event, RejectConnection):
            self.close()
            raise Refused(event.status_code)
        assert isinstance(event, AcceptConnection)

    def __enter__(self) -> "Websocket":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def send(self, message: Any) -> None:
        """Send a text, or what is not one as JSON."""
        self._send(TextMessage(data=message if isinstance(message, str) else json.dumps(message)))

    def take(self) -> Any:
        """Return the next message: JSON of a text, or bytes; raise Closed at the end."""
        while True:
            event = self._event()
            if isinstance(event, CloseConnection):
                raise Closed(event.code)
            self._parts.append(event.data)
            if event.message_finished:
                parts, self._parts = self._parts, []
                return json.loads("".join(parts)) if isinstance(event, TextMessage) else b"".join(parts)

    def _send(self, event: object) -> None:
        self._socket.sendall(self._connection.send(event))

    def _event(self) -> object:
        while True:
            while not self._waiting:
                received = self._socket.recv(2**16)
                self._connection.receive_data(received or None)
                self._waiting = list(self._connection.events())
            event = self._waiting.pop(0)
            if isinstance(event, Ping):
                self._send(event.response())
            elif isinstance(event, (AcceptConnection, RejectConnection, TextMessage, BytesMessage, CloseConnection)):
                return event
            else:
                assert isinstance(event, RejectData)
