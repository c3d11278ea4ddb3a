"""This script runs many training steps and shows whether memory, open files or threads grow.

    python scripts/bench_growth.py --method dance_grpo --flags="--video.frames 5 --video.height 32 --video.width 32"

It starts the run as its own process, with a checkpoint and a validation every 100 steps unless told otherwise, and
looks at the process after every tenth of the run. It ends with code 1 if something grew after the first two tenths, in
which caches fill. Linux only.
"""

import json
import shlex
import subprocess
import sys
import tempfile
import threading
from dataclasses import astuple, dataclass
from pathlib import Path

import psutil
import tyro
from rich.console import Console
from rich.table import Table

ROWS = 10  # looks at the process
FILLED = 2  # of them, after which nothing may grow
SLACK = 1.03  # of resident memory, which moves by a few pages
EVERY = ["--checkpoint-every", "100", "--validate-every", "100", "--validation.num-samples", "2"]


@dataclass(frozen=True)
class Look:
    """One look at a process."""

    step: int
    resident: float  # MiB
    files: int
    threads: int
    children: int


def look(process: psutil.Process, step: int) -> Look:
    """Return what the process holds; its children are those of data, scorers and workers."""
    with process.oneshot():
        resident, files, threads = process.memory_info().rss / 2**20, process.num_fds(), process.num_threads()
    return Look(step, resident, files, threads, len(process.children(recursive=True)))


def last_step(metrics: Path) -> int:
    """Return the last whole line's step of metrics.jsonl; 0 before there is one."""
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True) if metrics.is_file() else []
    whole = [line for line in lines if line.endswith("\n")]
    return json.loads(whole[-1])["step"] if whole else 0


def grown(looks: list[Look]) -> list[str]:
    """Return the names of what the last look has more of than the first one after caches filled."""
    first, last = looks[FILLED - 1], looks[-1]
    names = [name for name in ("files", "threads", "children") if vars(last)[name] > vars(first)[name]]
    return names + (["resident"] if last.resident > SLACK * first.resident else [])


def watch(words: list[str], output: Path, steps: int) -> list[Look]:
    """Run the training and return the looks at it; RuntimeError if it fails."""
    command = [sys.executable, "-m", "unified_trainer", *EVERY, *words, "--steps", str(steps), "--output", str(output)]
    looks: list[Look] = []
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as run:
        process = psutil.Process(run.pid)
        while run.poll() is None and len(looks) < ROWS:
            threading.Event().wait(0.05)
            step = last_step(output / "metrics.jsonl")
            if step >= (len(looks) + 1) * (steps - 1) // ROWS:
                looks.append(look(process, step))
    if run.returncode:
        raise RuntimeError(f"the run ended with code {run.returncode}")
    return looks


def main(method: str = "dance_grpo", steps: int = 3000, flags: str = "") -> None:
    """Run, print the table, and end with code 1 if something grew.

    Args:
        method: the method to train with
        steps: training steps
        flags: more flags of the run, as one string
    """
    with tempfile.TemporaryDirectory() as folder:
        looks = watch(["--method", method, *shlex.split(flags)], Path(folder) / "run", steps)
    table = Table("step", "resident, MiB", "open files", "threads", "child processes")
    for one in looks:
        table.add_row(*(f"{value:.0f}" for value in astuple(one)))
    Console().print(table)
    more = grown(looks)
    Console().print(f"grew: {', '.join(more)}" if more else "nothing grew")
    sys.exit(bool(more))


if __name__ == "__main__":
    tyro.cli(main)
