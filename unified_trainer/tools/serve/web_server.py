"""A web server with a queue: POST requests in JSON that wait are worked on together."""

import asyncio
import json
import socket
import threading
import traceback
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from unified_trainer.basics.errors import MissingPackageError, UserError
from unified_trainer.basics.terminal import say
from unified_trainer.rewards.video_json import PROTOCOL
from unified_trainer.tools.serve.batch_queue import Batcher
from unified_trainer.tools.serve.listening import address_of, open_port, stop_asked

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route
except ModuleNotFoundError as error:
    raise MissingPackageError(f"a server needs {error.name}: pip install 'unified-trainer[serve]'") from error


@runtime_checkable
class Asked(Protocol):
    """A request that was read; the queue must know its kind and its size."""

    @property
    def kind(self) -> Hashable: ...  # only requests of one kind are worked on together

    @property
    def size(self) -> int: ...  # number of its videos


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

    def app(self) -> Starlette:
        """Return the web application."""
        return Starlette(routes=[Route("/health", self._health), Route(self.path, self._post, methods=["POST"])])

    async def _health(self, request: Request) -> Response:
        return JSONResponse(self.about | {"protocol": PROTOCOL})

    async def _post(self, request: Request) -> Response:
        try:
            body = await request.body()
            job = await run_in_threadpool(self._read, body)  # large bodies must not hold up other requests
            result = await asyncio.wrap_future(self.batcher.submit(job, job.kind, job.size))
            return await run_in_threadpool(lambda: JSONResponse(self.write(job, result)))
        except UserError as error:
            return PlainTextResponse(str(error), 400)
        except TimeoutError as error:  # of a scorer: another request, or another server, may get an answer
            return PlainTextResponse(str(error), 503)
        except Exception:  # noqa: BLE001 - the client ends with it
            return PlainTextResponse(traceback.format_exc(), 500)

    def _read(self, body: bytes) -> Job:
        try:
            asked = json.loads(body)
        except ValueError as error:
            raise UserError(f"the request is no JSON: {error}") from error
        if not isinstance(asked, dict) or asked.get("protocol") != PROTOCOL:
            raise UserError(f"the request must be an object with protocol {PROTOCOL}")
        return self.read(asked)


def texts(asked: dict[str, Any], key: str) -> list[str]:
    """Return the list of texts of a request; raise UserError if it is none."""
    found = asked.get(key)
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise UserError(f"{key} must be a list of texts")
    return found


def serve_until_stopped(
    host: str, port: int, load: Callable[[], Service[Any, Any]], said: Callable[[str], str]
) -> None:
    """Open the port, load the service, print what `said` makes of the address, and answer until SIGTERM or Ctrl-C.

    Raise UserError, before anything is loaded, if the port cannot be opened, and when the batcher gives up.
    """
    with open_port(host, port) as listener:
        stop, service = stop_asked(), load()
        service.batcher.given_up.add_done_callback(lambda _: stop.set())
        with serving(service, listener) as address:
            say(said(address))
            stop.wait()
    if service.batcher.given_up.done():
        raise UserError(str(service.batcher.given_up.result()))
    say("stopped")


@contextmanager
def serving(service: Service[Any, Any], listener: socket.socket) -> Iterator[str]:
    """Answer requests at a listening socket while the context lasts, and give the address of the server.

    On leaving, requests that were received are answered first.
    """
    web = uvicorn.Server(uvicorn.Config(service.app(), log_level="warning", lifespan="off", access_log=False))
    thread = threading.Thread(target=web.run, args=([listener],), name="server")  # no main thread: it takes no signals
    thread.start()
    try:
        yield address_of(listener)
    finally:
        web.should_exit = True
        thread.join()
        service.batcher.close()
