"""The columns of FastVideo's parquet files: each tensor is three columns, its bytes, shape and dtype."""

from collections.abc import Mapping

import pyarrow as pa
from torch import Tensor

from unified_trainer.data.clips import VideoConfig

TEXT_ENCODER = "unified_trainer.text_encoder"  # key in a schema's metadata: the fingerprint of what made the embeddings


def _tensor(name: str) -> tuple[pa.Field, ...]:
    kinds = {"bytes": pa.binary(), "shape": pa.list_(pa.int64()), "dtype": pa.string()}
    return tuple(pa.field(f"{name}_{part}", kind) for part, kind in kinds.items())


T2V = pa.schema(
    [
        ("id", pa.string()),
        *_tensor("vae_latent"),
        *_tensor("text_embedding"),
        *((name, pa.string()) for name in ("file_name", "caption", "media_type")),
        *((name, pa.int64()) for name in ("width", "height", "num_frames")),
        *((name, pa.float64()) for name in ("duration_sec", "fps")),
    ]
)
TEXT_ONLY = pa.schema([("id", pa.string()), *_tensor("text_embedding"), ("caption", pa.string())])


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


def text_only_row(name: str, caption: str, embedding: Tensor) -> dict[str, object]:
    """Return the row of a prompt; its embedding [n, d] is padded with zeros."""
    return {"id": name, **_columns("text_embedding", embedding), "caption": caption}


def _columns(name: str, value: Tensor) -> Mapping[str, object]:
    """Return the columns of a tensor in float32: FastVideo reads nothing else, whatever the dtype column says."""
    array = value.float().cpu().contiguous().numpy()
    return {f"{name}_bytes": array.tobytes(), f"{name}_shape": list(array.shape), f"{name}_dtype": str(array.dtype)}
