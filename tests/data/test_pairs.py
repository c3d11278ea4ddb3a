"""Pairs of clips: two parquet files row by row, their batches, and what is refused."""

import re

import pytest
import torch
from clip_files import RAW, write_clips
from helpers import ALONE, LATENT_SHAPE, SMALL, flags, metrics_of, tiny_codec

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.data.batch_plan import BatchPlan
from unified_trainer.data.clips import DataConfig, VideoConfig, render_clips
from unified_trainer.data.loader import Loader
from unified_trainer.data.parquet import ParquetPairs
from unified_trainer.data.parquet_files import read_stored_files
from unified_trainer.data.row_kinds import ClipRows

OTHER = torch.randn(3, *LATENT_SHAPE, generator=torch.Generator().manual_seed(9))
VIDEO = flags({"video.frames": 5, "video.height": 32, "video.width": 32, "algorithm.batch-size": 2})


@pytest.fixture
def files(tmp_path):
    """Preferred and rejected clips of three captions, in files of unlike row groups."""
    rejected = write_clips(tmp_path / "rejected.parquet", OTHER, rows=2)
    return write_clips(tmp_path / "preferred.parquet", rows=1), rejected


def read(file):
    return read_stored_files(file, ClipRows(LATENT_SHAPE))


def test_a_batch_holds_the_rejected_clip_of_each_row(files):
    source = ParquetPairs(*map(read, files), tiny_codec(), 1)
    loader = Loader(source, tiny_codec(), BatchPlan.one_update(2, 2), LATENT_SHAPE, "", 0, ALONE)
    seen = set()
    for step in range(3):
        batch = loader.batch(step)
        rows = list(batch.prompt_ids)
        torch.testing.assert_close(batch.latents, tiny_codec().normalise(RAW[rows]))
        torch.testing.assert_close(batch.rejected, tiny_codec().normalise(OTHER[rows]))
        assert torch.equal(batch.take([1]).rejected, batch.rejected[1:])
        assert torch.equal(batch.cat(batch).rejected, torch.cat([batch.rejected] * 2))
        seen |= set(rows)
    loader.close()
    assert seen == {0, 1, 2}


def test_rejected_clips_of_the_tiny_world_show_another_subject():
    """The clip of the next row; single clips have none."""
    config, codec, video = DataConfig(path="tiny", num_clips=3), tiny_codec(), VideoConfig(17, 64, 64, 8)
    pairs, single = (render_clips(config, codec, video, 0, pairs=of) for of in (True, False))
    assert torch.equal(pairs.encoded, single.encoded) and single.rejected([0]) is None
    assert torch.equal(pairs.rejected([0, 1, 2]), pairs.encoded[[1, 2, 0]])


@pytest.mark.slow
def test_a_run_on_two_files(files, tmp_path):
    words = ["--method", "flow_dpo", *SMALL["finetune"][2:], *VIDEO, "--steps", "2", "--output", str(tmp_path / "run")]
    words = [word for word in words if word not in ("--data.num-clips", "4")]
    assert main([*words, "--data.path", str(files[0]), "--data.rejected", str(files[1])]) == 0
    assert [line["step"] for line in metrics_of(tmp_path / "run") if "train/preferred" in line] == [1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latents": OTHER[:2]}, "data.rejected has 2 rows, and data.path 3"),
        ({"caption": ["caption 0", "another", "caption 2"]}, "row 2 ('clip1') is not the pair of .*row 2 ('clip1')"),
        ({"id": ["clip0", "clip1", "other"]}, "row 3 ('other') is not the pair of .*row 3 ('clip2')"),
    ],
)
def test_rows_that_are_no_pairs_are_named(files, tmp_path, changes, message):
    rejected = write_clips(tmp_path / "wrong.parquet", **{"latents": OTHER} | changes)
    with pytest.raises(UserError, match=re.escape(message).replace(r"\.\*", ".*")):
        read(files[0]).check_rejected(read(rejected))


@pytest.mark.parametrize(
    ("method", "words", "message"),
    [
        ("flow_dpo", ["--data.path", "PREFERRED"], "--method flow_dpo needs --data.path and --data.rejected"),
        ("finetune", ["--data.path", "PREFERRED", "--data.rejected", "REJECTED"], "finetune reads no pairs"),
        ("flow_dpo", ["--data.rejected", "REJECTED"], "flow_dpo reads no pairs with these settings"),
    ],
)
def test_a_missing_or_needless_file_names_its_flag(files, tmp_path, capsys, method, words, message):
    named = {"PREFERRED": str(files[0]), "REJECTED": str(files[1])}
    run = ["--method", method, *VIDEO, *(named.get(word, word) for word in words), "--output", str(tmp_path / "run")]
    assert main(run) == 2
    assert message in " ".join(capsys.readouterr().err.split()) and not (tmp_path / "run").exists()
