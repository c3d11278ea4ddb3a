"""Videos and images with each fact of `unified_trainer.data.media.Fact`, small and made here."""

import struct
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image
from real_clips import grays, quarters

from unified_trainer.data.media import Fact
from unified_trainer.data.video_files import write_mp4

QUARTERS = quarters(9, 64, 64)
CLEAR = np.concatenate([QUARTERS, np.full((9, 64, 64, 1), 255, np.uint8)], -1)
CLEAR[:, :32, :, 3] = 0  # above, red and green are hidden
HLG, PQ, BT2020 = 18, 16, 9  # H.273


def write(file: Path, frames: np.ndarray, codec: str, kind: str, *, given: str = "rgb24", more=(), **said) -> Path:
    """Write frames at 8 per second in a pixel format; `said` are attributes of the encoder, `more` its options."""
    options = dict(more)
    with av.open(str(file), "w", options=options.pop("file", {})) as container:
        stream = container.add_stream(codec, rate=8, options=options)
        stream.pix_fmt, (stream.height, stream.width) = kind, frames.shape[1:3]
        for name, value in said.items():
            setattr(stream.codec_context, name, value)
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format=given)
            container.mux(stream.encode(picture.reformat(format=kind)))
        container.mux(stream.encode())
    return file


def signals(file: Path, values: np.ndarray, transfer: int, primaries: int = BT2020) -> Path:
    """Write signals [t, h, w, 3] from 0 to 1 without loss."""
    frames = (values * 65535).round().astype(np.uint16)
    return write(file, frames, "ffv1", "gbrp16le", given="rgb48le", color_trc=transfer, color_primaries=primaries)


def turned(file: Path, a: float, b: float, c: float, d: float) -> Path:
    """Write quarters with a display matrix: columns of fractions of 65536 and of 2^30."""

    def packed(*values: float) -> bytes:
        a, b, c, d = (round(value * 65536) for value in values)
        return struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)

    write_mp4(QUARTERS, file, 8)
    data = file.read_bytes()
    at, matrix = data.index(packed(1, 0, 0, 1), data.index(b"tkhd")), packed(a, b, c, d)
    file.write_bytes(data[:at] + matrix + data[at + len(matrix) :])
    return file


def renamed(file: Path) -> Path:
    """Write a video whose codec nobody knows."""
    write_mp4(QUARTERS, file, 8)
    file.write_bytes(file.read_bytes().replace(b"avc1", b"zzzz"))
    return file


def moving(count: int = 9) -> np.ndarray:
    """Return frames of noise that moves, which takes many bytes."""
    noise = np.random.default_rng(0).integers(0, 256, (128, 128 + 2 * count, 3), np.uint8)
    return np.stack([noise[:, 2 * i : 2 * i + 128] for i in range(count)])


def spoilt(file: Path, seed: int = 2) -> Path:
    """Overwrite 16 bytes of a file in its second half."""
    data, draw = bytearray(file.read_bytes()), np.random.default_rng(seed)
    at = int(draw.integers(len(data) // 4, len(data) // 2))
    data[at : at + 16] = draw.bytes(16)
    file.write_bytes(data)
    return file


def h264(file: Path, count: int = 9) -> Path:
    write_mp4(moving(count), file, 8)
    return file


def with_hole(file: Path) -> Path:
    """Write a video of 25 frames per second in which 10 are missing."""
    with av.open(str(file), "w") as container:
        stream = container.add_stream("ffv1", rate=25)
        stream.pix_fmt, stream.height, stream.width = "bgr0", 16, 16
        stream.codec_context.time_base = Fraction(1, 25)
        for gray, time in zip(grays(40), (*range(8), *range(18, 50)), strict=True):
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(gray), format="rgb24").reformat(format="bgr0")
            picture.pts, picture.time_base = time, Fraction(1, 25)
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return file


def two_videos(file: Path) -> Path:
    with av.open(str(file), "w") as container:
        streams = [container.add_stream("ffv1", rate=8) for _ in range(2)]
        for stream in streams:
            stream.pix_fmt, stream.height, stream.width = "bgr0", 64, 64
        for frame in QUARTERS:
            for stream in streams:
                picture = av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(format="bgr0")
                container.mux(stream.encode(picture))
        for stream in streams:
            container.mux(stream.encode())
    return file


def picture(file: Path, pixels: np.ndarray, **options: object) -> Path:
    Image.fromarray(pixels).save(file, **options)
    return file


KEYS = {"encryption_scheme": "cenc-aes-ctr", "encryption_key": "01" * 16, "encryption_kid": "02" * 16}
GRAY = np.full((9, 16, 16, 3), 0.5)
MADE: dict[Fact, Callable[[Path], Path]] = {
    Fact.TURNED: lambda folder: turned(folder / "a.mp4", -1, 0, 0, 1),
    Fact.SKEWED: lambda folder: turned(folder / "a.mp4", 0.7, 0.7, -0.7, 0.7),
    Fact.HDR: lambda folder: signals(folder / "a.mkv", GRAY, HLG),
    Fact.WIDE: lambda folder: signals(folder / "a.mkv", GRAY, 1),
    Fact.TRANSFER: lambda folder: signals(folder / "a.mkv", GRAY, 8),
    Fact.MATRIX: lambda folder: write(folder / "a.mp4", QUARTERS, "libx264", "yuv444p", colorspace=8),
    Fact.FULL: lambda folder: write(folder / "a.mp4", QUARTERS, "libx264", "yuv420p", color_range=2),
    Fact.DEEP: lambda folder: write(folder / "a.mkv", QUARTERS, "ffv1", "yuv444p10le"),
    Fact.ALPHA: lambda folder: write(folder / "a.mov", CLEAR, "png", "rgba", given="rgba"),
    Fact.HIDDEN_ALPHA: lambda folder: write(
        folder / "a.webm", CLEAR, "libvpx-vp9", "yuva420p", given="rgba", more={"auto-alt-ref": "0"}
    ),
    Fact.HDR_ALPHA: lambda folder: write(folder / "a.mkv", CLEAR, "ffv1", "yuva444p10le", given="rgba", color_trc=PQ),
    Fact.MODE: lambda folder: picture(folder / "a.jpg", np.zeros((64, 64, 4), np.uint8)[..., 0]),
    Fact.INTERLACED: lambda folder: write(
        folder / "a.mp4", QUARTERS, "libx264", "yuv420p", more={"x264-params": "tff=1"}
    ),
    Fact.SEVERAL: lambda folder: two_videos(folder / "a.mkv"),
    Fact.SLOW: lambda folder: write(folder / "a.mkv", QUARTERS, "ffv1", "bgr0"),
    Fact.ENCRYPTED: lambda folder: write(folder / "a.mp4", QUARTERS, "libx264", "yuv420p", more={"file": KEYS}),
    Fact.UNKNOWN: lambda folder: renamed(folder / "a.mp4"),
    Fact.FLAGGED: lambda folder: spoilt(h264(folder / "a.mp4")),
    Fact.HOLE: lambda folder: with_hole(folder / "a.mkv"),
}
