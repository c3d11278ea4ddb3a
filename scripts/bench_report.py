"""Measure `report` of a long run: seconds, size of the page, peak memory.

python scripts/bench_report.py --lines 1000000
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NAMES = ("loss", "reward", "reward/hpsv3", "grad_norm", "approx_kl", "clip_fraction", "ratio_mean", "step_seconds")


def write_run(folder: Path, lines: int) -> None:
    """Write a run directory whose metrics.jsonl has so many lines."""
    folder.mkdir()
    (folder / "config.yaml").write_text(f"method: dance_grpo\nsteps: {lines}\nseed: 0\n")
    (folder / "environment.jsonl").write_text(
        '{"time": "2026-01-01T00:00:00+00:00", "step": 0, "command": "python -m unified_trainer"}\n'
    )
    draw = random.Random(0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, lines + 1):
            row = {"step": step, "time": 1.7e9 + step} | {f"train/{name}": draw.random() for name in NAMES}
            file.write(json.dumps(row) + "\n")


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--lines", type=int, default=1_000_000)
    lines = asked.parse_args().lines
    with tempfile.TemporaryDirectory() as place:
        folder, page = Path(place) / "run", Path(place) / "report.html"
        write_run(folder, lines)
        size = (folder / "metrics.jsonl").stat().st_size
        for words in (["report", folder, "--out", page], ["runs", place]):
            began = time.perf_counter()
            subprocess.run(
                [sys.executable, "-m", "unified_trainer", *map(str, words)], check=True, stdout=subprocess.DEVNULL
            )
            seconds, peak = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10
            sys.stdout.write(
                f"{words[0]} of {lines} lines ({size / 1e6:.0f} MB): {seconds:.1f} s, {peak:.0f} MiB at most\n"
            )
        sys.stdout.write(f"the page has {page.stat().st_size / 1e6:.1f} MB\n")


if __name__ == "__main__":
    main()
