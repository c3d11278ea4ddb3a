"""The program of a scorer with a Python of its own: it loads the scorer and answers requests over a socket.

With `basics/read_code.py` it is the only file of this package that runs in that Python, as `PYTHON scorer_child.py
DESCRIPTOR`. It imports the standard library and torch, and works from Python 3.8 on, because the environment is the
user's.

A message is a JSON object with its length and that of the data behind it. The first one has the file, the object in it,
the settings, and the sources that the user agreed to, which are executed whatever the files hold by then; the answer is
{"images": whether it asks for condition images} once it is loaded. Each further one holds the prompts and the shape of
float32 videos, which are its data, with as many condition images behind them if "images" is true; the answer is
{"scores": [one number for each video]}; null is none, for the reason "unscored". Two other answers are the last ones:
{"refused": reason} for a wrong setting, and {"error": traceback, "fault": whether another call may succeed}.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

LENGTHS = struct.Struct("<QQ")  # bytes of the JSON object and of the data
FAULTS = (OSError, RuntimeError)  # of a device, a disk or a connection: another call may succeed
NO_DATA = memoryview(b"")


class HangUpError(Exception):
    """The other side has closed the connection."""


class WrongSettingError(Exception):
    """A setting does not fit what the file defines."""


def send(connection: socket.socket, message: dict[str, Any], data: memoryview = NO_DATA) -> None:
    """Send a message with its data."""
    text = json.dumps(message).encode()
    connection.sendall(LENGTHS.pack(len(text), len(data)) + text)
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytearray]:
    """Return the next message with its data; raise HangUpError if the other side has closed the connection."""
    text, data = LENGTHS.unpack(_read(connection, LENGTHS.size))
    return json.loads(_read(connection, text)), _read(connection, data)


def _read(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        count = connection.recv_into(rest)
        if not count:
            raise HangUpError
        rest = rest[count:]
    return data


def load(file: str, name: str, settings: dict[str, Any], sources: dict[str, str]) -> Callable[[Any, list[str]], Any]:
    """Execute the source of the user's file and return its function, or an object of its class.

    The class takes the settings. The file's folder comes last on the module path: a scorer `clip.py` can import the
    package `clip`.
    """
    package = Path(__file__).resolve().parent  # where Python looks first, since this file lies there
    place, folder = os.path.abspath(file), os.path.dirname(os.path.abspath(file))
    sys.path[:] = [place for place in sys.path if Path(place).resolve() != package] + [folder]
    found = importlib.util.spec_from_file_location("read_code", package.parent / "basics" / "read_code.py")
    assert found is not None and found.loader is not None  # it lies there
    read_code = importlib.util.module_from_spec(found)
    found.loader.exec_module(read_code)
    files = {path: source.encode("latin-1") for path, source in sources.items()}
    read_code.ReadModules(refuse).add(files, folder)
    module_name = f"unified_trainer_scorer_{Path(file).stem}"
    loader = read_code.FromBytes(module_name, place, files[place])
    spec = importlib.util.spec_from_file_location(module_name, place, loader=loader)
    assert spec is not None and spec.loader is not None  # that one
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        raise WrongSettingError(
            f"python: {file} needs the package {error.name}, which {sys.executable} does not have: install it there"
        ) from error
    if name not in vars(module):
        raise WrongSettingError(f"kind: {file} defines no {name}")
    scorer = vars(module)[name]
    if isinstance(scorer, type):
        scorer = scorer(settings)
    elif settings["path"] or settings["settings"]:
        setting = "path" if settings["path"] else f"settings.{next(iter(settings['settings']))}"
        raise WrongSettingError(f"{setting}: only a class takes settings, but {name} is a {type(scorer).__name__}")
    if not callable(scorer):
        raise WrongSettingError(
            f"kind: {name} is a {type(scorer).__name__}; expected a function, or a class with __call__"
        )
    return scorer


def refuse(file: str, folder: str) -> bytes:
    """Refuse a module of the scorer's folder that came with no agreement."""
    raise WrongSettingError(
        f"kind: the scorer imports {file}, which no import statement names, so that it was not looked at: write one"
    )


def asks_for_images(scorer: Callable[..., Any]) -> bool:
    """Whether a scorer has a parameter `images` behind videos and prompts."""
    try:
        return "images" in list(inspect.signature(scorer).parameters)[2:]
    except ValueError:
        return False  # a function of C without a signature


def score(scorer: Callable[..., Any], prompts: list[str], videos: Any, images: dict[str, Any]) -> list[float]:
    """Return the scores of videos; raise WrongSettingError unless there is one for each."""
    import torch

    with torch.no_grad():
        scores = torch.as_tensor(scorer(videos, prompts, **images))
    if scores.is_complex() or scores.dtype == torch.bool:
        raise WrongSettingError(f"kind: it gave scores of type {scores.dtype}, expected real numbers")
    if scores.shape != (len(videos),):
        raise WrongSettingError(
            f"kind: it gave scores of shape {list(scores.shape)} for {len(videos)} videos, expected one number for each"
        )
    return scores.tolist()


def serve(connection: socket.socket) -> None:
    """Load the scorer that the first message names, then score videos until the other side is gone."""
    first, _ = receive(connection)
    scorer = load(first["file"], first["name"], first["settings"], first["sources"])
    import torch  # an environment without it fails here, and not in the middle of a run

    asks = asks_for_images(scorer)
    send(connection, {"images": asks})
    while True:
        request, data = receive(connection)
        numbers = torch.frombuffer(data, dtype=torch.float32).to(first["settings"]["device"])
        count, channels, frames, height, width = request["shape"]
        videos = numbers[: count * channels * frames * height * width].view(request["shape"])
        rest = numbers[videos.numel() :].view(count, channels, height, width) if request["images"] else None
        try:
            images = {"images": rest} if asks else {}
            answer: dict[str, Any] = {"scores": score(scorer, request["prompts"], videos, images)}
        except vars(sys.modules.get("unified_trainer.basics.errors", sys)).get("UnscoredError", ()) as error:
            answer = {"scores": error.scores, "unscored": str(error)}
        send(connection, answer)


def end_with(connection: socket.socket) -> None:
    """Kill this process, and those that it started, as soon as the other side is gone: also in the middle of a call."""
    hang_up = select.poll()
    hang_up.register(connection, 0)
    hang_up.poll()
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Serve the socket that the command line names; an exception is an answer, and the last one."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=end_with, args=(connection,), daemon=True).start()
    try:
        serve(connection)
    except HangUpError:
        pass
    except WrongSettingError as error:
        send(connection, {"refused": str(error)})
    except Exception as error:  # noqa: BLE001 - it ends the run on the other side
        send(connection, {"error": traceback.format_exc(), "fault": isinstance(error, FAULTS)})


if __name__ == "__main__":
    main()
