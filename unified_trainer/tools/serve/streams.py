"""Videos over a websocket, chunk by chunk, while their prompts change: GET /stream as docs/tools.md says."""

import asyncio
import io
import json
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Literal

import numpy as np
from PIL import Image as Picture
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as WebRequest
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from unified_trainer.basics.actions import Actions
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Request
from unified_trainer.basics.suggestions import must_know
from unified_trainer.data.video_files import to_uint8
from unified_trainer.rewards.image_json import prompts_with_images
from unified_trainer.rewards.video_json import PROTOCOL
from unified_trainer.tools.serve.batch_queue import Batcher, BusyError
from unified_trainer.tools.serve.live_video import LiveVideo
from unified_trainer.tools.serve.service import refusal_of

FIRST = ("protocol", "prompt", "seed", "frames", "image", "encoding", "chunks", "actions")  # keys of the first message
LATER = ("prompt", "chunks", "actions")  # and of those that follow
MOST_TEXT = 2**16  # characters of a message that follows
IDLE_SECONDS = 30.0  # for which a stream may wait for its client
ENCODINGS: Mapping[str, Mapping[str, int]] = {"png": {"compress_level": 1}, "jpeg": {"quality": 90}, "uint8": {}}
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
GUARDED = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}


@dataclass(frozen=True)
class Chunk:
    """The job of one chunk."""

    video: LiveVideo
    request: Request
    actions: np.ndarray | None

    def make(self) -> tuple[np.ndarray, float]:
        """Return the frames [frames, height, width, 3] and the seconds that they took."""
        began = time.perf_counter()
        (frames,) = to_uint8(self.video.next(self.request, self.actions))
        return frames, time.perf_counter() - began


@dataclass(frozen=True)
class Start:
    """The first message of a client."""

    request: Request
    seed: int
    frames: int  # 0: until the client leaves
    encoding: Literal["png", "jpeg", "uint8"]
    chunks: float  # that may be sent before the client asks for more
    actions: np.ndarray | None  # [rows, k] of the first chunk

    @classmethod
    def read(cls, asked: Mapping[str, Any], action_size: int) -> "Start":
        """Read it; raise UserError, naming the key, for what cannot be."""
        for key in asked:
            must_know("key of the first message", key, FIRST)
        if asked.get("protocol") != PROTOCOL:
            raise UserError(f"the first message must be an object with protocol {PROTOCOL}")
        seed, frames, encoding = asked.get("seed", 0), asked.get("frames", 0), asked.get("encoding", "png")
        if type(seed) is not int or not -(2**63) <= seed < 2**63:
            raise UserError("seed must be an integer of 64 bits")
        if type(frames) is not int or frames < 0:
            raise UserError("frames must be a number of frames, or 0 for a stream until the client leaves")
        if encoding not in ENCODINGS:
            raise UserError(f"encoding must be png, jpeg or uint8, not {encoding!r}")
        files = None if asked.get("image") is None else [asked["image"]]
        actions = _actions(asked, action_size) if action_size or "actions" in asked else None
        (request,) = Request.of(prompts_with_images([_prompt(asked)], files))
        return cls(request, seed, frames, encoding, _chunks(asked) if "chunks" in asked else math.inf, actions)


class Viewer:
    """A client: what it has asked for so far, and how much of it was sent."""

    def __init__(self, websocket: WebSocket, start: Start, video: LiveVideo, began: float, action_size: int) -> None:
        self._websocket, self._start, self._video, self._began = websocket, start, video, began
        self._request, self._actions, self._action_size = start.request, start.actions, action_size
        self._credit, self._granted = start.chunks, asyncio.Event()

    async def listen(self) -> None:
        """Take messages until the client leaves, which raises WebSocketDisconnect."""
        while True:
            asked = await _message(self._websocket, MOST_TEXT)
            for key in asked:
                must_know("key of a message", key, LATER)
            if "prompt" in asked:
                self._request = replace(self._request, text=_prompt(asked))
            if "actions" in asked:
                self._actions = _actions(asked, self._action_size)
            self._credit += _chunks(asked) if "chunks" in asked else 0
            self._granted.set()

    async def show(self, generate: Callable[[Chunk], "asyncio.Future[tuple[np.ndarray, float]]"]) -> None:
        """Send chunk after chunk, each when the one before was taken and the client has asked for it."""
        count, first, total, number = 0, 0.0, 0.0, 0
        while not self._start.frames or count < self._start.frames:
            await self._credited()
            request, actions = self._request, self._actions
            self._actions = None if actions is None else actions[-1:]  # held until others come
            frames, seconds = await generate(Chunk(self._video, request, actions))
            encoding = self._start.encoding
            data = await run_in_threadpool(_encoded, frames, encoding)
            first = first or time.perf_counter() - self._began
            head = {"chunk": number, "frames": len(frames), "shape": frames.shape, "encoding": encoding}
            head |= {"seconds": seconds, "first": first, "prompt": request.text}
            await _in_time(self._websocket.send_json(head))
            await _in_time(self._websocket.send_bytes(data))
            count, total, number = count + len(frames), total + seconds, number + 1
        await _in_time(self._websocket.send_json({"end": True, "frames": count, "seconds": total, "first": first}))

    async def _credited(self) -> None:
        while self._credit < 1:
            self._granted.clear()
            await _in_time(self._granted.wait())
        self._credit -= 1


