"""This script plots distillation runs and a control run.

python scripts/plot_distillation.py OUT.png RUN... [--control RUN]
"""

from pathlib import Path

import matplotlib
import tyro
from plot_run import column, rows_of

matplotlib.use("Agg")
from matplotlib import pyplot as plt

WINDOW = 8  # student updates that a plotted value averages


def main(
    out: tyro.conf.Positional[Path], runs: tyro.conf.Positional[tuple[Path, ...]], control: Path | None = None
) -> None:
    """Plot the Fréchet distance to real clips, the DMD loss, and the error of the critic.

    Args:
        out: picture to write
        runs: run directories, one per seed
        control: run directory of a run with a frozen critic
    """
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    names = ("validation/frechet", "train/dmd_loss", "train/critic_to_teacher_error")
    for run in (*runs, *([control] if control else [])):
        label, style = ("critic frozen", "C3") if run == control else (run.name, f"C{runs.index(run) % 3}")
        rows = rows_of(run)
        for place, name in zip(axes, names, strict=True):
            steps, values = column(rows, name)
            if name.startswith("train/"):
                steps, values = steps[WINDOW - 1 :], means(values)
            place.plot(steps, values, color=style, label=label, marker="o" if place is axes[0] else None)
    for place, title in zip(
        axes, ("Fréchet distance to real clips", "DMD loss", "critic_to_teacher_error"), strict=True
    ):
        place.set(xlabel="training step", ylim=(0, None))
        place.set_title(title, fontsize=10)
    axes[2].axhline(1.0, color="0.6", linewidth=1)
    axes[0].legend(fontsize=8)
    figure.savefig(out, dpi=110)


def means(values: list[float]) -> list[float]:
    """Return the running mean over WINDOW values."""
    return [sum(values[i - WINDOW : i]) / WINDOW for i in range(WINDOW, len(values) + 1)]


if __name__ == "__main__":
    tyro.cli(main)
