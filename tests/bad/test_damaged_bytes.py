"""A fuzzer of bytes for each reader of files: what is damaged is read, or refused in one sentence, and no other error.

`--damaged-files N` damages N copies of each kind of file; without it a few.
"""

import json
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from clip_files import write_clips
from helpers import LATENT_SHAPE
from odd_media import CLEAR, QUARTERS, moving, picture, write
from safetensors.torch import save_file

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import read_json, read_yaml
from unified_trainer.basics.requests import Image
from unified_trainer.data.captioned import find_videos
from unified_trainer.data.clips import VideoConfig
from unified_trainer.data.parquet_files import read_stored_files
from unified_trainer.data.prompts import read_prompts
from unified_trainer.data.row_kinds import ClipRows
from unified_trainer.data.video_reader import inspect_clip
from unified_trainer.models.tensor_file import floating_shapes

FEW = 3
ROWS = [{"path": f"{i}.mp4", "caption": f"video {i}, \u00e9 \U0001f600"} for i in range(20)]
EXIF = np.frombuffer(b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0", np.uint8).tobytes()


def video(codec, kind):
    return lambda file: write(file, moving(9), codec, kind)


def text(content):
    return lambda file: file.write_text(content)


def seen(frames):
    return lambda file: inspect_clip(file, VideoConfig(frames, 32, 32, 8))


def image(file):
    seen(1)(file)
    Image.read(file, "image").at(8, 8)


def table(file):
    find_videos(file, "SOURCE")


def clips(file):
    stored = read_stored_files(file, ClipRows(LATENT_SHAPE))
    return stored.files


KINDS = {  # how a sound file is made and how it is read
    "h264.mp4": (video("libx264", "yuv420p"), seen(9)),
    "prores.mov": (video("prores_ks", "yuv422p10le"), seen(9)),
    "mpeg4.mkv": (video("mpeg4", "yuv420p"), seen(9)),
    "alpha.mov": (lambda file: write(file, CLEAR, "png", "rgba", given="rgba"), seen(9)),
    "vp9.webm": (video("libvpx-vp9", "yuv420p"), seen(9)),
    "jpeg.avi": (video("mjpeg", "yuvj420p"), seen(9)),
    "a.png": (lambda file: picture(file, CLEAR[0], exif=EXIF), image),
    "b.jpg": (lambda file: picture(file, QUARTERS[0], exif=EXIF), image),
    "c.webp": (lambda file: picture(file, CLEAR[0], exif=EXIF), image),
    "d.bmp": (lambda file: picture(file, QUARTERS[0]), lambda file: Image.read(file, "image").at(8, 8)),
    "e.csv": (text("path,caption\n" + "".join(f'{row["path"]},"{row["caption"]}"\n' for row in ROWS)), table),
    "f.json": (text(json.dumps(ROWS)), table),
    "g.jsonl": (text("".join(json.dumps(row) + "\n" for row in ROWS)), table),
    "h.parquet": (lambda file: pq.write_table(pa.Table.from_pylist(ROWS), file), table),
    "i.txt": (text("".join(f"{row['caption']}\n" for row in ROWS)), read_prompts),
    "j.yaml": (
        text("method: finetune\nvideo: &a {frames: 5, fps: 8.0}\ndata: {path: 'x', more: [1, *a]}\n"),
        read_yaml,
    ),
    "config.json": (text(json.dumps({"a": 1, "b": {"c": [1.5, None, "x"]}})), read_json),
    "clips.parquet": (write_clips, clips),
    "w.safetensors": (lambda file: save_file({"a": torch.ones(4, 4), "b": torch.ones(3)}, file), floating_shapes),
}


def damaged(data: bytes, draw: np.random.Generator) -> bytes:
    """Return a copy with other bytes, one other bit, zeros or further bytes somewhere, or without its end."""
    at, form = int(draw.integers(len(data))), int(draw.integers(5))
    length = int(draw.integers(1, 33))
    end = data[at + length :]
    if form == 0:
        return data[:at] + draw.bytes(length) + end
    if form == 1:
        return data[:at] + bytes([data[at] ^ (1 << int(draw.integers(8)))]) + data[at + 1 :]
    if form == 2:
        return data[:at] + bytes(length) + end
    return data[:at] + draw.bytes(length) + data[at:] if form == 3 else data[:at]


@pytest.mark.parametrize("name", KINDS)
def test_damaged_bytes_end_in_a_sentence_or_in_nothing(tmp_path, request, name):
    make, read = KINDS[name]
    make(tmp_path / name)
    read(tmp_path / name)  # it is sound
    sound = (tmp_path / name).read_bytes()
    for number in range(request.config.getoption("--damaged-files") or FEW):
        (tmp_path / name).write_bytes(damaged(sound, np.random.default_rng([number, zlib.crc32(name.encode())])))
        try:
            read(tmp_path / name)
        except UserError as error:
            assert name in str(error) and "\n" not in str(error), f"copy {number}: {error}"
