"""Videos inside a page: which validations are shown within a size, as data URIs of H.264 or WebM."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import av

from unified_trainer.basics.errors import UserError
from unified_trainer.tools.report.run_folder import ValidationRecord

VideoFormat = Literal["mp4", "webm"]


def data_uri(file: Path, form: VideoFormat) -> str:
    """Return an image or a video, which is encoded again for webm, as a data URI; UserError if it cannot be read."""
    try:
        if file.suffix == ".png":
            return f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"
        content = file.read_bytes() if form == "mp4" else _webm(file)
    except (OSError, av.FFmpegError) as error:
        raise UserError(
            f"{file} cannot be read as a video ({error}): remove it, or its line in samples.jsonl"
        ) from error
    return f"data:video/{form};base64,{base64.b64encode(content).decode()}"


def _webm(file: Path) -> bytes:
    """Return a video as VP9 in WebM, which browsers without H.264 decode."""
    written = io.BytesIO()
    with av.open(str(file)) as source, av.open(written, "w", format="webm") as target:
        read = source.streams.video[0]
        stream = target.add_stream("libvpx-vp9", rate=read.average_rate)
        stream.width, stream.height, stream.pix_fmt = read.width, read.height, "yuv420p"
        stream.options = {"crf": "24", "b": "0", "cpu-used": "5"}
        for frame in source.decode(read):
            frame.pts = None
            target.mux(stream.encode(frame))
        target.mux(stream.encode())
    return written.getvalue()


def within(validations: Sequence[ValidationRecord], limit: float) -> tuple[tuple[ValidationRecord, ...], int]:
    """Return validations whose videos are at most `limit` bytes together, and the number of samples of each.

    Validations in the middle are left out evenly at first, then samples: one sample of the first and of the last
    validation stays unless the limit is 0.
    """
    shown = [validation for validation in validations if any(sample.video for sample in validation.samples)]
    if not shown or limit <= 0:
        return (), 0
    sizes = [[sample.video.stat().st_size for sample in validation.samples if sample.video] for validation in shown]
    samples = max(map(len, sizes))
    last = len(shown) - 1
    for stride in range(1, max(last, 1) + 1):
        kept = sorted({*range(0, last, stride), last})
        if sum(sum(sizes[i]) for i in kept) <= limit:
            return tuple(shown[i] for i in kept), samples
    kept = sorted({0, last})
    while samples > 1 and sum(sum(sizes[i][:samples]) for i in kept) > limit:
        samples -= 1
    return tuple(shown[i] for i in kept), samples
