"""Writing videos: mp4 files, and a contact sheet of several videos."""

from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageDraw

from unified_trainer.types import Video

COLUMNS = 6  # frames of a row of the contact sheet
MIN_SIDE = 96  # pixels; smaller frames are enlarged
TEXT_HEIGHT = 14  # pixels


def write_mp4(frames: np.ndarray, file: Path, frames_per_second: int = 8) -> None:
    """Write frames [t, h, w, 3] uint8 as an H.264 file."""
    with Mp4(file, frames_per_second) as video:
        video.add(frames)


class Mp4:
    """An H.264 file to which frames [t, h, w, 3] uint8 are added; a context manager that closes it."""

    def __init__(self, file: Path, frames_per_second: int = 8) -> None:
        self._container = av.open(str(file), "w")
        self._stream = self._container.add_stream("libx264", rate=frames_per_second)
        self._stream.pix_fmt = "yuv420p"

    def __enter__(self) -> "Mp4":
        return self

    def add(self, frames: np.ndarray) -> None:
        """Append frames [t, h, w, 3] uint8."""
        if not self._stream.codec_context.is_open:
            self._stream.height, self._stream.width = frames.shape[1:3]
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            self._container.mux(self._stream.encode(picture))

    def __exit__(self, *_: object) -> None:
        self._container.mux(self._stream.encode())
        self._container.close()


def contact_sheet(videos: Sequence[np.ndarray], captions: Sequence[str], file: Path) -> None:
    """Write a picture with a row of frames for each video, first to last, below its caption."""
    frames, height, width = videos[0].shape[:3]
    picks = np.linspace(0, frames - 1, min(COLUMNS, frames)).round().astype(int)
    scale = max(1, -(-MIN_SIDE // min(height, width)))
    height, width = height * scale, width * scale
    sheet = Image.new("RGB", (width * len(picks), (height + TEXT_HEIGHT) * len(videos)), "white")
    pen = ImageDraw.Draw(sheet)
    for row, (video, caption) in enumerate(zip(videos, captions, strict=True)):
        top = row * (height + TEXT_HEIGHT)
        pen.text((2, top + 1), caption, fill="black")
        for column, pick in enumerate(picks):
            picture = Image.fromarray(video[pick]).resize((width, height), Image.Resampling.NEAREST)
            sheet.paste(picture, (column * width, top + TEXT_HEIGHT))
    sheet.save(file)


def to_uint8(video: Video) -> list[np.ndarray]:
    """Convert videos in [0, 1] to frames [t, h, w, 3] uint8, one array for each video."""
    return list((video * 255).round().clamp(0, 255).byte().movedim(1, -1).cpu().numpy())
