"""Videos over a websocket, chunk by chunk, while prompts and actions come in: GET /stream as docs/tools.md says."""

import asyncio
import io
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from PIL import Image as Picture
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as WebRequest
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from unified_trainer.basics.actions import Actions
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import Schema, checked, parse_object
from unified_trainer.basics.requests import Request
from unified_trainer.basics.suggestions import must_know
from unified_trainer.data.video_files import to_uint8
from unified_trainer.rewards.image_json import prompts_with_images
from unified_trainer.tools.sample.latents import Stream
from unified_trainer.tools.serve.batch_queue import Batcher, BusyError
from unified_trainer.tools.serve.service import refusal_of

IDLE_SECONDS = 30.0  # for which a stream may wait for its client
MOST_TEXT = 2**16  # characters of a message after the first
OPTIONS: dict[str, dict[str, int]] = {"png": {"compress_level": 1}, "jpeg": {"quality": 90}}  # of pictures
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class Later(Schema):
    """A message while a video is streamed."""

    prompt: Annotated[str, Field(max_length=MOST_TEXT)] = ""
    chunks: Annotated[int, Field(ge=0, lt=2**31)] = 0  # further ones that may be sent
    actions: list[Any] = []  # noqa: RUF012 - pydantic copies it; [rows, k] of the next chunk


class First(Later):
    """The first message of a client."""

    protocol: Literal[1]  # video_json.PROTOCOL
    prompt: Annotated[str, Field(max_length=MOST_TEXT)] = Field()
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    frames: Annotated[int, Field(ge=0, lt=2**31)] = 0  # 0: until the client leaves
    image: str = ""  # a PNG file in base64
    encoding: Literal["png", "jpeg", "uint8"] = "png"

    def request(self) -> Request:
        """Return the prompt with its image; raise UserError for an image that cannot be read."""
        return Request.of(prompts_with_images([self.prompt], [self.image] if self.image else None))[0]


Message = TypeVar("Message", bound=Later)
Made = tuple[np.ndarray, float]


@dataclass(frozen=True)
class Chunk:
    """The job of one chunk."""

    video: Stream
    request: Request
    actions: np.ndarray | None

    def make(self) -> Made:
        """Return the frames [frames, height, width, 3] and the seconds that they took."""
        began = time.perf_counter()
        actions = None if self.actions is None else torch.from_numpy(self.actions)[None]
        (frames,) = to_uint8(self.video.decode(self.video.next([self.request], actions)))
        return frames, time.perf_counter() - began


class Viewer:
    """A client, and what it has asked for so far; messages have actions of `action_size`."""

    def __init__(self, websocket: WebSocket, first: First, request: Request, action_size: int) -> None:
        self._websocket, self._first, self._request, self._action_size = websocket, first, request, action_size
        self._actions = self._actions_of(first) if action_size or first.actions else None
        self._credit, self._granted = first.chunks or math.inf, asyncio.Event()

    async def listen(self) -> None:
        """Take messages until the client leaves, which raises WebSocketDisconnect."""
        while True:
            message = await _message(self._websocket, Later, MOST_TEXT)
            if "prompt" in message.model_fields_set:
                self._request = replace(self._request, text=message.prompt)
            if message.actions:
                self._actions = self._actions_of(message)
            self._credit += message.chunks
            self._granted.set()

    async def show(self, video: Stream, generate: Callable[[Chunk], "asyncio.Future[Made]"], began: float) -> None:
        """Send chunk after chunk, each when the one before was taken and the client has asked for it."""
        encoding, number, sent = self._first.encoding, 0, {"frames": 0, "seconds": 0.0, "first": 0.0}
        while not self._first.frames or sent["frames"] < self._first.frames:
            await self._credited()
            request, actions = self._request, self._actions
            self._actions = None if actions is None else actions[-1:]  # held until others come
            frames, seconds = await generate(Chunk(video, request, actions))
            data = await run_in_threadpool(_encoded, frames, encoding)
            first = sent["first"] or time.perf_counter() - began
            head = {"chunk": number, "frames": len(frames), "shape": frames.shape, "encoding": encoding}
            head |= {"seconds": seconds, "first": first, "prompt": request.text}
            await _in_time(self._websocket.send_json(head))
            await _in_time(self._websocket.send_bytes(data))
            sent = {"frames": sent["frames"] + len(frames), "seconds": sent["seconds"] + seconds, "first": first}
            number += 1
        await _in_time(self._websocket.send_json({"end": True} | sent))

    async def _credited(self) -> None:
        while self._credit < 1:
            self._granted.clear()
            await _in_time(self._granted.wait())
        self._credit -= 1

    def _actions_of(self, message: Later) -> np.ndarray:
        size = self._action_size
        if not size:
            raise UserError("this student takes no actions: leave actions out")
        if not message.actions:
            raise UserError(f"actions are missing: this student takes rows of {size} (its page: serve --action-names)")
        if (actions := Actions.of(message.actions, "actions")).size != size:
            raise UserError(f"actions must be rows of {size} numbers, not {actions.size}")
        return actions.values


