"""Whole runs on parquet files of the tiny world's clips."""

import re

import pytest
import torch
from clip_files import write_clips
from helpers import SMALL, WAN, checkpoint_of, metrics_of, run, tiny_codec

from unified_trainer.__main__ import main
from unified_trainer.data.clips import DataConfig, VideoConfig, render_clips
from unified_trainer.data.tiny_world import FRAMES, SIZE

pytestmark = pytest.mark.slow

COUNT = 24


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """Two files in row groups of four, with the captions' embeddings."""
    folder, codec = tmp_path_factory.mktemp("clips"), tiny_codec()
    rendered = render_clips(DataConfig(num_clips=COUNT), codec, VideoConfig(FRAMES, SIZE, SIZE), seed=0)
    raw = codec.raw(rendered.encoded)
    for name, part in (("a", slice(0, 12)), ("b", slice(12, COUNT))):
        captions = list(rendered.prompts[part])
        text = [prompt["text"] for prompt in codec.prompts(captions)]
        more = {"caption": captions, "encoder": codec.text_fingerprint, "rows": 4}
        write_clips(folder / f"{name}.parquet", raw[part], text, **more)
    return folder


def test_a_resumed_run_on_files_is_the_run_without_a_stop(clips, tmp_path):
    words = ["--data.path", str(clips), "--algorithm.batch-size", "4"]
    run("finetune", tmp_path / "whole", *words, "--steps", "9")
    run("finetune", tmp_path / "part", *words, "--steps", "4")
    assert main(["--resume", str(tmp_path / "part"), "--steps", "9"]) == 0
    assert metrics_of(tmp_path / "part") == metrics_of(tmp_path / "whole")
    one, other = (checkpoint_of(tmp_path / name, 9) for name in ("whole", "part"))
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_embeddings_of_the_files_change_no_number(clips, tmp_path, capsys):
    """The same clips without embeddings, whose captions are encoded: the same losses, bit by bit."""
    import pyarrow.parquet as pq

    bare = tmp_path / "bare"
    bare.mkdir()
    for file in clips.iterdir():
        table = pq.read_table(file)
        kept = [name for name in table.column_names if not name.startswith("text_embedding")]
        pq.write_table(table.select(kept), bare / file.name, row_group_size=4)
    said = []
    for name, folder in (("with", clips), ("without", bare)):
        run("finetune", tmp_path / name, "--data.path", str(folder), "--steps", "3")
        said.append(" ".join(capsys.readouterr().out.split()))
    assert metrics_of(tmp_path / "with") == metrics_of(tmp_path / "without")
    assert "text encoder: 1 distinct prompts" in said[0] and "data.path: used; the run's text encoder" in said[0]
    assert re.search(r"text encoder: [3-7] distinct prompts", said[1]) and "captions are encoded instead" in said[1]


def test_bad_rows_end_a_run_before_anything_is_written(clips, tmp_path, capsys):
    file = write_clips(tmp_path / "bad.parquet", torch.zeros(2, 16, 5, 4, 4), caption=["a red circle", ""])
    words = [*SMALL["finetune"], "--student.path", str(WAN), "--output", str(tmp_path / "run")]
    assert main([*words, "--data.path", str(file)]) == 2
    assert re.search(r"bad\.parquet: row 2 \('clip1'\) has no caption", " ".join(capsys.readouterr().err.split()))
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").glob("*.yaml"))
