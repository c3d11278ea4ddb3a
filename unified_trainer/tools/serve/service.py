"""A service with a queue: requests in JSON that wait are worked on together."""

import asyncio
import json
import re
import sys
import traceback
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from unified_trainer.basics.errors import UserError
from unified_trainer.rewards.video_json import PROTOCOL
from unified_trainer.tools.serve.batch_queue import Batcher, BusyError

MOST = 1024  # videos of one request
FOLDERS = re.compile(r"(?<![\w:/.~])[~.]{0,2}/(?:[^\s/:'\"]+/)*")  # of a path in a message; a URL is none


@dataclass(frozen=True)
class Asked:
    """A request that was read, with a prompt for each of its videos; the queue must know its kind and its size."""

    prompts: list[str]

    @property
    def kind(self) -> Hashable:
        """Return what requests that are worked on together share: whether their prompts have images."""
        return type(self.prompts[0])

    @property
    def size(self) -> int:
        """The number of its videos."""
        return len(self.prompts)


Job = TypeVar("Job", bound=Asked)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Service(Generic[Job, Result]):
    """The answers of a server: `about` to GET /health, and to POST at `path` what the batcher makes of the request."""

    about: dict[str, Any]  # its name, and what clients must know
    path: str
    read: Callable[[dict[str, Any]], Job]  # raises UserError for a request that cannot be answered
    write: Callable[[Job, Result], dict[str, Any]]
    batcher: "Batcher[Job, Result]"
    most_bytes: int  # of a request
    routes: Sequence[BaseRoute] = ()  # what else it answers

    @property
    def given_up(self) -> "Future[Exception]":
        return self.batcher.given_up

    def app(self) -> ASGIApp:
        """Return the web application."""
        own = Route("/health", self._health), Route(self.path, self._post, methods=["POST"])
        return Starlette(routes=[*own, *self.routes])

    def close(self) -> None:
        """Answer what is in the queue, and end."""
        self.batcher.close()

    async def _health(self, request: Request) -> Response:
        return JSONResponse(self.about | {"protocol": PROTOCOL})

    async def _post(self, request: Request) -> Response:
        try:
            body = await self._body(request)
            job = await run_in_threadpool(self._read, body)  # large bodies must not hold up other requests
            result = await _unless_left(request, self.batcher.submit(job, job.kind, job.size))
            return await run_in_threadpool(lambda: JSONResponse(self.write(job, result)))
        except ClientDisconnect:
            return PlainTextResponse("the client left", 499)
        except HTTPException:
            raise
        except Exception as error:  # noqa: BLE001 - the server goes on
            code, said = refusal_of(error)
            return PlainTextResponse(said, code)

    async def _body(self, request: Request) -> bytes:
        """Return the body of a request, which must be JSON of at most `most_bytes`."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "the body must be JSON: set the header Content-Type to application/json")
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self.most_bytes:
                raise HTTPException(413, f"a request may have {self.most_bytes} bytes: ask for fewer videos at a time")
        return bytes(body)

    def _read(self, body: bytes) -> Job:
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise UserError(f"the request is no JSON: {error}") from error
        if not isinstance(asked, dict) or asked.get("protocol") != PROTOCOL:
            raise UserError(f"the request must be an object with protocol {PROTOCOL}")
        job = self.read(asked)
        if job.size > MOST:
            raise UserError(f"a request has at most {MOST} videos, not {job.size}")
        return job


def refusal_of(error: Exception) -> tuple[int, str]:
    """Return the code and the sentence that a client gets for an error; a fault of the server is printed."""
    if isinstance(error, UserError):
        return 400, FOLDERS.sub("", str(error))
    if isinstance(error, BusyError):
        return 429, str(error)
    if isinstance(error, TimeoutError):  # of a scorer: another request, or another server, may get an answer
        return 503, FOLDERS.sub("", str(error))
    sys.stderr.write("".join(traceback.format_exception(error)))
    return 500, "a fault of the server: its terminal shows it"


async def _unless_left(request: Request, future: "Future[Result]") -> Result:
    """Return the result of a job; take the job out of the queue, if it still waits there, when its client leaves."""
    result, left = asyncio.wrap_future(future), asyncio.ensure_future(request.receive())  # the body was read
    await asyncio.wait({result, left}, return_when=asyncio.FIRST_COMPLETED)
    if not result.done():
        result.cancel()
        raise HTTPException(499, "the client left")
    left.cancel()
    return result.result()


def texts(asked: dict[str, Any], key: str) -> list[str]:
    """Return the list of texts of a request; raise UserError if it is none."""
    texts_asked = asked.get(key)
    if not isinstance(texts_asked, list) or not all(isinstance(text, str) for text in texts_asked):
        raise UserError(f"{key} must be a list of texts")
    return texts_asked
