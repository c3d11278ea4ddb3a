"""Video for people: mp4 files and a contact sheet that can be looked at."""

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
    """Frames [t, h, w, 3] uint8 as H.264."""
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=frames_per_second)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())


def contact_sheet(videos: Sequence[np.ndarray], captions: Sequence[str], file: Path) -> None:
    """One row a video, frames from the first to the last, its caption above."""
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
    """Each video in [0, 1] as frames [t, h, w, 3]."""
    return list((video * 255).round().clamp(0, 255).byte().movedim(1, -1).cpu().numpy())