class Streams:
    """The clients whose videos are generated now, `most` at once; `open_video` raises UserError for what cannot be.

    Each chunk is a job of its own in the queue of the batcher, so that other requests are answered between them.
    """

    def __init__(
        self,
        open_video: Callable[[First, Request], Stream],
        batcher: "Batcher[Any, Any]",
        most: int,
        action_size: int,
    ) -> None:
        self._open_video, self._batcher, self._most, self._open = open_video, batcher, most, 0
        self._action_size = action_size  # numbers of each frame that the student takes

    def routes(self) -> list[BaseRoute]:
        """Return the route of the websocket, and that of a page that shows it in a browser."""
        return [WebSocketRoute("/stream", self._serve), Route("/", _page)]

    async def _serve(self, websocket: WebSocket) -> None:
        """Stream; the code that closes the websocket is 1000, or 4000 + that of a POST after an error."""
        await websocket.accept()
        self._open += 1
        try:
            try:
                await self._stream(websocket)
                await _in_time(websocket.close())
            except WebSocketDisconnect:
                pass
            except Exception as error:  # noqa: BLE001 - the server goes on
                code, said = refusal_of(error)
                await _in_time(websocket.send_json({"error": said}))
                await _in_time(websocket.close(4000 + code))
        except (WebSocketDisconnect, UserError):
            pass  # the client left, or does not take its answer
        finally:
            self._open -= 1

    async def _stream(self, websocket: WebSocket) -> None:
        if self._open > self._most:
            raise BusyError(f"{self._most} videos are streamed already: ask again later, or use a further server")
        first = await _in_time(_message(websocket, First))
        began = time.perf_counter()
        request = await run_in_threadpool(first.request)  # a large image must not hold up others
        viewer, video = Viewer(websocket, first, request, self._action_size), self._open_video(first, request)
        both = [asyncio.ensure_future(x) for x in (viewer.show(video, self._generate, began), viewer.listen())]
        try:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
        for task in done:
            task.result()

    def _generate(self, chunk: Chunk) -> "asyncio.Future[Made]":
        return asyncio.wrap_future(self._batcher.submit(chunk, chunk.video, self._batcher.limit))  # waits for no other


async def _message(websocket: WebSocket, kind: type[Message], most: float = math.inf) -> Message:
    """Return the next message; raise UserError, naming the key, for what cannot be."""
    received = await websocket.receive()
    if received["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(received["code"])
    text = received.get("text")
    if text is None or len(text) > most:
        raise UserError("a message must be text in JSON" + (f" of at most {most} characters" if text else ""))
    asked = parse_object(text, "the message")
    for key in asked:
        must_know("key of a message", key, tuple(kind.model_fields))
    return checked(kind, asked, "the message")


async def _in_time(waited: Coroutine[Any, Any, Any]) -> Any:
    """Wait for the client, but not for long."""
    try:
        async with asyncio.timeout(IDLE_SECONDS):
            return await waited
    except TimeoutError as error:
        raise UserError(f"the client sent or took nothing for {IDLE_SECONDS:g} seconds") from error


def _encoded(frames: np.ndarray, encoding: str) -> bytes:
    """Return frames as raw numbers, or as one picture with the frames below one another."""
    if encoding == "uint8":
        return frames.tobytes()
    file = io.BytesIO()
    Picture.fromarray(frames.reshape(-1, *frames.shape[2:])).save(file, encoding, **OPTIONS[encoding])
    return file.getvalue()


async def _page(request: WebRequest) -> Response:
    page = (files("unified_trainer.tools.serve") / "live.html").read_text(encoding="utf-8")
    return HTMLResponse(page, headers=HEADERS)
