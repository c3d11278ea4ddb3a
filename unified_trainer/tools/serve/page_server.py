"""A site of pages that are only read: it answers GET and HEAD."""

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from unified_trainer.basics.errors import UserError

CLOSED = "default-src 'none'"
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": CLOSED,
}
PACKED = 10_000  # bytes of a text from which on it is compressed


class RefusedError(UserError):
    """A request that is answered with a code and a sentence."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
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


@dataclass(frozen=True)
class Pages:
    """A site whose pages a function of path and query answers; it raises RefusedError for a page that is not there."""

    answer: Callable[[str, Query], Answer]
    given_up: "Future[Exception]" = field(default_factory=Future)  # never

    def app(self) -> ASGIApp:
        """Return the web application."""
        packing = Middleware(GZipMiddleware, minimum_size=PACKED, compresslevel=1)
        return Starlette(routes=[Route("/{path:path}", self._answered, methods=["GET"])], middleware=[packing])

    def close(self) -> None:
        """Nothing is left to end."""

    def _answered(self, request: Request) -> Response:  # in a thread, because it is no coroutine
        try:
            answer = self.answer(request.url.path, _query(request))
            tag = f'"{answer.tag}"'
            keep = f"private, max-age={answer.seconds}" if answer.seconds else "no-cache"
            headers = {**HEADERS, "ETag": tag, "Cache-Control": keep, "Content-Security-Policy": answer.policy}
            if request.headers.get("If-None-Match") == tag:
                return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
            return Response(answer.body(), headers=headers, media_type=answer.kind)
        except RefusedError as error:
            return _refused(error.status, str(error))
        except Exception:  # noqa: BLE001 - a bug: the server goes on
            sys.stderr.write(traceback.format_exc())
            return _refused(HTTPStatus.INTERNAL_SERVER_ERROR, "a fault of the program: its terminal shows it")


def _query(request: Request) -> Query:
    """Return the values of each key; a name of a folder may hold any bytes."""
    try:
        return parse_qs(request.url.query, max_num_fields=100, errors="surrogateescape")
    except ValueError as error:
        raise RefusedError(HTTPStatus.BAD_REQUEST, f"the request has no valid URL: {error}") from error


def _refused(status: HTTPStatus, reason: str) -> Response:
    content = f"{reason}\n".encode(errors="replace")
    return PlainTextResponse(content, status, {**HEADERS, "Cache-Control": "no-store"})
