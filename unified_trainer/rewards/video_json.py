"""Videos as JSON: raw numbers in base64 with their shape."""

import base64
import binascii
import math
from typing import Any, Literal

import torch

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.types import Video

PROTOCOL = 1  # the version of requests and answers, docs/rewards.md and docs/tools.md
Encoding = Literal["float32", "uint8"]
NUMPY = {"float32": "<f4", "uint8": "u1"}  # little-endian
TORCH = {"float32": torch.float32, "uint8": torch.uint8}


def to_json(video: Video, encoding: Encoding) -> dict[str, Any]:
    """Return a video as JSON: float32 is exact, uint8 rounds to multiples of 1 / 255.

    Raise ValueError for a pixel outside [0, 1].
    """
    pixels = video.detach().to("cpu", torch.float32)
    _refuse_outside(pixels, ValueError)
    if encoding == "uint8":
        pixels = (255 * pixels).round().to(torch.uint8)
    data = pixels.contiguous().numpy().astype(NUMPY[encoding]).tobytes()
    return {"shape": list(video.shape), "encoding": encoding, "data": base64.b64encode(data).decode()}


def from_json(video: object) -> Video:
    """Return the video that JSON holds, as float32 in [0, 1]; raise UserError unless it is whole."""
    if not isinstance(video, dict) or not {"shape", "encoding", "data"} <= video.keys():
        raise UserError("videos must be an object with shape, encoding and data")
    shape, encoding, data = video["shape"], video["encoding"], video["data"]
    sizes = isinstance(shape, list) and all(type(size) is int and size > 0 for size in shape)
    if not sizes or len(shape) != 5 or shape[1] != 3:
        raise UserError(f"videos.shape must be [videos, 3, frames, height, width], not {shape}")
    if encoding not in TORCH:
        raise UserError(f"videos.encoding must be float32 or uint8, not {encoding!r}")
    try:
        numbers = bytearray(base64.b64decode(data, validate=True))
    except (binascii.Error, TypeError, ValueError) as error:
        raise UserError(f"videos.data is no base64: {error}") from error
    if len(numbers) != math.prod(shape) * TORCH[encoding].itemsize:
        raise UserError(f"videos.data has {len(numbers)} bytes, which do not fit {encoding} of shape {shape}")
    pixels = torch.frombuffer(numbers, dtype=TORCH[encoding]).view(shape)
    pixels = pixels.float() / 255 if encoding == "uint8" else pixels
    _refuse_outside(pixels, UserError)
    return pixels


def _refuse_outside(pixels: Video, kind: type[ValueError]) -> None:
    for i, video in enumerate(pixels):
        if not bool(((video >= 0) & (video <= 1)).all()):
            raise kind(f"video {i} spans {float(video.min())}..{float(video.max())}, expected values in [0, 1]")
