"""Reading videos: the first frames of a file, at a rate and a size of one's own."""

import hashlib
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import av
import numpy as np
import torch
from PIL import Image

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import check_file
from unified_trainer.basics.pictures import MOST_PIXELS, open_picture, to_rgb
from unified_trainer.basics.requests import Image as Condition
from unified_trainer.basics.requests import cover
from unified_trainer.basics.types import Video
from unified_trainer.data import media
from unified_trainer.data.buckets import Sizes, fitting
from unified_trainer.data.captioned import PICTURES, VIDEOS, CaptionedVideo
from unified_trainer.data.clips import VideoConfig
from unified_trainer.data.color import to_sdr
from unified_trainer.data.media import Clip, DamagedError, Fact, Facts, TooShortError, VideoError

# FFmpeg's readers of playlists, which have no place here, open the files that a playlist names.
CONTAINERS = {"format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi", "protocol_whitelist": "file"}
# Decoders that conceal damage without a word unless they may raise. H.264's reports it, and would refuse whole videos
# that were cut at an open group of pictures.
MAY_RAISE = ("hevc", "mjpeg")
SMALL = (16, 16)  # height and width of a clip that is decoded to see whether it can be
ROUNDING = Fraction(1, 500)  # seconds by which a container may round time stamps


def inspect_clip(file: Path, size: VideoConfig, start: float = 0.0) -> Clip:
    """Return `size.frames` frames from `start` on at `size.fps` per second, uint8 [t, h, w, 3], and the file's facts.

    Frame k is the one on show start + k / fps seconds after the first: faster videos lose frames, slower ones repeat
    them. A frame is scaled to cover height and width (bicubic, antialiased, with square pixels) and cropped around its
    centre. An image is one frame. Raise VideoError for a file that is too short, or that `Fact` refuses or calls
    damaged.
    """
    if file.suffix.lower() in PICTURES:
        return _image(file, size)
    try:
        with av.open(str(file), options=CONTAINERS, metadata_errors="replace") as container:
            stream = container.streams.best("video")
            if not isinstance(stream, av.VideoStream):
                raise VideoError(f"{file}: holds no video")
            return _sample(file, container, stream, size, start)
    except (av.FFmpegError, OSError) as error:
        raise DamagedError(f"{file}: cannot be decoded ({error.strerror})") from error


def read_condition(file: Path, place: str, fps: float) -> Condition:
    """Return a condition image, or a clip of so many frames per second, by the ending of a file.

    UserError, which begins with `place`, for a file that cannot be read.
    """
    if file.suffix.lower() not in VIDEOS:
        return Condition.read(file, place)
    check_file(file, place)
    clip = Condition(hashlib.sha256(file.read_bytes()).hexdigest(), file, reader=partial(_frames, fps=fps))
    try:
        clip.first(*SMALL)
    except VideoError as error:
        raise UserError(f"{place} {error}") from error
    return clip


def _frames(file: Path, frames: int, height: int, width: int, *, fps: float) -> np.ndarray:
    return inspect_clip(file, VideoConfig(frames, height, width, fps)).frames


def _image(file: Path, size: VideoConfig) -> Clip:
    """Return an image as a clip of one frame; VideoError for one that cannot be read, or if more are asked for."""
    if size.frames > 1:
        raise TooShortError(f"{file}: an image is no video of the {size.frames} frames of video.frames", 1)
    try:
        with open_picture(file, str(file)) as opened:
            facts, upright = media.of_picture(opened), to_rgb(opened)
            picture = cover(upright, size.height, size.width, kernel=Image.Resampling.BICUBIC)
    except UserError as error:
        raise VideoError(str(error)) from error
    return Clip(np.array(picture)[None], facts, (upright.height, upright.width))


def read_clips(
    videos: Sequence[CaptionedVideo], size: VideoConfig | Sizes, workers: int
) -> Iterator[tuple[CaptionedVideo, Clip | VideoError]]:
    """Yield the videos in order, each with its clip or with the reason why there is none.

    Up to `workers` threads decode ahead of the caller, and hold as many clips in memory.
    """
    pool = ThreadPoolExecutor(workers, thread_name_prefix="decode")
    waiting: deque[tuple[CaptionedVideo, Future[Clip | VideoError]]] = deque()
    try:
        for video in videos:
            waiting.append((video, pool.submit(_attempt, video, size)))
            if len(waiting) > workers:
                first, clip = waiting.popleft()
                yield first, clip.result()
        for video, clip in waiting:
            yield video, clip.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def to_video(clip: np.ndarray) -> Video:
    """Convert frames [t, h, w, 3] uint8 to a batch of one video in [0, 1]."""
    return torch.from_numpy(clip).movedim(-1, 0)[None].float() / 255


def read_video(video: CaptionedVideo, size: VideoConfig | Sizes) -> Clip:
    """Return `inspect_clip` of a video, or of its part, at a size, or at that of sizes which suits it.

    VideoError names the place of a video that a file holds.
    """
    if not isinstance(size, VideoConfig):
        return _read_fitting(video, size) if len(size) > 1 else read_video(video, size[0])
    if (seconds := video.end - video.start) < (size.frames - 1) / size.fps:
        why = f"too short: {size.frames} frames go beyond {video.end:g} s, where its part ends"
        raise TooShortError(f"{video.file}: {why}", 1 + int(seconds * size.fps))
    with video.on_disk() as file:
        try:
            return inspect_clip(file, size, video.start)
        except VideoError as error:
            error.args = (str(error).replace(str(file), str(video.file)),)
            raise


