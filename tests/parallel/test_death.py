"""A rank that fails ends the job, with its own error shown; ranks that were started differently do not start."""

from pathlib import Path

import pytest
from helpers import SMALL, flags
from launch import torchrun

PROGRAM = str(Path(__file__).parent / "unlike.py")
RUN = SMALL["dance_grpo"] + flags({"algorithm.update-batch": 2, "algorithm.rollout-batch": 2})


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Working directories of two ranks, of which only the first has prompts, with their settings beside."""
    folder = tmp_path_factory.mktemp("places")
    for rank in range(2):
        (folder / str(rank)).mkdir()
    (folder / "0" / "prompts.txt").write_text("a red circle moving left\na blue square moving up\n")
    return folder


def test_a_rank_that_fails_ends_the_job_with_its_own_error(places):
    """The other is inside the run by then, waits for it, and learns that it is gone."""
    flags = ["--output", str(places / "run"), "--prompts", "prompts.txt"]
    done = torchrun(2, PROGRAM, str(places), *RUN, *flags)
    assert done.returncode != 0
    assert "error on rank 1: --prompts prompts.txt" in done.stderr, done.stderr
    assert not (places / "run").exists()


def test_ranks_with_different_settings_do_not_start(places):
    """`{rank}` in a flag is each rank's own."""
    done = torchrun(2, PROGRAM, str(places), *RUN, "--seed", "{rank}", "--output", str(places / "other"))
    assert done.returncode != 0
    assert done.stderr.count("the ranks do not do the same: rank 0: dance_grpo with settings") == 2
    assert not (places / "other").exists()
