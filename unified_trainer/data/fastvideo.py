"""The columns of FastVideo's parquet files: each tensor is three columns, its bytes, shape and dtype."""

from collections.abc import Mapping

import pyarrow as pa
import torch
from torch import Tensor

from unified_trainer.basics.types import Condition, Trajectory
from unified_trainer.data.clips import VideoConfig

TEXT_ENCODER = "unified_trainer.text_encoder"  # key in a schema's metadata: the fingerprint of what made the embeddings

FLOATS = ("float16", "float32", "float64")  # types of stored tensors
IMAGE_TENSORS = {"clip": "clip_feature", "image": "first_frame_latent"}  # by the names of a condition's tensors
PICTURE = "pil_image"  # the pixels of kind i2v, which FastVideo leaves empty and its trainer of Wan reads nowhere
NETWORK_TIME = 1000  # files hold 1000 sigma in place of a noise level


def columns_of(name: str) -> tuple[str, str, str]:
    """Return the names of the three columns of a tensor."""
    return f"{name}_bytes", f"{name}_shape", f"{name}_dtype"


def _tensor(name: str) -> tuple[pa.Field, ...]:
    kinds = (pa.binary(), pa.list_(pa.int64()), pa.string())
    return tuple(pa.field(column, kind) for column, kind in zip(columns_of(name), kinds, strict=True))


_CLIP = [("id", pa.string()), *_tensor("vae_latent"), *_tensor("text_embedding")]
_ABOUT_CLIP = [
    *((name, pa.string()) for name in ("file_name", "caption", "media_type")),
    *((name, pa.int64()) for name in ("width", "height", "num_frames")),
    *((name, pa.float64()) for name in ("duration_sec", "fps")),
]
T2V = pa.schema([*_CLIP, *_ABOUT_CLIP])
I2V = pa.schema(
    [*_CLIP, *(field for name in (*IMAGE_TENSORS.values(), PICTURE) for field in _tensor(name)), *_ABOUT_CLIP]
)
TEXT_ONLY = pa.schema([("id", pa.string()), *_tensor("text_embedding"), ("caption", pa.string())])
ODE = pa.schema(
    [
        ("id", pa.string()),
        *_tensor("text_embedding"),
        *_tensor("trajectory_latents"),
        *_tensor("trajectory_timesteps"),
        *((name, pa.string()) for name in ("file_name", "caption", "media_type")),
        *_tensor("initial_noise"),  # ours: FastVideo stores no state before the first step, and ignores the columns
    ]
)


def t2v_row(name: str, caption: str, raw: Tensor, embedding: Tensor, video: VideoConfig) -> dict[str, object]:
    """Return the row of a clip: raw latents [c, t, h, w] and an embedding [n, d] without padding."""
    return {
        "id": name,
        **_columns("vae_latent", raw),
        **_columns("text_embedding", embedding),
        "file_name": name,
        "caption": caption,
        "media_type": "video",
        "width": video.width,
        "height": video.height,
        "num_frames": raw.shape[1],  # latent frames, as FastVideo counts them
        "duration_sec": video.frames / video.fps,
        "fps": video.fps,
    }


def image_columns(images: Condition) -> dict[str, object]:
    """Return the columns that kind i2v has besides t2v's, of the encoded first frame of one clip.

    Tensors that the family lacks are empty, and so are the pixels.
    """
    row: dict[str, object] = {}
    for name in (*IMAGE_TENSORS.values(), PICTURE):
        row |= zip(columns_of(name), (b"", [], ""), strict=True)
    for name, value in images.tensors.items():
        row |= _columns(IMAGE_TENSORS[name], value[0])
    return row


def text_only_row(name: str, caption: str, embedding: Tensor) -> dict[str, object]:
    """Return the row of a prompt; its embedding [n, d] is padded with zeros."""
    return {"id": name, **_columns("text_embedding", embedding), "caption": caption}


def ode_row(name: str, caption: str, embedding: Tensor, trajectory: Trajectory) -> dict[str, object]:
    """Return the row of one trajectory from pure noise, with a padded embedding [n, d].

    FastVideo's state s is the one after the step from timestep s, so that the first state stands apart.
    """
    states = torch.cat([trajectory.states, trajectory.end[:, None]], 1)
    return {
        "id": name,
        **_columns("text_embedding", embedding),
        **_columns("trajectory_latents", states[:, 1:]),
        **_columns("trajectory_timesteps", NETWORK_TIME * trajectory.sigmas),
        "file_name": name,
        "caption": caption,
        "media_type": "text",
        **_columns("initial_noise", states[0, 0]),
    }


def _columns(name: str, value: Tensor) -> Mapping[str, object]:
    """Return the columns of a tensor in float32: FastVideo reads nothing else, whatever the dtype column says."""
    array = value.float().cpu().contiguous().numpy()
    return dict(zip(columns_of(name), (array.tobytes(), list(array.shape), str(array.dtype)), strict=True))
