"""Reading videos: the first frames of a file, at a rate and a size of one's own."""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from PIL import Image, ImageOps

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.pictures import open_picture
from unified_trainer.basics.requests import cover
from unified_trainer.basics.types import Video
from unified_trainer.data.captioned import PICTURES, CaptionedVideo
from unified_trainer.data.clips import VideoConfig

# FFmpeg's readers of playlists, which have no place here, open the files that a playlist names.
CONTAINERS = {"format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi", "protocol_whitelist": "file"}
ROUNDING = Fraction(1, 500)  # seconds by which a container may round time stamps
TURNS = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}


class VideoError(UserError):
    """A video that cannot be used; the message names the file and the reason."""


def read_clip(file: Path, size: VideoConfig, start: float = 0.0) -> np.ndarray:
    """Return `size.frames` frames from `start` on, at `size.fps` per second, uint8 [t, h, w, 3].

    Frame k is the one on show start + k / fps seconds after the first: faster videos lose frames, slower ones repeat
    them. A frame is turned as its file says, scaled to cover height and width (bicubic, antialiased, with square
    pixels) and cropped around its centre. An image is one frame. Raise VideoError for a file that is too short or
    damaged.
    """
    if file.suffix.lower() in PICTURES:
        return _image(file, size)
    try:
        with av.open(str(file), options=CONTAINERS) as container:
            if not container.streams.video:
                raise VideoError(f"{file}: holds no video")
            frames = _sample(container, size, start)
    except (av.FFmpegError, OSError) as error:
        raise VideoError(f"{file}: cannot be decoded ({error.strerror})") from error
    if len(frames) < size.frames:
        seconds = len(frames) / size.fps
        raise VideoError(
            f"{file}: too short: {seconds:.2f} s are {len(frames)} frames at {size.fps:g} per second, not the "
            f"{size.frames} of video.frames"
        )
    return np.stack(frames)


def _image(file: Path, size: VideoConfig) -> np.ndarray:
    """Return an image as a clip of one frame; VideoError for one that cannot be read, or if more are asked for."""
    if size.frames > 1:
        raise VideoError(f"{file}: an image is no video of the {size.frames} frames of video.frames")
    try:
        with open_picture(file, str(file)) as opened:
            picture = ImageOps.exif_transpose(opened).convert("RGB")
    except UserError as error:
        raise VideoError(str(error)) from error
    return np.array(cover(picture, size.height, size.width, Image.Resampling.BICUBIC))[None]


def read_clips(
    videos: Sequence[CaptionedVideo], size: VideoConfig, workers: int
) -> Iterator[tuple[CaptionedVideo, np.ndarray | VideoError]]:
    """Yield the videos in order, each with its clip or with the reason why there is none.

    Up to `workers` threads decode ahead of the caller, and hold as many clips in memory.
    """
    pool = ThreadPoolExecutor(workers, thread_name_prefix="decode")
    waiting: deque[tuple[CaptionedVideo, Future[np.ndarray | VideoError]]] = deque()
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


def read_video(video: CaptionedVideo, size: VideoConfig) -> np.ndarray:
    """Return `read_clip` of a video, or of its part; VideoError names the place of one that a file holds."""
    if video.end - video.start < (size.frames - 1) / size.fps:
        raise VideoError(
            f"{video.file}: too short: {size.frames} frames go beyond {video.end:g} s, where its part ends"
        )
    with video.on_disk() as file:
        try:
            return read_clip(file, size, video.start)
        except VideoError as error:
            raise VideoError(str(error).replace(str(file), str(video.file))) from error


def _attempt(video: CaptionedVideo, size: VideoConfig) -> np.ndarray | VideoError:
    if video.fault:
        return VideoError(f"{video.file}: {video.fault}")
    try:
        return read_video(video, size)
    except VideoError as error:
        return error


def _sample(container: av.container.InputContainer, size: VideoConfig, start: float) -> list[np.ndarray]:
    """Return up to `size.frames` frames from `start` on; one that is on show at no sampled moment is not converted."""
    stream = container.streams.video[0]
    stream.codec_context.thread_count = 1  # the files are what is decoded in parallel
    rate, pixel = Fraction(size.fps).limit_denominator(1001), float(stream.sample_aspect_ratio or 1)
    frames: list[np.ndarray] = []
    for frame, end in _shown(container.decode(stream), 1 / (stream.average_rate or rate)):
        wanted = min(math.ceil((end - Fraction(start) - ROUNDING) * rate), size.frames) - len(frames)
        if wanted > 0:
            frames += [_picture(frame, pixel, size)] * wanted
        if len(frames) == size.frames:
            break
    return frames


def _shown(frames: Iterable[av.VideoFrame], interval: Fraction) -> Iterator[tuple[av.VideoFrame, Fraction]]:
    """Yield each frame with the moment at which the next one replaces it, in seconds after the first began.

    The last one is on show for the interval.
    """
    shown, times = None, []
    for frame in frames:
        if frame.pts is None:
            raise av.InvalidDataError(0, "a frame has no time stamp")
        times = [*times[:1], frame.pts * frame.time_base]
        if shown is not None:
            yield shown, times[-1] - times[0]
        shown = frame
    if shown is not None:
        yield shown, times[-1] - times[0] + interval


def _picture(frame: av.VideoFrame, pixel: float, size: VideoConfig) -> np.ndarray:
    """Return a frame as RGB of the size; `pixel` is the width of its pixels divided by their height."""
    image = Image.fromarray(frame.to_ndarray(format="rgb24"))
    turned = frame.rotation % 360
    if turned in TURNS:
        image = image.transpose(TURNS[turned])
        pixel = pixel if turned == 180 else 1 / pixel
    scale = max(size.width / (image.width * pixel), size.height / image.height)
    width, height = min(size.width / scale / pixel, image.width), min(size.height / scale, image.height)
    left, top = (image.width - width) / 2, (image.height - height) / 2
    box = (left, top, left + width, top + height)
    return np.asarray(image.resize((size.width, size.height), Image.Resampling.BICUBIC, box))
