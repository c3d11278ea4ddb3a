"""Writing videos: mp4 files, images of one frame, and a contact sheet of several videos."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Self

import av
import numpy as np
from PIL import Image, ImageDraw

from unified_trainer.basics.own_files import without_link
from unified_trainer.basics.types import Video
from unified_trainer.data.fonts import Font, font_for, plain_font

COLUMNS = 6  # frames of a row of the contact sheet
MIN_SIDE = 96  # pixels; smaller frames are enlarged
TEXT_HEIGHT = 16  # pixels of a line of text
MARGIN = 2  # pixels left and right of it
LINES = 3  # of a prompt; samples.jsonl has all of it


def file_name(stem: object, frames: int) -> str:
    """Return the name of the file of a video of so many frames: a PNG for one, which is an image."""
    return f"{stem}.png" if frames == 1 else f"{stem}.mp4"


def write_clip(frames: np.ndarray, file: Path, fps: float) -> None:
    """Write frames [t, h, w, 3] uint8 to a file named by `file_name`."""
    with writer(file, fps) as clip:
        clip.add(frames)


def writer(file: Path, fps: float, sample_rate: int = 0) -> "ClipFile":
    """Return a context manager to whose file, named by `file_name`, frames are added, and a sound if it has a rate."""
    return Png(file) if file.suffix == ".png" else Mp4(file, fps, sample_rate)


def write_mp4(frames: np.ndarray, file: Path, fps: float) -> None:
    """Write frames [t, h, w, 3] uint8 as an H.264 file of `fps` frames per second."""
    with Mp4(file, fps) as video:
        video.add(frames)


class ClipFile:
    """A file to which frames [t, h, w, 3] uint8 are added; a context manager that closes it."""

    def __enter__(self) -> Self:
        return self

    def add(self, frames: np.ndarray) -> None:
        """Append frames."""
        raise NotImplementedError

    def add_sound(self, values: np.ndarray) -> None:
        """Append the values [2, n] of a sound, float32 in [-1, 1]; an image takes none."""

    def __exit__(self, *_: object) -> None:
        """Leave a whole file."""


class Mp4(ClipFile):
    """An H.264 file; with a sample rate its sound is AAC of two channels."""

    def __init__(self, file: Path, fps: float, sample_rate: int = 0) -> None:
        self._container = av.open(str(without_link(file)), "w")
        self._stream = self._container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        self._stream.pix_fmt = "yuv420p"
        self._sound = self._container.add_stream("aac", rate=sample_rate, layout="stereo") if sample_rate else None

    def add(self, frames: np.ndarray) -> None:
        if not self._stream.codec_context.is_open:
            self._stream.height, self._stream.width = frames.shape[1:3]
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            self._container.mux(self._stream.encode(picture))

    def add_sound(self, values: np.ndarray) -> None:
        assert self._sound is not None  # a file with a sample rate
        sound = av.AudioFrame.from_ndarray(np.ascontiguousarray(values), format="fltp", layout="stereo")
        sound.sample_rate = self._sound.rate
        self._container.mux(self._sound.encode(sound))

    def __exit__(self, *_: object) -> None:
        for stream in filter(None, (self._stream, self._sound)):
            self._container.mux(stream.encode())
        self._container.close()


class Png(ClipFile):
    """An image, of one frame."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def add(self, frames: np.ndarray) -> None:
        Image.fromarray(frames[0]).save(without_link(self._file))


@dataclass(frozen=True)
class Row:
    """A row of a contact sheet: a video of frames [t, h, w, 3] uint8, and the text above it."""

    frames: np.ndarray
    about: str  # such as step, seed and score, in Latin letters
    prompt: str
    images: tuple[np.ndarray, ...] = ()  # condition images [h, w, 3] uint8, before the frames


def contact_sheet(rows: Sequence[Row], file: Path) -> None:
    """Write a picture with a row for each video: its condition images and its frames, first to last, below its text.

    A prompt for which this machine has no font is in a page of the picture's name with the suffix .html, beside it.
    """
    frames, height, width = rows[0].frames.shape[:3]
    picks = np.linspace(0, frames - 1, min(COLUMNS, frames)).round().astype(int)
    columns = len(picks) + max(len(row.images) for row in rows)
    scale = max(1, -(-MIN_SIDE // min(height, width)))
    height, width = height * scale, width * scale
    page = file.with_suffix(".html")
    fonts = [font_for(row.prompt) for row in rows]
    texts = [
        [f"(prompt: see {page.name})"] if font is None else _lines(row.prompt, font, width * columns - 2 * MARGIN)
        for row, font in zip(rows, fonts, strict=True)
    ]
    heights = [TEXT_HEIGHT * (1 + len(lines)) + height for lines in texts]
    sheet = Image.new("RGB", (width * columns, sum(heights)), "white")
    pen, top = ImageDraw.Draw(sheet), 0
    for row, font, lines, row_height in zip(rows, fonts, texts, heights, strict=True):
        pen.text((MARGIN, top), row.about, fill="dimgray", font=plain_font())
        for i, line in enumerate(lines, 1):
            pen.text((MARGIN, top + i * TEXT_HEIGHT), line, fill="black", font=font or plain_font())
        for column, pixels in enumerate([*row.images, *(row.frames[pick] for pick in picks)]):
            picture = Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST)
            sheet.paste(picture, (column * width, top + row_height - height))
        top += row_height
    sheet.save(without_link(file))
    if None in fonts:
        without_link(page).write_text(_page(file.name, rows, heights), encoding="utf-8")


def _lines(text: str, font: Font, width: int) -> list[str]:
    """Break a text into lines of at most `width` pixels, between words if it has them; cut it after LINES lines."""
    lines, line = [], ""
    for word in re.findall(r"\s*\S+", " ".join(text.split())):
        pieces = [word] if font.getlength(word.strip()) <= width else list(word)
        for piece in pieces:
            if line and font.getlength(line + piece) > width:
                lines.append(line)
                line = piece.lstrip()
            else:
                line += piece
    lines.append(line)
    if len(lines) > LINES:
        lines = [*lines[: LINES - 1], lines[LINES - 1][:-1].rstrip() + " ..."]
    return lines


def _page(picture: str, rows: Sequence[Row], heights: Sequence[int]) -> str:
    """Return a page with the picture, and each prompt beside its row."""
    prompts = "\n".join(
        f'<p dir="auto" style="height:{height}px">{html.escape(row.prompt)}</p>'
        for row, height in zip(rows, heights, strict=True)
    )
    style = "body, p {margin: 0} body {display: flex} img {align-self: start} p {overflow: auto; padding-left: 1em}"
    head = f'<!doctype html>\n<meta charset="utf-8">\n<title>{picture}</title>\n<style>{style}</style>'
    return f'{head}\n<img src="{picture}" alt="">\n<div>\n{prompts}\n</div>\n'


def to_uint8(video: Video) -> list[np.ndarray]:
    """Convert videos in [0, 1] to frames [t, h, w, 3] uint8, one array for each video."""
    return list((video * 255).round().clamp(0, 255).byte().movedim(1, -1).cpu().numpy())
