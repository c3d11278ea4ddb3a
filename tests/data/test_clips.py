"""Clips to learn from: the tiny world's captions and latents, and FastVideo's parquet files."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import LATENT_SHAPE

from unified_trainer.data.clips import DataConfig, VideoConfig, check_tiny_clips, render_clips
from unified_trainer.data.parquet import ParquetClips
from unified_trainer.data.tiny_world import FRAMES, SIZE, SUBJECT_OF_CAPTION, TRAINING

RAW = torch.randn(3, *LATENT_SHAPE, generator=torch.Generator().manual_seed(4))


def clips(codec):
    return render_clips(DataConfig(num_clips=24), codec, VideoConfig(FRAMES, SIZE, SIZE), seed=0)


def test_rendered_clips_are_named_rightly_and_repeat(codec):
    one, other = clips(codec), clips(codec)
    assert [SUBJECT_OF_CAPTION[prompt] for prompt in one.prompts] == list(TRAINING[:24])
    assert one.prompts == other.prompts and torch.equal(one.encoded, other.encoded)
    assert one.encoded.shape == (24, 16, 5, 4, 4)


def test_rendered_clips_have_one_size():
    with pytest.raises(ValueError, match=r"17 frames of 64 x 64 pixels, but video\.frames"):
        check_tiny_clips(DataConfig(), VideoConfig(frames=5))


def write(file, latents=RAW, **columns) -> None:
    """FastVideo's t2v layout: bytes, shape and dtype of each row's latent."""
    rows = {
        "id": [f"clip{i}" for i in range(len(latents))],
        "caption": [f"caption {i}" for i in range(len(latents))],
        "vae_latent_bytes": [latent.numpy().tobytes() for latent in latents],
        "vae_latent_shape": [list(latent.shape) for latent in latents],
        "vae_latent_dtype": ["float32"] * len(latents),
    }
    pq.write_table(pa.table({key: value for key, value in (rows | columns).items() if value is not None}), file)


def test_parquet_latents_are_normalised_by_the_vae(codec, tmp_path):
    write(tmp_path / "a.parquet")
    source = ParquetClips(tmp_path, codec, LATENT_SHAPE)
    assert len(source) == 3 and source.prompt(1) == "caption 1"
    mean, std = (torch.tensor(codec._outline.config[f"latents_{name}"]).view(-1, 1, 1, 1) for name in ("mean", "std"))
    torch.testing.assert_close(source.latents([2, 0]), (RAW[[2, 0]] - mean) / std)


def test_parquet_files_follow_each_other_in_the_order_of_their_names(codec, tmp_path):
    (tmp_path / "part").mkdir()
    write(tmp_path / "part" / "b.parquet", RAW[1:], caption=["second", "third"])
    write(tmp_path / "a.parquet", RAW[:1], caption=["first"])
    source = ParquetClips(tmp_path, codec, LATENT_SHAPE)
    assert [source.prompt(i) for i in range(3)] == ["first", "second", "third"]
    torch.testing.assert_close(source.latents([0, 1, 2]), codec.normalise(RAW))


def test_a_row_of_another_shape_is_named(codec, tmp_path):
    write(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"row 'clip1' has latents \(16, 2, 2, 2\)"):
        ParquetClips(tmp_path, codec, (16, 5, 4, 4)).latents([1])


@pytest.mark.parametrize("missing", ["caption", "vae_latent_shape"])
def test_a_missing_column_is_named(codec, tmp_path, missing):
    write(tmp_path / "a.parquet", **{missing: None})
    with pytest.raises(ValueError, match=f"columns {missing} are missing"):
        ParquetClips(tmp_path, codec, LATENT_SHAPE)


def test_a_folder_without_parquet_and_a_file_cut_short_are_named(codec, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no \.parquet files"):
        ParquetClips(tmp_path, codec, LATENT_SHAPE)
    write(tmp_path / "a.parquet")
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:100])
    with pytest.raises(ValueError, match="a file is not whole parquet"):
        ParquetClips(tmp_path, codec, LATENT_SHAPE)
