"""Whole runs on clips of several shapes, and what is refused before one."""

import json
import re
from collections import Counter

import pyarrow.parquet as pq
import pytest
import torch
from helpers import ALONE, SMALL, checkpoint_of, metrics_of, run
from real_clips import quarters, write_exactly

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.run.plan.plan import check
from unified_trainer.run.settings.command_line import parse

BUCKETS = ["--data.buckets", "5x32x32", "5x32x64", "9x32x32"]
SIZE = ["--video.frames", "5", "--video.height", "32", "--video.width", "32", "--video.fps", "8"]
KINDS = ((5, 32, 32), (9, 32, 32), (5, 32, 64), (6, 32, 64), (12, 32, 32), (7, 32, 32))


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """Two videos for each bucket."""
    folder = tmp_path_factory.mktemp("videos")
    for i, size in enumerate(KINDS):
        write_exactly(folder / f"{i}.mkv", quarters(*size) // (i + 1), 8)
        (folder / f"{i}.txt").write_text(f"video {i}")
    return folder


@pytest.mark.slow
def test_a_resumed_run_on_buckets_is_the_run_without_a_stop(videos, tmp_path, capsys):
    words = ["--data.path", str(videos), *BUCKETS, *SIZE]
    run("finetune", tmp_path / "whole", *words, "--steps", "5")
    said = " ".join(capsys.readouterr().out.split())
    assert all(re.search(rf"bucket {size} \W 2 clips, latents", said) for size in BUCKETS[1:])
    run("finetune", tmp_path / "part", *words, "--steps", "2")
    assert main(["--resume", str(tmp_path / "part"), "--steps", "5"]) == 0
    assert metrics_of(tmp_path / "part") == metrics_of(tmp_path / "whole")
    one, other = (checkpoint_of(tmp_path / name, 5) for name in ("whole", "part"))
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
def test_encoded_clips_of_several_shapes_are_one_set(videos, tmp_path, capsys):
    """A short video is left out and listed, rows say their own size, and a row group has one shape."""
    write_exactly(videos / "short.mkv", quarters(3, 32, 32), 8)
    (videos / "short.txt").write_text("too short")
    out, command = tmp_path / "out", ["preprocess", str(videos), str(tmp_path / "out"), *SIZE]
    assert main([*command, *BUCKETS]) == 0
    assert "7 clips: 6 used, 1 left out" in " ".join(capsys.readouterr().out.split())
    (skipped,) = map(json.loads, (out / "skipped.jsonl").read_text().splitlines())
    assert skipped["file"] == "short.mkv" and "shortest of data.buckets has 5" in skipped["reason"]
    rows = pq.read_table(out / "clips-00000.parquet").to_pylist()
    sizes = Counter((round(row["duration_sec"] * row["fps"]), row["height"], row["width"]) for row in rows)
    assert sizes == {(5, 32, 32): 2, (9, 32, 32): 2, (5, 32, 64): 2}
    opened = pq.ParquetFile(out / "clips-00000.parquet")
    groups = [opened.read_row_group(i)["vae_latent_shape"].to_pylist() for i in range(opened.num_row_groups)]
    assert all(shape == group[0] for group in groups for shape in group)
    assert main([*command, "--data.buckets", "5x32x32"]) == 2  # other sizes
    run("finetune", tmp_path / "run", "--data.path", str(out), *BUCKETS, *SIZE, "--steps", "3")
    assert re.search(r"bucket 9x32x32 \W 2 clips", " ".join(capsys.readouterr().out.split()))
    words = [*SMALL["finetune"], "--data.path", str(out), *SIZE, "--output", str(tmp_path / "refused")]
    assert main(words) == 2
    assert "(see data.buckets)" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_one_bucket_is_a_run_of_its_size(tmp_path):
    folder = tmp_path / "videos"
    folder.mkdir()
    for i in range(2):
        write_exactly(folder / f"{i}.mkv", quarters(5, 32, 32) // (i + 1), 8)
        (folder / f"{i}.txt").write_text(f"video {i}")
    words = ["--data.path", str(folder), "--video.fps", "8", "--steps", "2", "--validate-every", "0"]
    run("finetune", tmp_path / "a", *words, *SIZE)
    run("finetune", tmp_path / "b", *words, "--data.buckets", "5x32x32")
    assert metrics_of(tmp_path / "a") == metrics_of(tmp_path / "b")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--method", "dance_grpo"], r"data\.buckets: dance_grpo with these settings makes samples of one size"),
        (["--method", "dmd2"], r"data\.buckets: dmd2 with these settings makes samples of one size"),
        (["--method", "distill_rl", "--algorithm.gan.weight", "1"], r"data\.buckets: distill_rl with these settings"),
        (["--method", "finetune"], r"data\.buckets: the tiny world has clips of one size"),
        (["--data.buckets", "6x32x32", "5x32x32"], r"data\.buckets 6x32x32: video\.frames must be .*k \+ 1"),
        (["--data.buckets", "5x32x32", "5x30x32"], r"data\.buckets 5x30x32: "),
        (["--data.buckets", "0x32x32"], r"data\.buckets: '0x32x32' is no size"),
        (["--data.buckets", "5x32"], r"data\.buckets: '5x32' is no size"),
        (["--data.buckets", "5x32x32", "5x32x32"], r"data\.buckets 5x32x32 5x32x32: two have equal latents"),
    ],
)
def test_what_cannot_be_is_refused_by_name(videos, words, why):
    """All samples of a method of rollouts have one size, and each bucket is checked as video.* is."""
    given = [*BUCKETS, *words] if "--method" in words else ["--method", "finetune", "--data.path", str(videos), *words]
    with pytest.raises(UserError, match=why):
        check(parse(given), ALONE)


def test_validations_keep_the_size_of_the_whole_run():
    words = ["--method", "finetune", "--data.path", "videos", *BUCKETS, "--validation.frames", "9", *SIZE]
    runs = parse(words).by_bucket().values()
    assert [(own.video.frames, own.video.height, own.video.width) for own in runs] == [
        (5, 32, 32),
        (5, 32, 64),
        (9, 32, 32),
    ]
    shown = [own.validated().video for own in runs]
    assert [(video.frames, video.height, video.width, video.fps) for video in shown] == [(9, 32, 32, 8)] * 3
