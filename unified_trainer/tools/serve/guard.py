"""The guard of every server: it checks the host name, the origin and the token of a request before it is read.

A page of another site can make a browser ask this machine, under a name that was rebound to its address or with a
form; the names of Host and Origin give it away. A client that shows the token is trusted under any name.
"""

import hmac
import ipaddress
import os
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from unified_trainer.basics.errors import UserError


@dataclass(frozen=True)
class Door:
    """Where a server listens, and the token that opens it."""

    host: str
    port: int  # 0 takes a free one
    token_variable: str = ""  # environment variable that holds the token; empty asks for none

    def token(self) -> str:
        """Return the token, "" for none; raise UserError if the environment lacks it."""
        if not self.token_variable:
            return ""
        if not (token := os.environ.get(self.token_variable, "")):
            raise UserError(f"--token-variable: the environment has no {self.token_variable}")
        return token

    def names(self) -> frozenset[str]:
        """Return the host names that a request without token may ask for, besides numbers."""
        return frozenset({"localhost", socket.gethostname().lower(), self.host.lower()})


@dataclass(frozen=True)
class Guard:
    """An application that passes requests on to another one if they may come in."""

    app: ASGIApp
    names: frozenset[str]
    token: str = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if refusal := self.refusal(Headers(scope=scope)):  # of an HTTP request or the handshake of a websocket
            code, said = refusal
            more = {"WWW-Authenticate": "Bearer"} if code == 401 else {}
            answer = PlainTextResponse(f"{said}\n", code, {"Cache-Control": "no-store", **more})
            return await answer(scope, receive, send)
        await self.app(scope, receive, send)

    def refusal(self, headers: Headers) -> tuple[int, str] | None:
        """Return the code and the sentence with which a request is refused; None if it may come in."""
        hosts = headers.getlist("host")
        name = _host_of(hosts[0]) if len(hosts) == 1 else None
        if name is None:
            return 400, "the request must have one header Host"
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != hosts[0].lower():
            return 403, "this server does not answer to pages of other sites"
        if self.token:
            scheme, _, shown = headers.get("authorization", "").partition(" ")
            right = scheme.lower() == "bearer" and hmac.compare_digest(shown.strip().encode(), self.token.encode())
            return None if right else (401, "give the server's token: Authorization: Bearer TOKEN")
        if name not in self.names and not _is_number(name):
            known = "ask for the address that the program printed, name the host with --host, or use --token-variable"
            return 421, f"this server does not answer to the name {name}: {known}"
        return None


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
