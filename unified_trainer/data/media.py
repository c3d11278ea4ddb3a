"""Facts of a video or image file, and what becomes of each: `Fact` is the table that docs/data.md shows."""

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import av
import numpy as np
from PIL.Image import Image

from unified_trainer.basics.errors import UserError
from unified_trainer.data.color import HLG, PQ, WIDE

Turn = tuple[int, int, int, int]  # signs of a, b, c and d: a pixel at (x, y) is shown at (a x + c y, b x + d y)
UNTURNED: Turn = (1, 0, 0, 1)


class VideoError(UserError):
    """A video that cannot be used; the message names the file and the reason."""


class DamagedError(VideoError):
    """A video that is damaged."""


class TooShortError(VideoError):
    """A video of only so many frames."""

    def __init__(self, message: str, frames: int) -> None:
        super().__init__(message)
        self.frames = frames


class Rule(NamedTuple):
    """A rule for a fact: what becomes of the clip, and how; `counted` is its name in a summary, if it has one."""

    about: str
    becomes: str
    how: str
    counted: str = ""


class Fact(Rule, Enum):
    """A fact of a file or of its decoding that a plain file lacks, with its rule."""

    TURNED = ("rotation, mirroring", "converted", "the picture is shown as the file says", "turned or mirrored")
    SKEWED = ("a display matrix of another angle", "refused", "turned by no multiple of 90 degrees: turn its frames")
    HDR = ("transfer function HLG or PQ", "converted", "to SDR by the formulas below", "converted from HDR")
    WIDE = ("primaries of BT.2020 or P3, in SDR", "converted", "to BT.709, as below", "converted from a wide gamut")
    TRANSFER = ("another transfer function", "refused", "linear, logarithmic or SMPTE ST 428: convert it to BT.709")
    MATRIX = ("another color matrix", "refused", "in YCgCo, ICtCp or the like: convert it to BT.709")
    FULL = ("full range", "converted", "0 to 255 are black and white, as 16 to 235 are in limited range")
    DEEP = ("more than 8 bits", "converted", "rounded to 8 bits")
    ALPHA = ("transparency", "converted", "the picture lies on white", "laid on white")
    HIDDEN_ALPHA = ("transparency of VP8 or VP9", "refused", "its transparency cannot be decoded: lay it on a color")
    HDR_ALPHA = ("transparency with HLG or PQ", "refused", "HDR with transparency: lay it on a color")
    MODE = ("gray, palette, CMYK, color profile", "converted", "to sRGB, by the profile", "converted to sRGB")
    INTERLACED = ("interlacing", "converted", "the first field is scaled to the whole height", "deinterlaced")
    SEVERAL = ("several videos in a file", "warned", "the default one is used", "of several")
    SLOW = ("a frame rate below `video.fps`", "warned", "frames are repeated", "with repeated frames")
    ENCRYPTED = ("encryption", "refused", "encrypted: decrypt it")
    UNKNOWN = ("a codec without decoder", "refused", "no decoder for its codec: convert it, such as to H.264")
    FLAGGED = ("damage that the decoder reports", "damaged", "damaged: the decoder reports it")
    HOLE = ("a hole in time", "damaged", "damaged: frames are missing for more than a quarter of a second")


Facts = frozenset[Fact]


class Clip(NamedTuple):
    """The frames [t, h, w, 3] of a file, uint8, and its facts."""

    frames: np.ndarray
    facts: Facts
    shown: tuple[float, float]  # height and width of the file's own picture, upright and in square pixels


def refuse(file: Path, facts: Iterable[Fact], seconds: float = 0.0) -> None:
    """Raise VideoError for facts with which a clip cannot be used, DamagedError for damage, found at a moment."""
    for fact in facts:
        if fact.becomes in ("refused", "damaged"):
            error = DamagedError if fact.becomes == "damaged" else VideoError
            raise error(f"{file}: {fact.how}" + (f" (at {seconds:.2f} s)" if seconds else ""))


def of_frame(frame: av.VideoFrame, packet: av.Packet) -> Facts:
    """Return what a frame says of itself; the frame came out of the decoder when this packet went in."""
    transfer, turn, kind = frame.color_trc, turn_of(frame), frame.format
    alpha, hdr = len(kind.components) in (2, 4) or kind.has_palette, transfer in (HLG, PQ)
    facts = of(TURNED=turn not in (UNTURNED, None), SKEWED=turn is None, INTERLACED=frame.interlaced_frame)
    facts |= of(HDR=hdr, WIDE=not hdr and frame.color_primaries in WIDE, TRANSFER=transfer in (8, 9, 10, 17))  # H.273
    facts |= of(MATRIX=frame.colorspace == 8 or frame.colorspace > 9, FULL=frame.color_range == 2)  # H.273
    facts |= of(ALPHA=alpha, HDR_ALPHA=alpha and hdr, DEEP=kind.components[0].bits > 8)
    return facts | of(FLAGGED=frame.is_corrupt or packet.is_corrupt)


def of_times(times: Sequence[Fraction], fps: float) -> Facts:
    """Return what the moments of a clip's frames and its end, in seconds, say of it."""
    intervals = [float(abs(later - earlier)) for earlier, later in pairwise(times)]
    usual = median(intervals)
    return of(HOLE=max(intervals) > max(0.25, 5 * usual), SLOW=usual * fps > 1.05)


def of_picture(picture: Image) -> Facts:
    """Return the facts of an image file."""
    turned = picture.getexif().get(0x0112, 1) in range(2, 9)  # Exif's orientation
    mode = picture.mode not in ("RGB", "RGBA") or "icc_profile" in picture.info
    facts = of(TURNED=turned, MODE=mode, ALPHA=picture.has_transparency_data)
    return facts | of(DEEP=picture.mode.startswith("I;16"))


def of(**holds: bool) -> Facts:
    """Return the facts that hold."""
    return frozenset(Fact[name] for name, true in holds.items() if true)


def summary(clips: Sequence[Facts], damaged: int = 0, others: int = 0) -> str:
    """Return in a line how many clips were used, how many of them needed what, and how many could not be used."""
    counts, total = Counter(fact for facts in clips for fact in facts), len(clips) + damaged + others
    needed = ", ".join(f"{counts[fact]} {fact.counted}" for fact in Fact if counts[fact] and fact.counted)
    line = f"{total} {'clip' if total == 1 else 'clips'}: {len(clips)} used" + (f" ({needed})" if needed else "")
    return line + (f", {damaged} damaged" if damaged else "") + (f", {others} left out" if others else "")


def turn_of(frame: av.VideoFrame) -> Turn | None:
    """Return how a frame is turned and mirrored by its display matrix; None by an angle between, or onto a line."""
    found = frame.side_data.get("DISPLAYMATRIX")
    a, b, _, c, d = np.frombuffer(bytes(found), np.int32)[:5].tolist() if found else (1, 0, 0, 0, 1)
    straight, crossed = max(abs(a), abs(d)), max(abs(b), abs(c))
    if min(straight, crossed) > 0.01 * max(straight, crossed):
        return None
    sign = [(value > 0) - (value < 0) for value in (a, b, c, d)]
    turn = (sign[0], 0, 0, sign[3]) if straight > crossed else (0, sign[1], sign[2], 0)
    return UNTURNED if not any(turn) else turn if sum(map(abs, turn)) == 2 else None
