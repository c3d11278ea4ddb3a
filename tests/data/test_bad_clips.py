"""Bad parquet files of clips: each is one error of one line with file, and row or column, before any latent is read."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from bad_inputs import refused
from clip_files import RAW, write_clips
from helpers import LATENT_SHAPE

from unified_trainer.data.parquet_files import read_stored_files
from unified_trainer.data.row_kinds import LATENT, ClipRows

TEXT = [torch.ones(4, 32)] * 3
DATA = [row.numpy().tobytes() for row in RAW]
SHAPE = list(LATENT_SHAPE)
ODD_TYPES = ("complex64", "complex128", "str", "<U4", "datetime64[s]", "bool", "int64", "object", "bfloat16", "", None)


def reading(file):
    return lambda: read_stored_files(file, ClipRows(LATENT_SHAPE))


@pytest.mark.parametrize("kind", ODD_TYPES, ids=str)
def test_types_of_tensors(tmp_path, kind):
    """Of latents and of text embeddings, named in the second row of three."""
    kinds = ["float32", kind, "float32"]
    file = write_clips(tmp_path / "a.parquet", vae_latent_dtype=kinds)
    refused(reading(file), f"{file}: row 2 ('clip1') has latents of type {kind}, not float16")
    file = write_clips(tmp_path / "a.parquet", text=TEXT, text_embedding_dtype=kinds)
    refused(reading(file), f"{file}: row 2 ('clip1') has a text embedding of type {kind}, not float16")


COLUMNS = {
    "caption of numbers": ({"caption": [1, 2, 3]}, "column caption holds int64, expected string"),
    "caption of bytes": ({"caption": [b"a", b"b", b"c"]}, "column caption holds binary, expected string"),
    "caption of dates": ({"caption": pa.array([1, 2, 3], pa.date32())}, "column caption holds date32"),
    "null captions": ({"caption": pa.nulls(3)}, "column caption holds null, expected string"),
    "a null caption": ({"caption": ["a", None, "c"]}, "row 2 ('clip1') has no caption"),
    "a blank caption": ({"caption": ["a", "b", " \t"]}, "row 3 ('clip2') has no caption"),
    "a caption of NULs": ({"caption": ["a", "b\0", "c"]}, "row 2 ('clip1') has a caption that holds a NUL"),
    "an invisible caption": ({"caption": ["a", "\u200b", "c"]}, "row 2 ('clip1') has a caption that holds invisible"),
    "latents as texts": ({"vae_latent_bytes": ["a", "b", "c"]}, "column vae_latent_bytes holds string"),
    "latents as lists": ({"vae_latent_bytes": [[1.0]] * 3}, "column vae_latent_bytes holds list"),
    "null latents": ({"vae_latent_bytes": [DATA[0], None, None]}, "vae_latent_bytes is null in 2 rows"),
    "latents of null type": ({"vae_latent_bytes": pa.nulls(3)}, "column vae_latent_bytes holds null"),
    "shape as a number": ({"vae_latent_shape": [128] * 3}, "column vae_latent_shape holds int64"),
    "shape as a text": ({"vae_latent_shape": ["16,2,2,2"] * 3}, "column vae_latent_shape holds string"),
    "shape of floats": ({"vae_latent_shape": [[16.0, 2.0, 2.0, 2.0]] * 3}, "column vae_latent_shape holds list"),
    "a null shape": ({"vae_latent_shape": [SHAPE, None, SHAPE]}, "row 2 ('clip1') has latents ()"),
    "a shape with null": ({"vae_latent_shape": [SHAPE, SHAPE, [16, None, 2, 2]]}, "row 3 ('clip2') has latents"),
    "an empty shape": ({"vae_latent_shape": [[], SHAPE, SHAPE]}, "row 1 ('clip0') has latents ()"),
    "another shape": ({"vae_latent_shape": [SHAPE, SHAPE, [16, 3, 2, 2]]}, "row 3 ('clip2') has latents (16, 3, 2, 2)"),
    "a negative shape": ({"vae_latent_shape": [[-1, 2, 2, 2], SHAPE, SHAPE]}, "row 1 ('clip0') has latents (-1"),
    "type as a number": ({"vae_latent_dtype": [32] * 3}, "column vae_latent_dtype holds int64"),
    "no id": ({"id": None}, "columns id are missing"),
    "no caption": ({"caption": None}, "columns caption are missing"),
    "no shape": ({"vae_latent_shape": None}, "columns vae_latent_shape are missing"),
    "no latents": (
        dict.fromkeys(LATENT),
        "captions without clips",
    ),
    "trajectories": ({"trajectory_latents_bytes": DATA}, "holds trajectories of a teacher"),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_columns(tmp_path, case):
    columns, said = COLUMNS[case]
    file = write_clips(tmp_path / "a.parquet", **columns)
    refused(reading(file), "data.path: ", str(file), said)


def test_text_embeddings_of_other_columns(tmp_path):
    file = write_clips(tmp_path / "a.parquet", text=TEXT, text_embedding_shape=["4,32"] * 3)
    refused(reading(file), f"{file}: column text_embedding_shape holds string")


def test_large_types_and_dictionaries_are_sound(tmp_path):
    """As other writers of parquet choose them."""
    large = {"caption": pa.array(["a", "b", "c"]).dictionary_encode()}
    large["vae_latent_bytes"] = pa.array(DATA, pa.large_binary())
    large["vae_latent_shape"] = pa.array([SHAPE] * 3, pa.large_list(pa.int32()))
    large["vae_latent_dtype"] = pa.array(["float32"] * 3, pa.large_string())
    assert reading(write_clips(tmp_path / "a.parquet", **large))().captions == ("a", "b", "c")


def test_a_column_twice(tmp_path):
    table = pq.read_table(write_clips(tmp_path / "a.parquet"))
    pq.write_table(table.append_column("caption", table["caption"]), tmp_path / "a.parquet")
    refused(reading(tmp_path / "a.parquet"), f"{tmp_path / 'a.parquet'} has several columns caption")


def test_no_rows(tmp_path):
    file = write_clips(tmp_path / "a.parquet")
    pq.write_table(pq.read_table(file)[:0], file)
    refused(reading(file), f"data.path {file}: its files hold no rows")


@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1" + bytes(8) + b"PAR1", b"\x1f\x8b" + bytes(50)], ids=repr)
def test_files_that_are_none(tmp_path, data):
    (tmp_path / "a.parquet").write_bytes(data)
    refused(reading(tmp_path / "a.parquet"), f"data.path: {tmp_path / 'a.parquet'} is not whole parquet")


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9, 0.99])
def test_files_that_are_cut(tmp_path, keep):
    file = write_clips(tmp_path / "a.parquet")
    file.write_bytes(file.read_bytes()[: int(keep * file.stat().st_size)])
    refused(reading(file), f"{file} is not whole parquet")


def test_a_folder_that_ends_like_a_file(tmp_path):
    (tmp_path / "a.parquet").mkdir()
    refused(reading(tmp_path), str(tmp_path))
