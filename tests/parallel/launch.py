"""Starts the ranks of a test; they may abort at interpreter exit, so what they wrote is what counts."""

import faulthandler
import gc
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable

import jaxtyping
from helpers import REPO, free_port
from warm_ray import quick_ranks

PATIENCE = 900  # seconds that ranks may take, on a machine that others use too


def fork_ranks(count: int, work: Callable[..., None], *arguments: object) -> None:
    """Runs `work` on all ranks, as copies of this process: imports, which cost more than the work, are made once.

    Types are not checked there, and what a rank says goes where this process writes. Gloo now and then ends a rank by a
    signal. That is said, with where it was, and all ranks start again, once.
    """
    codes = _fork(count, work, *arguments)
    if min(codes) < 0:
        sys.stderr.write(f"ranks ended with {codes}; once more\n")
        _fork(count, work, *arguments)


def _fork(count: int, work: Callable[..., None], *arguments: object) -> list[int]:
    """The exit codes of the ranks; minus a signal."""
    place = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        multiprocessing.get_context("fork").Process(
            target=_rank, args=(place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, work, *arguments)
        )
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
        process.kill()  # one that hangs
        process.join()
    return [process.exitcode for process in processes]


def _rank(place: dict[str, str], work: Callable[..., None], *arguments: object) -> None:
    gc.freeze()  # what the test's process holds: the collector would look at it again and again, and copy its pages
    faulthandler.enable(sys.__stderr__)
    jaxtyping.config.update("jaxtyping_disable", True)
    os.environ |= place
    work(*arguments)


def torchrun(count: int, *words: str) -> subprocess.CompletedProcess[str]:
    """A program under torchrun, as users start it, in ranks that are copies of this process."""
    command = under_torchrun(count, *words)
    with quick_ranks() as variables:
        return subprocess.run(command, cwd=REPO, env=variables, capture_output=True, text=True, timeout=120)


def under_torchrun(count: int, *words: str) -> list[str]:
    ranks = ["--nproc-per-node", str(count), "--master-port", str(free_port())]
    return [sys.executable, "-m", "torch.distributed.run", *ranks, *words]
