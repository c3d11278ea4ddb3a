"""The columns of FastVideo's parquet files: each tensor is three columns, its bytes, shape and dtype."""

from collections import ChainMap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from unified_trainer.basics.actions import ACTIONS, Actions
from unified_trainer.basics.errors import NotFiniteError, UserError
from unified_trainer.basics.types import Condition, Trajectory
from unified_trainer.data.clips import VideoConfig
from unified_trainer.models.base import Codec, Prompt
from unified_trainer.models.prompt_tensors import Shapes, main_name, stack

# Keys in a schema's metadata: the fingerprint of what made the text embeddings, and further columns of prompts.
TEXT_ENCODER, TEXT_COLUMNS = "unified_trainer.text_encoder", "unified_trainer.text_columns"

FLOATS = ("float16", "float32", "float64")  # types of stored tensors
IMAGE_TENSORS = {"clip": "clip_feature", "image": "first_frame_latent"}  # by the names of a condition's tensors
PICTURE = "pil_image"  # the pixels of kind i2v, which FastVideo leaves empty and its trainer of Wan reads nowhere
NETWORK_TIME = 1000  # files hold 1000 sigma in place of a noise level


def columns_of(name: str) -> tuple[str, str, str]:
    """Return the names of the three columns of a tensor."""
    return f"{name}_bytes", f"{name}_shape", f"{name}_dtype"


TEXT = columns_of("text_embedding")
ACTION_COLUMNS = columns_of(ACTIONS)


def text_columns(shapes: Shapes) -> dict[str, tuple[str, str, str]]:
    """Return the columns of each tensor of a prompt: FastVideo's for the main one, others by the names of their own."""
    return {name: TEXT if name == main_name(shapes) else columns_of(name) for name in shapes}


def text_columns_in(schema: pa.Schema) -> list[str]:
    """Return the columns of prompts that a file has."""
    further = (schema.metadata or {}).get(TEXT_COLUMNS.encode(), b"").decode(errors="replace").split()
    return [name for name in (*TEXT, *further) if name in schema.names]


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


def with_actions(schema: pa.Schema) -> pa.Schema:
    """Return a schema for rows with actions."""
    return pa.schema([*schema, *_tensor(ACTIONS)])


def action_columns(actions: Actions) -> dict[str, object]:
    """Return the columns of the actions of a clip."""
    return _columns(ACTION_COLUMNS, torch.from_numpy(actions.values))


def with_text(schema: pa.Schema, codec: Codec) -> pa.Schema:
    """Return a schema for rows with the prompts of a codec, which names its text encoder."""
    names = (name for name, columns in text_columns(codec.text_shapes).items() if columns != TEXT)
    further = [field for name in names for field in _tensor(name)]
    if taken := [field.name for field in further if field.name in schema.names]:
        raise UserError(f"{codec.folder}: prompts have tensors whose columns files have already: {', '.join(taken)}")
    named = {TEXT_COLUMNS: " ".join(field.name for field in further)} if further else {}
    return pa.schema([*schema, *further]).with_metadata({TEXT_ENCODER: codec.text_fingerprint, **named})


def text_of(prompt: Prompt, codec: Codec, *, padded: bool = False) -> dict[str, object]:
    """Return the columns of a prompt, `padded` with zeros on request."""
    if padded:
        prompt = {name: rows[0] for name, rows in stack([prompt], codec.text_shapes).items()}
    made = (_columns(columns, prompt[name]) for name, columns in text_columns(codec.text_shapes).items())
    return dict(ChainMap(*made))


def t2v_row(name: str, caption: str, raw: Tensor, video: VideoConfig) -> dict[str, object]:
    """Return the row of a clip with raw latents [c, t, h, w], but for its text."""
    return {
        "id": name,
        **_columns(columns_of("vae_latent"), raw),
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
        row |= _columns(columns_of(IMAGE_TENSORS[name]), value[0])
    return row


def ode_row(name: str, caption: str, trajectory: Trajectory) -> dict[str, object]:
    """Return the row of one trajectory from pure noise, but for its text.

    FastVideo's state s is the one after the step from timestep s, so that the first state stands apart.
    """
    states = torch.cat([trajectory.states, trajectory.end[:, None]], 1)
    return {
        "id": name,
        **_columns(columns_of("trajectory_latents"), states[:, 1:]),
        **_columns(columns_of("trajectory_timesteps"), NETWORK_TIME * trajectory.sigmas),
        "file_name": name,
        "caption": caption,
        "media_type": "text",
        **_columns(columns_of("initial_noise"), states[0, 0]),
    }


def read_tensor(place: str, column: str, data: Any, shape: Any, dtype: Any) -> Tensor:
    """Return a tensor, floats in float32; UserError names place and column if it is damaged or not finite."""
    try:
        array = np.frombuffer(data, np.dtype(str(dtype))).reshape([*shape])
        tensor = torch.from_numpy(array.astype(np.float32 if dtype in FLOATS else array.dtype))
    except (TypeError, ValueError) as error:
        raise UserError(f"{place} is damaged: {column} ({error})") from error
    if not tensor.isfinite().all():
        raise NotFiniteError(f"{place}: {column} holds a value that is not finite")
    return tensor


def _columns(columns: Sequence[str], value: Tensor) -> dict[str, object]:
    """Return the columns of a tensor, floats in float32: FastVideo reads nothing else, whatever dtypes say."""
    array = (value.float() if value.is_floating_point() else value).cpu().contiguous().numpy()
    return dict(zip(columns, (array.tobytes(), list(array.shape), str(array.dtype)), strict=True))
