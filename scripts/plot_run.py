"""This script plots reward and accuracy of a run over its steps: python scripts/plot_run.py RUN OUT.png"""

import json
from pathlib import Path

import matplotlib
import tyro

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def main(run: tyro.conf.Positional[Path], out: tyro.conf.Positional[Path]) -> None:
    """Plot the reward and the accuracy.

    Args:
        run: run directory
        out: picture to write
    """
    rows = rows_of(run)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    curve(left, rows, "train/reward", label="rollouts", color="0.7")
    _, reward = curve(left, rows, "validation/reward", label="held-out prompts", marker="o")
    if reward:
        spread = column(rows, "validation/reward_std")[1][0]
        left.axhspan(reward[0] - spread, reward[0] + spread, alpha=0.12, label="starting spread over samples, 1 std")
    left.set(xlabel="training step", ylabel="reward", xlim=(0, rows[-1]["step"]))
    left.legend(fontsize=8)
    for name in ("accuracy", "accuracy/color", "accuracy/shape", "accuracy/direction"):
        label = "all attributes" if name == "accuracy" else name.removeprefix("accuracy/")
        curve(right, rows, f"validation/{name}", label=label, linewidth=2.5 if name == "accuracy" else 1, marker="o")
    right.set(xlabel="training step", ylabel="accuracy", ylim=(0, 1.02), xlim=(0, rows[-1]["step"]))
    right.legend(fontsize=8)
    figure.savefig(out, dpi=120)


def rows_of(run: Path) -> list[dict[str, float]]:
    """Read the lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def curve(axes: plt.Axes, rows: list[dict[str, float]], name: str, **style: object) -> tuple[list[float], list[float]]:
    steps, values = column(rows, name)
    axes.plot(steps, values, **style)
    return steps, values


def column(rows: list[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    """Return the steps and values of one metric."""
    found = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in found], [value for _, value in found]


if __name__ == "__main__":
    tyro.cli(main)
