"""Images that others made: bombs, damage and formats that are not listed are one sentence in every reader."""

import base64
import hashlib
import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Picture
from real_clips import read_clip

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.pictures import FORMATS, MOST_PIXELS, open_picture
from unified_trainer.basics.requests import Image
from unified_trainer.data.clips import VideoConfig
from unified_trainer.data.video_reader import VideoError
from unified_trainer.rewards.hpsv3_preprocessing import as_bytes
from unified_trainer.rewards.image_json import images_from_json

ONE = VideoConfig(frames=1, height=8, width=8)


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, *more: bytes) -> bytes:
    """A PNG file of zeros of which only a few rows are there."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    rows = chunk(b"IDAT", zlib.compress(bytes(min((3 * width + 1) * height, 2**16))))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(more) + rows + chunk(b"IEND", b"")


def encoded(kind: str) -> bytes:
    file = io.BytesIO()
    Picture.new("RGB", (9, 7), "red").save(file, kind)
    return file.getvalue()


BAD = {
    "more pixels than Pillow takes": png(40_000, 40_000),
    "more pixels than Pillow warns of": png(12_000, 12_000),
    "a text that fills the memory": png(9, 7, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**27)))),
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(x) run\n",
    "another format": encoded("PPM"),
    "cut short": encoded("PNG")[:45],
    "empty": b"",
    "a text": b"no image",
}
READERS = {
    "of a condition image": lambda file: Image.read(file, "image").at(8, 8),
    "of a condition image that was read": lambda file: Image(digest(file), file).at(8, 8),
    "of a clip": lambda file: read_clip(file, ONE),
    "of HPSv3": lambda file: as_bytes([file]),
    "of a server": lambda file: images_from_json([base64.b64encode(file.read_bytes()).decode()], 1),
}


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_bad_image_is_one_sentence(tmp_path, read, content):
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(UserError, match=r"(a\.png|image 1).*cannot be read as an image of") as caught:
        read(tmp_path / "a.png")
    assert isinstance(caught.value, VideoError) == (read is READERS["of a clip"])


@pytest.mark.parametrize("kind", FORMATS)
def test_listed_formats_are_read(tmp_path, kind):
    (tmp_path / "a.png").write_bytes(encoded(kind))
    assert Image.read(tmp_path / "a.png", "image").at(7, 9)[0].min() > 0.98
    assert np.ptp(read_clip(tmp_path / "a.png", ONE)[..., 0]) < 5


def test_pixels_are_counted_before_they_are_decoded():
    assert MOST_PIXELS < 2 * Picture.MAX_IMAGE_PIXELS, "Pillow itself refuses fewer"
    content, said = io.BytesIO(png(4, 3)), "4 x 3 pixels, more than 11"
    with pytest.raises(UserError, match=said), open_picture(content, "x", most=11):
        raise AssertionError