def _read_fitting(video: CaptionedVideo, sizes: Sizes) -> Clip:
    """Return a video at the size of its bucket; a file does not say for certain how many frames it has."""
    shown, frames = read_video(video, replace(sizes[0], frames=1)).shown, max(size.frames for size in sizes)
    while size := fitting(sizes, frames, *shown):
        try:
            return read_video(video, size)
        except TooShortError as error:
            frames = error.frames
    least = min(size.frames for size in sizes)
    why = f"too short: {frames} frames at {sizes[0].fps:g} per second, the shortest of data.buckets has {least}"
    raise TooShortError(f"{video.file}: {why}", frames)


def _attempt(video: CaptionedVideo, size: VideoConfig | Sizes) -> Clip | VideoError:
    if video.fault:
        return VideoError(f"{video.file}: {video.fault}")
    try:
        return read_video(video, size)
    except VideoError as error:
        return error


def _sample(
    file: Path, container: av.container.InputContainer, stream: av.VideoStream, size: VideoConfig, start: float
) -> Clip:
    """Return `size.frames` frames from `start` on; those that are on show at no sampled moment are not converted."""
    layers, coder = stream.metadata.get("alpha_mode", "0"), stream.codec_context
    facts = media.of(SEVERAL=len(container.streams.video) > 1, UNKNOWN=coder is None, HIDDEN_ALPHA=layers != "0")
    media.refuse(file, facts)
    coder.thread_count = 1  # the files are what is decoded in parallel
    coder.options = {"max_pixels": str(MOST_PIXELS)} | ({"err_detect": "explode"} if coder.name in MAY_RAISE else {})
    rate, pixel = Fraction(size.fps).limit_denominator(1001), float(stream.sample_aspect_ratio or 1)
    frames, times, color = list[np.ndarray](), [Fraction(0)], (0, 0)
    for frame, said, end in _shown(file, container.demux(stream), 1 / (stream.average_rate or rate)):
        media.refuse(file, said, float(times[-1]))
        facts, color = facts | said, color if frames else (frame.color_trc, frame.color_primaries)
        times.append(end)
        wanted = min(math.ceil((end - Fraction(start) - ROUNDING) * rate), size.frames) - len(frames)
        if wanted > 0:
            frames += [_picture(frame, said, pixel, size)] * wanted
        if len(frames) == size.frames:
            break
    if len(frames) < size.frames:
        raise TooShortError(
            f"{file}: too short: {len(frames) / size.fps:.2f} s are {len(frames)} frames at {size.fps:g} per second, "
            f"not the {size.frames} of video.frames",
            len(frames),
        )
    if size.frames > 1:
        facts |= media.of_times(times, size.fps)
        media.refuse(file, facts)
    clip, upright = np.array(frames), (media.turn_of(frame) or media.UNTURNED)[0]
    shown = (frame.height, frame.width * pixel) if upright else (frame.width * pixel, frame.height)
    return Clip(clip if clip.dtype == np.uint8 else to_sdr(clip, *color), facts, shown)


def _shown(
    file: Path, packets: Iterable[av.Packet], interval: Fraction
) -> Iterator[tuple[av.VideoFrame, Facts, Fraction]]:
    """Yield each frame, its facts, and the moment at which the next one replaces it, in seconds after the first began.

    The last one is on show for the interval.
    """
    shown, times = None, list[Fraction]()
    for packet in packets:
        media.refuse(file, media.of(ENCRYPTED=packet.has_sidedata("encryption_info")))
        for frame in packet.decode():
            if frame.pts is None:
                raise av.InvalidDataError(0, "a frame has no time stamp")
            times = [*times[:1], frame.pts * frame.time_base]
            if shown is not None:
                yield *shown, times[-1] - times[0]
            shown = frame, media.of_frame(frame, packet)
    if shown is not None:
        yield *shown, times[-1] - times[0] + interval


def _picture(frame: av.VideoFrame, facts: Facts, pixel: float, size: VideoConfig) -> np.ndarray:
    """Return a frame in RGB of the size, on white: uint8, or uint16 if its colors are to be converted.

    `pixel` is the width of its pixels divided by their height.
    """
    deep, alpha = bool(facts & {Fact.HDR, Fact.WIDE}), Fact.ALPHA in facts
    pixels = frame.to_ndarray(format=("rgba64le" if alpha else "rgb48le") if deep else "rgba" if alpha else "rgb24")
    if alpha:
        white = np.iinfo(pixels.dtype).max
        clear = 1 - pixels[..., 3:] / white
        pixels = (pixels[..., :3] * (1 - clear) + white * clear).round().astype(pixels.dtype)
    if Fact.INTERLACED in facts:
        pixels, pixel = pixels[::2], pixel / 2
    a, b, c, d = media.turn_of(frame) or media.UNTURNED
    if not a:
        pixels, pixel = pixels.swapaxes(0, 1), 1 / pixel
    pixels = np.ascontiguousarray(pixels[:: b + d, :: a + c])
    parts = [pixels[..., i].astype(np.float32) for i in range(3)] if deep else [pixels]  # Pillow scales no such colors
    scaled = [
        np.asarray(cover(Image.fromarray(part), size.height, size.width, pixel, Image.Resampling.BICUBIC))
        for part in parts
    ]
    return np.stack(scaled, -1).round().clip(0, 65535).astype(np.uint16) if deep else scaled[0]
