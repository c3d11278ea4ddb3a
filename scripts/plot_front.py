"""This script draws the picture of README from a run of the demo: python scripts/plot_front.py RUN OUT.png

One video before and after training, six frames each, and the reward of the run beside them.
"""

from pathlib import Path

import matplotlib
import tyro

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from plot_run import column, curve, rows_of

VIDEOS = 4  # on a contact sheet of the demo
VIDEO = 128  # pixels of a video on a contact sheet, below its prompt


def main(run: tyro.conf.Positional[Path], out: tyro.conf.Positional[Path], video: int = 3) -> None:
    """Draw one video before and after training, and the reward.

    Args:
        run: run directory
        out: picture to write
        video: number of the video on the contact sheets
    """
    rows = rows_of(run)
    steps, _ = column(rows, "validation/reward")
    figure = plt.figure(figsize=(10, 2.6), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.9, 1))
    for place, step in enumerate((steps[0], steps[-1])):
        sheet = plt.imread(run / "validation" / f"step_{step}" / "contact_sheet.png")
        axes = figure.add_subplot(grid[place, 0])
        row = sheet.shape[0] // VIDEOS
        axes.imshow(sheet[(video + 1) * row - VIDEO : (video + 1) * row])
        axes.set(xticks=[], yticks=[], ylabel="before" if step == steps[0] else f"{step} steps")
    axes = figure.add_subplot(grid[:, 1])
    curve(axes, rows, "train/reward", label="rollouts", color="0.7")
    curve(axes, rows, "validation/reward", label="held-out prompts", marker="o")
    axes.set(xlabel="training step", ylabel="reward", xlim=(0, rows[-1]["step"]))
    axes.legend(fontsize=8)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    tyro.cli(main)
