"""This script compares a student with sparse attention with a dense one, in the tiny world: dmd2, then dance_grpo.

    python scripts/compare_sparse.py --seeds 0 1 2

It prints a markdown table of what is there after it ran what is missing. All students have equal steps and seeds,
and so equal network calls: the seed draws the step of the sampler at which a student is trained.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import tyro

TILE = ["--student.sparse-attention.tile", "2", "2", "2"]
KINDS = {
    "dense": [],
    "sparse-0.5": ["--student.sparse-attention.share", "0.5", *TILE],
    "sparse-0.75": ["--student.sparse-attention.share", "0.75", *TILE],
}
RISE = ["--student.sparse-attention.warmup-updates", "16"]  # of 32; dance_grpo starts with the whole share
STEPS = {"dmd2": 160, "dance_grpo": 12}
COLUMNS = ("reward", "accuracy", "frechet")


def main(output: Path = Path("runs/compare_sparse"), seeds: tuple[int, ...] = (0, 1, 2), run: bool = True) -> None:
    """Run what is missing, and print the table.

    Args:
        output: folder of the runs
        seeds: seeds of the runs
        run: --no-run only prints what has finished
    """
    if run:
        for seed in seeds:
            for kind in KINDS:
                for method in STEPS:
                    finish(output, kind, method, seed)
    sys.stdout.write(f"| student | method | seeds | {' | '.join(COLUMNS)} |\n|{' --- |' * (3 + len(COLUMNS))}\n")
    for method, steps in STEPS.items():
        for kind in KINDS:
            ends = [last for seed in seeds if (last := validation(output / f"{kind}-{method}-{seed}", steps))]
            values = [spread([end[f"validation/{name}"] for end in ends]) for name in COLUMNS] if ends else []
            sys.stdout.write(f"| {' | '.join([kind, f'{method}, {steps} steps', str(len(ends)), *values])} |\n")


def finish(output: Path, kind: str, method: str, seed: int) -> None:
    """Finish a run unless it is finished."""
    folder, steps = output / f"{kind}-{method}-{seed}", str(STEPS[method])
    if validation(folder, STEPS[method]):
        return
    words = ["--resume", str(folder)]
    if not (folder / "config.yaml").is_file():
        words = ["--method", method, *KINDS[kind], "--seed", str(seed), "--output", str(folder)]
        words += ["--validation.num-samples", "192", "--checkpoint-every", "0", "--validate-every", steps]
        if method == "dance_grpo":
            words += ["--student.learning-rate", "1.5e-4", "--init-from", str(output / f"{kind}-dmd2-{seed}")]
        elif KINDS[kind]:
            words += RISE
    subprocess.run([sys.executable, "-m", "unified_trainer", *words, "--steps", steps], check=True)


def validation(folder: Path, step: int) -> dict[str, float]:
    """Return the metrics of the validation after `step`, empty if there is none."""
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return next((line for line in lines if line["step"] == step and "validation/reward" in line), {})


def spread(values: list[float]) -> str:
    """Return the mean, and Bessel's standard deviation of several values."""
    apart = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{apart}"


if __name__ == "__main__":
    tyro.cli(main)
