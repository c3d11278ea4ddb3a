"""This script compares students of the tiny world in 1, 2, 4 and 8 steps: flow_map, consistency, dmd2 and rcm.

    python scripts/compare_flow_map.py --seeds 0 1 2

It prints a markdown table of what is there after it ran what is missing. Every student is trained once, for as many
steps on as many samples, and sampled with each number of steps, as is the teacher with guidance.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import tyro

from unified_trainer.data.prompts import validation_captions

TRAIN = "--algorithm.guidance-scale 2 --validate-every 0 --checkpoint-every 0"
KINDS = {  # how a kind is trained, and the solver that it is sampled with
    "flow_map": ("--method flow_map", "ode"),
    "consistency": ("--method consistency", "sde"),
    "dmd2": ("--method dmd2", "sde"),
    "rcm": ("--method rcm", "sde"),
}
COUNTS = (1, 2, 4, 8)
COLUMNS = ("reward", "accuracy", "frechet")


def main(
    output: Path = Path("runs/compare_flow_map"),
    seeds: tuple[int, ...] = (0, 1, 2),
    kinds: tuple[str, ...] = tuple(KINDS),
    steps: int = 200,
) -> None:
    """Run what is missing, and print the table.

    Args:
        output: folder of the runs
        seeds: seeds of the runs
        kinds: rows of the table, besides the teacher
        steps: training steps of each student
    """
    output.mkdir(parents=True, exist_ok=True)
    (output / "prompts.txt").write_text("\n".join(validation_captions(48)) + "\n", encoding="utf-8")
    teacher = [f"tiny,num_steps={count},guidance_scale=2,shift=5,solver=ode" for count in COUNTS]
    rows = {"teacher": [measured(output / "teacher", teacher, output)]}
    for seed in seeds:
        for kind in kinds:
            run, (method, solver) = output / f"{kind}-{seed}", KINDS[kind]
            train(run, method, seed, steps)
            sampled = [f"{run}:ema,num_steps={count},solver={solver}" for count in COUNTS]
            rows.setdefault(kind, []).append(measured(run.with_name(f"{run.name}-eval"), sampled, output))
    sys.stdout.write(f"| student | steps | {' | '.join(COLUMNS)} |\n|{' --- |' * (2 + len(COLUMNS))}\n")
    for place, count in enumerate(COUNTS):
        for kind, ends in rows.items():
            cells = [spread([end[place][column] for end in ends]) for column in COLUMNS]
            sys.stdout.write(f"| {' | '.join([kind, str(count), *cells])} |\n")


def train(folder: Path, method: str, seed: int, steps: int) -> None:
    """Train a student unless it is trained."""
    if (folder / "config.yaml").is_file():
        words = ["--resume", str(folder)]
    else:
        words = [*method.split(), *TRAIN.split(), "--steps", str(steps), "--seed", str(seed), "--output", str(folder)]
    if not list(folder.glob(f"checkpoints/step_{steps}")):
        subprocess.run([sys.executable, "-m", "unified_trainer", *words], check=True)


def measured(folder: Path, checkpoints: list[str], output: Path) -> list[dict[str, float]]:
    """Return the measures of checkpoints on two samples of each prompt."""
    file = folder / "evaluation.json"
    if not file.is_file():
        words = ["--prompts", str(output / "prompts.txt"), "--samples", "2", "--batch", "48", "--output", str(folder)]
        subprocess.run([sys.executable, "-m", "unified_trainer", "evaluate", *checkpoints, *words], check=True)
    held = json.loads(file.read_text(encoding="utf-8"))["measures"]
    columns = {name: [measure["mean"] for measure in held[name].values()] for name in COLUMNS}
    return [{name: values[place] for name, values in columns.items()} for place in range(len(checkpoints))]


def spread(values: list[float]) -> str:
    """Return the mean, and Bessel's standard deviation of several values."""
    apart = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{apart}"


if __name__ == "__main__":
    tyro.cli(main)
