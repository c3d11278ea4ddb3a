"""Writes that the kernel refuses, at every size: a limit on the size of files (RLIMIT_FSIZE) needs no rights."""

import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from helpers import ALONE, SMALL, assert_same, checkpoint_of, copy_of, files_of, metrics_of

from unified_trainer.__main__ import main
from unified_trainer.run.checkpoint import dcp as checkpoint
from unified_trainer.run.checkpoint.dcp import CheckpointError

WORDS = [*SMALL["finetune"], "--checkpoint-every", "1", "--validate-every", "0"]


@contextmanager
def largest_file(size: int):
    """Every write of this process beyond so many bytes of a file fails: File too large."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def sizes_of(folder: Path) -> list[int]:
    return sorted({len(content) for content in files_of(folder).values()})


def test_a_save_that_fails_at_any_byte_leaves_what_was_there(tmp_path):
    """The first and the last byte of every file, and steps between them."""
    state = {f"{role}/{kind}/w": torch.rand(size) for role in "ab" for kind, size in (("weights", 300), ("ema", 900))}
    root = tmp_path / "checkpoints"
    checkpoint.save(root, 1, state, ALONE, {})
    before, sizes = files_of(tmp_path), sizes_of(tmp_path)
    limits = {0, *range(1, sizes[-1], 97), *(size - 1 for size in sizes)}
    for limit in sorted(limits):
        with pytest.raises(CheckpointError, match="File too large"), largest_file(limit):
            checkpoint.save(root, 2, state, ALONE, {})
        assert files_of(tmp_path) == before, limit
    with largest_file(sizes[-1]):
        checkpoint.save(root, 2, state, ALONE, {})
    assert_same(checkpoint_of(tmp_path, 2), state)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of two steps, and one of the same settings that has made the first of them."""
    folder = tmp_path_factory.mktemp("runs")
    assert main([*WORDS, "--steps", "2", "--output", str(folder / "straight")]) == 0
    assert main([*WORDS, "--steps", "1", "--output", str(folder / "begun")]) == 0
    return folder / "straight", folder / "begun"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "error"),
    [
        ("config.yaml", "no space to write {run}/config.yaml ([Errno 27] File too large"),
        ("shard", "step 2 could not be saved: free space in {run}/checkpoints, then --resume {run}"),
    ],
    ids=["config", "shard"],
)
def test_a_run_that_may_not_write_says_so_and_is_resumed(runs, tmp_path, capsys, limit, error):
    """Files may be one byte smaller than the config, or than the largest file of the checkpoint."""
    straight, begun = runs
    run = copy_of(begun, tmp_path / "run")
    size = (straight / limit).stat().st_size if limit != "shard" else sizes_of(straight / "checkpoints")[-1]
    before = files_of(run / "checkpoints")
    capsys.readouterr()
    with largest_file(size - 1):
        assert main(["--resume", str(run), "--steps", "2"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {error.format(run=run)}")
    assert files_of(run / "checkpoints") == before
    assert main(["--resume", str(run), "--steps", "2"]) == 0
    assert metrics_of(run) == metrics_of(straight)
    assert_same(checkpoint_of(run, 2), checkpoint_of(straight, 2))
