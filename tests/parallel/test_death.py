"""A rank that fails or is killed ends the job under torchrun, with its own error shown."""

import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from helpers import REPO, SMALL, flags, read_until
from launch import torchrun, under_torchrun
from warm_ray import quick_ranks

pytestmark = pytest.mark.ranks

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
    assert done.stderr.count("error on rank") == 1, done.stderr
    assert "error on rank 1: --prompts prompts.txt" in done.stderr, done.stderr
    assert not (places / "run").exists()


def test_an_error_of_all_ranks_is_printed_once_and_ends_torchruns_report():
    """torchrun then prints a traceback of its own, and a report that ends with the error."""
    done = torchrun(2, "-m", "unified_trainer", "--method", "finetune", "--no-such-flag", "1")
    text = "--no-such-flag is not known; --help-all lists all there are"
    assert done.returncode != 0
    assert re.findall(r"error on rank \d: (.*)", done.stderr) == [text], done.stderr
    assert re.search(rf"  traceback : {re.escape(text)}\n=+\n*$", done.stderr), done.stderr


def ranks_of(torchrun: subprocess.Popen) -> dict[str, psutil.Process]:
    """The processes that torchrun started, by their rank."""
    return {child.environ()["RANK"]: child for child in psutil.Process(torchrun.pid).children()}


def test_a_rank_that_is_killed_in_training_ends_the_job(tmp_path):
    """By the out-of-memory killer, say. The other rank is inside a step that it cannot finish, and shows its error."""
    run = tmp_path / "run"
    words = [*SMALL["finetune"], *flags({"steps": 5000, "validation.num-samples": 2, "output": run})]
    started = under_torchrun(2, "-m", "unified_trainer", *words)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with quick_ranks() as variables, subprocess.Popen(started, cwd=REPO, env=variables, **pipes) as job:
        try:
            read_until(job, "step 1/5000")  # a rank that is still before its first step ends without a word
            ranks = ranks_of(job)
            os.kill(ranks["1"].pid, signal.SIGKILL)
            said = job.communicate(timeout=60)[0]
        finally:
            job.terminate()
    assert job.returncode != 0, said
    assert f"Signal {signal.SIGKILL.value} (SIGKILL) received by PID {ranks['1'].pid}" in said, said
    assert not ranks["0"].is_running()
    if f"Signal {signal.SIGTERM.value} (SIGTERM) received by PID {ranks['0'].pid}" in said:
        pytest.skip("torchrun ended rank 0 before it could show its error, as it may on a busy machine")
    assert "error on rank 0: another rank has ended; its own message says why (" in said, said
    assert "Traceback" not in said.partition("error on rank 0")[0] and "[rank" not in said, said
    assert not (run / ".lock").exists()
