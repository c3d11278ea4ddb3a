"""A run that is asked to stop, or that loses its terminal, loses no finished step."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from helpers import REPO, SMALL, assert_same, checkpoint_of, environment, metrics_of, read_until
from parallel.launch import under_torchrun

from unified_trainer.__main__ import main
from unified_trainer.parallel import torchrun
from unified_trainer.run.stop_signal import heard, too_slow_to_stop
from unified_trainer.run.tracking.lost_terminal import FILE, LastingOutput

# Scores with the mean red channel; one of its calls sends a signal to its process, or waits for a pipe.
SCORER = """
import os
calls = []
def score(videos, prompts):
    calls.append(1)
    if len(calls) == {call}:
        {act}
    return videos[:, 0].flatten(1).mean(1)
"""


def scorer(folder: Path, call: int, act: str) -> list[str]:
    folder.mkdir(exist_ok=True)
    (folder / "red.py").write_text(SCORER.format(call=call, act=act))
    return ["--reward.kind", f"{folder / 'red.py'}:score", "--reward.path", "", "--validate-every", "0"]


@pytest.fixture
def terminal():
    """SIGHUP ends a process, as in a terminal, also where the tests were started under nohup."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, previous)


THREE_STEPS = ["--steps", "3", "--algorithm.rollout-batch", "2"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """For each method its run without a signal."""
    folder = tmp_path_factory.mktemp("whole")
    for method in ("dance_grpo", "dance_ppo"):
        quiet = scorer(folder / "scorer", 0, "pass")
        assert main([*SMALL[method], *THREE_STEPS, *quiet, "--output", str(folder / method)]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(
    ("method", "number", "every"),  # every pair of values; `every` says whether the step before is saved already
    [
        ("dance_grpo", signal.SIGTERM, 0),
        ("dance_grpo", signal.SIGHUP, 1),
        ("dance_ppo", signal.SIGHUP, 0),
        ("dance_ppo", signal.SIGTERM, 1),
    ],
)
def test_a_step_that_is_still_sampling_is_dropped(whole, tmp_path, capsys, method, number, every):
    """The signal comes while half of the samples of step 2 are scored; the resumed run is that of no signal."""
    words = [*SMALL[method], *THREE_STEPS, "--checkpoint-every", str(every)]
    manifest, linked = tmp_path / "run" / "checkpoints" / "step_1" / "manifest.json", tmp_path / "linked"
    note = f"os.path.isfile({str(manifest)!r}) and os.link({str(manifest)!r}, {str(linked)!r})"
    asking = scorer(tmp_path / "b", 3, f"{note}; os.kill({os.getpid()}, {number})")
    assert main([*words, *asking, "--output", str(tmp_path / "run")]) == 0
    assert linked.exists() == bool(every)
    assert not every or linked.samefile(manifest)  # what is saved is not written once more
    said = capsys.readouterr().out
    assert "step 2 was dropped before it changed anything" in said and "stopped after step 1; continue with:" in said
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_1"]
    scorer(tmp_path / "b", 0, "pass")
    assert main(["--resume", str(tmp_path / "run"), "--trust"]) == 0  # the file of the scorer has changed
    assert_same(checkpoint_of(tmp_path / "run", 3), checkpoint_of(whole / method, 3))
    assert metrics_of(tmp_path / "run") == metrics_of(whole / method)


@pytest.mark.slow
def test_a_first_step_that_is_dropped_leaves_a_run_that_begins_again(tmp_path, capsys):
    words = [*SMALL["dance_grpo"], "--steps", "1", "--algorithm.rollout-batch", "2", "--output", str(tmp_path / "run")]
    assert main([*words, *scorer(tmp_path / "b", 1, f"os.kill({os.getpid()}, {signal.SIGTERM})")]) == 0
    assert "stopped after step 0" in capsys.readouterr().out and not (tmp_path / "run" / "checkpoints").exists()
    scorer(tmp_path / "b", 0, "pass")
    assert main(["--resume", str(tmp_path / "run"), "--trust"]) == 0
    assert checkpoint_of(tmp_path / "run", 1)


@pytest.mark.ranks
def test_torchrun_and_slurm_wait_for_the_step_of_a_slow_scorer(tmp_path):
    """Its scorer answers after SIGTERM: the step ends, is saved, and both ranks end by themselves.

    torchrun passes SIGTERM on. Slurm may send it to every process of the job step: so each rank gets it twice.
    """
    run, answers = tmp_path / "run", [tmp_path / f"answer{rank}" for rank in range(2)]
    for answer in answers:
        os.mkfifo(answer)
    words = [*SMALL["dance_grpo"], "--steps", "9", "--output", str(run)]
    words += scorer(tmp_path / "slow", 2, f"open({str(tmp_path / 'answer')!r} + os.environ['RANK']).read()")
    command = under_torchrun(2, "--shutdown-timeout", "300", "-m", "unified_trainer", *words)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=REPO, env=environment(), **pipes) as job:
        with answers[0].open("w"), answers[1].open("w"):  # both ranks have begun to score step 2
            job.send_signal(signal.SIGTERM)
            said = "".join(read_until(job, "closing signal SIGTERM") for _ in range(2))
            # A rank that was about to read says so after its scorer has answered.
            for rank in psutil.Process(job.pid).children():
                rank.send_signal(signal.SIGTERM)
        said += job.communicate(timeout=120)[0]
    assert said.count("finishing this step and saving") >= 2, said
    assert "stopped after step 2; continue with:" in said, said
    assert checkpoint_of(run, 2)


@pytest.mark.parametrize(
    ("words", "variable", "expected"),
    [
        ([], "", 30.0),
        ([], "45", 45.0),
        (["--shutdown-timeout", "90"], "45", 90.0),
        (["--shutdown_timeout=1800"], "", 1800.0),
    ],
)
def test_the_patience_of_torchrun(monkeypatch, words, variable, expected):
    waits = [sys.executable, "-c", "print(flush=True); input()", *words, "end"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        launcher.stdout.readline()
        monkeypatch.setattr(torchrun.os, "getppid", lambda: launcher.pid)
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", variable)
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        assert torchrun.shutdown_timeout() is None and too_slow_to_stop(1e6) == ""
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        assert torchrun.shutdown_timeout() == expected
        assert too_slow_to_stop(expected - 1) == ""
        assert "torchrun kills its processes" in too_slow_to_stop(expected)
        assert "--shutdown-timeout 5400" in too_slow_to_stop(1800)
        launcher.communicate(b"\n")


def test_a_signal_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert heard() == [signal.SIGINT, signal.SIGTERM]
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert signal.SIGHUP in heard()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_full_device_is_replaced_by_a_file(tmp_path):
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        lasting = LastingOutput(full, tmp_path / FILE)
        lasting.write("first\n")
        lasting.flush()
        lasting.write("second\n")
        lasting.flush()
    why, *rest = (tmp_path / FILE).read_text().splitlines()
    assert "the output is lost ([Errno 28] No space left on device): the run goes on" in why
    assert rest == ["first", "second"]


def test_output_that_no_file_takes_is_dropped(tmp_path):
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        lasting = LastingOutput(full, tmp_path / "absent" / FILE)
        lasting.write("first\n")
        lasting.flush()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_reader_that_ends_does_not_end_the_run(tmp_path):
    """As `| head -1` does, for both outputs."""
    words = [*SMALL["dance_grpo"], "--output", str(tmp_path / "run")]
    command = [sys.executable, "-m", "unified_trainer", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=REPO, env=environment(), **pipes) as job:
        job.stdout.close()
        assert job.wait(300) == 0
    said = (tmp_path / "run" / FILE).read_text()
    assert "the output is lost ([Errno 32] Broken pipe)" in said and "1/1 steps done" in said
    assert checkpoint_of(tmp_path / "run", 1)