class Streams:
    """The clients whose videos are generated now, `most` at once; `open_video` raises UserError for what cannot be.

    Each chunk is a job of its own in the queue of the batcher, so that other requests are answered between them.
    """

    def __init__(
        self, open_video: Callable[[Start], LiveVideo], batcher: "Batcher[Any, Any]", most: int, action_size: int = 0
    ) -> None:
        self._open_video, self._batcher, self._most, self._open = open_video, batcher, most, 0
        self._action_size = action_size  # numbers of each frame that the student takes

    def routes(self) -> list[BaseRoute]:
        """Return the route of the websocket, and that of a page that shows it in a browser."""
        return [WebSocketRoute("/stream", self._serve), Route("/", _page)]

    async def _serve(self, websocket: WebSocket) -> None:
        await websocket.accept()
        try:
            code, said = await self._outcome(websocket)
            if said:
                await _in_time(websocket.send_json({"error": said}))
            await _in_time(websocket.close(code))
        except (WebSocketDisconnect, UserError):
            pass  # the client left, or does not take its answer

    async def _outcome(self, websocket: WebSocket) -> tuple[int, str]:
        """Stream, and return the code that closes the websocket, 1000 or 4000 + that of a POST, and an error's text."""
        try:
            if self._open >= self._most:
                raise BusyError(f"{self._most} videos are streamed already: ask again later, or use a further server")
            self._open += 1
            try:
                await self._stream(websocket)
            finally:
                self._open -= 1
        except WebSocketDisconnect:
            raise
        except Exception as error:  # noqa: BLE001 - the server goes on
            code, said = refusal_of(error)
            return 4000 + code, said
        return 1000, ""

    async def _stream(self, websocket: WebSocket) -> None:
        asked = await _in_time(_message(websocket))
        began = time.perf_counter()
        start = await run_in_threadpool(Start.read, asked, self._action_size)  # a large image must not hold up others
        viewer = Viewer(websocket, start, self._open_video(start), began, self._action_size)
        both = asyncio.ensure_future(viewer.show(self._generate)), asyncio.ensure_future(viewer.listen())
        try:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
        for task in done:
            task.result()

    def _generate(self, chunk: Chunk) -> "asyncio.Future[tuple[np.ndarray, float]]":
        return asyncio.wrap_future(self._batcher.submit(chunk, chunk.video, self._batcher.limit))  # waits for no other


async def _message(websocket: WebSocket, most: float = math.inf) -> dict[str, Any]:
    received = await websocket.receive()
    if received["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(received["code"])
    text = received.get("text")
    if text is None or len(text) > most:
        raise UserError("a message must be text in JSON" + (f" of at most {most} characters" if text else ""))
    try:
        asked = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the message is no JSON: {error}") from error
    if not isinstance(asked, dict):
        raise UserError("a message must be an object")
    return asked


def _prompt(asked: Mapping[str, Any]) -> str:
    prompt = asked.get("prompt")
    if not isinstance(prompt, str) or len(prompt) > MOST_TEXT:
        raise UserError(f"prompt must be a text of at most {MOST_TEXT} characters")
    return prompt


def _chunks(asked: Mapping[str, Any]) -> int:
    chunks = asked["chunks"]
    if type(chunks) is not int or not 1 <= chunks < 2**31:
        raise UserError("chunks must be the number of further chunks that may be sent, at least 1")
    return chunks


def _actions(asked: Mapping[str, Any], size: int) -> np.ndarray:
    """Return the actions [rows, size] of a message."""
    if not size:
        raise UserError("this student takes no actions: leave actions out")
    if "actions" not in asked:
        raise UserError(
            f"actions are missing: this student takes rows of {size} numbers; a page has serve --action-names"
        )
    actions = Actions.of(asked["actions"], "actions")
    if actions.size != size:
        raise UserError(f"actions must be rows of {size} numbers, not {actions.size}")
    return actions.values


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
    Picture.fromarray(frames.reshape(-1, *frames.shape[2:])).save(file, encoding, **ENCODINGS[encoding])
    return file.getvalue()


async def _page(request: WebRequest) -> Response:
    page = (files("unified_trainer.tools.serve") / "live.html").read_text(encoding="utf-8")
    return HTMLResponse(page, headers=GUARDED)
