"""The cases of tests/parallel/test_unlike_ranks.py, two ranks for each.

What a rank wrote to standard error is in CASE-RANK of a folder, with its exit code and seconds before. The ranks are
copies of this process, which torchrun does not watch: they end because of each other only.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from helpers import SMALL, flags
from launch import fork_ranks

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.parallel import arrival, meeting
from unified_trainer.parallel.mesh import Mesh, ParallelConfig
from unified_trainer.run import train
from unified_trainer.run.exit_codes import exit_code
from unified_trainer.run.settings import code

RUN = SMALL["dance_grpo"] + flags({"algorithm.update-batch": 2, "algorithm.rollout-batch": 2})


def training(*words: str) -> Callable[[Path, int], int]:
    """A training whose flags hold the rank's number for {rank}, in a working directory of the rank."""
    return lambda folder, rank: main([*RUN, "--output", str(folder / "run"), *(w.format(rank=rank) for w in words)])


def other_flag(folder: Path, rank: int) -> int:
    return training(*["--no-such-flag", "1"][: 2 * rank])(folder, rank)


def other_version(folder: Path, rank: int) -> int:
    train.version_of = lambda name: f"{name} {rank}"
    return training()(folder, rank)


def other_package(folder: Path, rank: int) -> int:
    """Each rank has a package of its own: one node was not updated."""
    package = folder / str(rank) / "package"
    package.mkdir()
    (package / "mesh.py").write_text(f"RANK = {rank}\n")
    code.PACKAGE = package
    return training()(folder, rank)


def code_of(work: Callable[[], int]) -> int:
    try:
        return work()
    except BaseException as error:
        if (code := exit_code(error)) is None:
            raise
        return code


def other_scorer(folder: Path, rank: int) -> int:
    Path("red.py").write_text(f"def score(videos, prompts):\n    return videos.flatten(1).mean(1) + {rank}\n")
    return training("--reward.kind", "red.py:score", "--reward.path", "")(folder, rank)


def bug(folder: Path, rank: int) -> int:
    """One rank raises what is no UserError, while the other waits for something that is no collective."""
    meeting.GRACE = 0.3

    def work() -> int:
        with meeting.meeting():
            if rank:
                raise KeyError("gone")
            return threading.Event().wait()

    return code_of(work)


def tidy(folder: Path, rank: int) -> int:
    """The other rank is in a collective, which fails when this one has ended."""

    def work() -> int:
        with meeting.meeting() as store:
            mesh = Mesh.join("cpu", store=store)
            if rank:
                raise UserError("no such file")
            mesh.barrier()
        return 0

    return code_of(work)


def savers(folder: Path, rank: int) -> int:
    """The group of the saver waits for its own timeout, and no longer; the other rank stays until it has."""
    with meeting.meeting() as store:
        thread = Mesh.join("cpu", ParallelConfig(timeout_minutes=0.02), store).for_thread()
        if rank:
            store.set_timeout(timedelta(minutes=1))
            store.get("waited")
            return 0
        began = time.monotonic()
        try:
            thread.barrier()
        except RuntimeError:
            sys.stderr.write(f"waited {time.monotonic() - began}")
        store.set("waited", "")
    return 0


def stands_still(folder: Path, rank: int) -> int:
    """One rank never comes to a collective, which the other gives up after 1.2 seconds."""
    meeting.GRACE = 0.3

    def work() -> int:
        with meeting.meeting() as store:
            mesh = Mesh.join("cpu", ParallelConfig(timeout_minutes=0.02), store)
            if rank:
                return threading.Event().wait()
            mesh.barrier()
        return 0

    return code_of(work)


def absent(folder: Path, rank: int) -> int:
    """The ranks are 2 of 3: the last one was not started."""
    os.environ["WORLD_SIZE"] = "3"
    arrival.SAY = 0.5
    return main([*RUN, "--output", str(folder / "run"), "--parallel.timeout-minutes", "0.03"])


def elsewhere(folder: Path, rank: int) -> int:
    """One rank has another port of rank 0, where nobody answers."""
    arrival.SAY, arrival.LOOK = 0.5, 0.1
    if rank:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
            os.environ["LOCAL_RANK"] = "0"
            return main([*RUN, "--output", str(folder / "run"), "--parallel.timeout-minutes", "0.03"])
    return main([*RUN, "--output", str(folder / "run"), "--parallel.timeout-minutes", "0.03"])


CASES = {
    "still": stands_still,
    "absent": absent,
    "elsewhere": elsewhere,
    "settings": training("--seed", "{rank}", "--student.learning-rate", "{rank}e-3"),
    "output": training("--output", "run"),
    "prompts": training("--prompts", "prompts.txt"),
    "missing": training("--validation.prompts", "first.txt"),
    "flag": other_flag,
    "version": other_version,
    "package": other_package,
    "scorer": other_scorer,
    "bug": bug,
    "tidy": tidy,
    "savers": savers,
}


def rank_of(case: str, folder: Path) -> None:
    rank = int(os.environ["RANK"])
    os.chdir(folder / str(rank))
    report = (folder / f"{case}-{rank}").open("w")
    os.dup2(report.fileno(), 2)
    sys.stderr = report
    began = time.monotonic()
    code = CASES[case](folder, rank)
    report.write(f"\nended with {code} after {time.monotonic() - began:.1f} s")
    report.flush()
    os._exit(code)


def run_all(folder: Path) -> None:
    for rank in range(2):
        (folder / str(rank)).mkdir()
        (folder / str(rank) / "prompts.txt").write_text(f"a red circle\nprompt {rank}\n")
    (folder / "0" / "first.txt").write_text("a red circle\n")
    for case in CASES:
        fork_ranks(2, rank_of, case, folder)
