"""This script compares dance_grpo on samples of older weights, with corrections and objectives, in the tiny world.

    python scripts/compare_lag.py --steps 80 --seeds 0 1 2
    python scripts/compare_lag.py --steps 40 --ahead 2 --corrections none sapo gspo \\
        --extra="--algorithm.prompts-per-update 1"

Samples of training step k come from the weights after max(0, k - ahead) steps, all in this process: these are the
numbers that workers give which make samples that far ahead. It prints a markdown table. A finished run is not repeated;
one that was stopped starts anew.
"""

import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import tyro
from torch import Tensor

from unified_trainer.basics.types import Batch
from unified_trainer.methods.rl.rollouts import Check, Rollouts, ScoredSamples
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.role import Trainable
from unified_trainer.run.build import Built, build
from unified_trainer.run.settings.command_line import parse

CORRECTIONS = {
    "none": "",
    "decoupled": "--algorithm.correction decoupled",
    "decoupled, joint": "--algorithm.correction decoupled --algorithm.weight-density joint",
    "loglinear": "--algorithm.correction loglinear",
    "truncated, joint": "--algorithm.correction truncated --algorithm.weight-density joint",
}
# Objectives with parameters that act at ratios of latents, which stay within about 1e-3 of 1.
KIND = "--algorithm.objective.kind"
OBJECTIVES = {
    "unclipped": f"{KIND} none",
    "dual_clip": f"{KIND} dual_clip --algorithm.objective.dual-clip 1.003",
    "soft_clip": f"{KIND} soft_clip --algorithm.objective.alpha 1000",
    "sapo": f"{KIND} sapo --algorithm.objective.tau-pos 1000 --algorithm.objective.tau-neg 1050",
    "ce_gppo": f"{KIND} ce_gppo",
    "cispo": f"{KIND} cispo --algorithm.clip-low 1",
    "gspo": f"{KIND} gspo",
    "dppo": f"{KIND} none --algorithm.correction dppo --algorithm.trust-region 1e-4",
}
ROWS = CORRECTIONS | OBJECTIVES
RECIPE = Path(__file__).with_name("two_steps.yaml")
SHOWN = ("approx_kl", "zero_gradient_fraction", "ess", "importance_weight")


class LaggedRollouts:
    """Makes the samples of training step k with the weights after max(0, k - ahead) steps."""

    uniform = True
    check: Check | None = None

    def __init__(self, rollouts: Rollouts, student: Trainable, ahead: int) -> None:
        self.ahead = ahead
        self._rollouts, self._student = rollouts, student
        self._weights: dict[int, dict[str, Tensor]] = {}  # by the number of training steps behind them
        self._newest = 0  # version of the newest weights that made samples

    def samples(self, batch: Batch, step: int, rng: Streams) -> ScoredSamples:
        if step not in self._weights:
            self._weights[step] = {key: weight.detach().clone() for key, weight in self._student.weights.items()}
        self._newest = max(self._newest, step - self.ahead)
        self._weights = {version: kept for version, kept in self._weights.items() if version >= self._newest}
        with self._with(self._weights[self._newest]):
            samples = self._rollouts.samples(batch, step, rng)
        return replace(samples, versions=torch.full_like(samples.versions, self._newest))

    def metrics(self) -> dict[str, float]:
        return self._rollouts.metrics()

    def lower_ahead(self) -> None:
        self.ahead = max(0, self.ahead - 1)

    @contextmanager
    def _with(self, weights: dict[str, Tensor]) -> Iterator[None]:
        """Give the student other weights for a while."""
        present = {key: weight.detach().clone() for key, weight in self._student.weights.items()}
        self._load(weights)
        try:
            yield
        finally:
            self._load(present)

    @torch.no_grad()
    def _load(self, weights: dict[str, Tensor]) -> None:
        for key, weight in self._student.weights.items():
            weight.copy_(weights[key])


def main(
    output: Path = Path("runs/compare_lag"),
    steps: int = 80,
    seeds: tuple[int, ...] = (0, 1, 2),
    ahead: tuple[int, ...] = (0, 1, 3, 8),
    corrections: tuple[str, ...] = tuple(CORRECTIONS),
    extra: Annotated[str, tyro.conf.arg(metavar="FLAGS")] = "",
) -> None:
    """Run what is missing, and print the table.

    Args:
        output: folder of the runs
        steps: training steps
        seeds: seeds of the runs
        ahead: training steps that samples are made ahead; 0 needs no correction and has one row
        corrections: rows for each number of steps: corrections, or objectives by name
        extra: more flags for every run, in one string: --extra="--student.learning-rate 3e-4"
    """
    rows = []
    for steps_ahead in ahead:
        for name in corrections if steps_ahead else ("none",):
            runs = []
            for seed in seeds:
                folder = output / f"{name.replace(', ', '_')}-{steps_ahead}-{seed}"
                flags = [*ROWS[name].split(), *extra.split(), "--seed", str(seed)]
                runs.append(measured(folder, steps, steps_ahead, flags))
            rows.append(row(name, steps_ahead, runs))
    head = ["ahead", "correction", "reward before", "reward", "accuracy before", "accuracy", *SHOWN]
    for cells in (head, ["---"] * len(head), *rows):
        sys.stdout.write(f"| {' | '.join(cells)} |\n")


def measured(folder: Path, steps: int, ahead: int, flags: list[str]) -> list[dict[str, float]]:
    """Return the metrics of a run: first validation, training steps, last validation. Run it if it has not finished."""
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    if lines and lines[-1]["step"] == steps and "validation/reward" in lines[-1]:
        return lines
    run = parse(["--method", "dance_grpo", "--recipe", str(RECIPE), "--steps", str(steps), *flags])
    built = build(run, Mesh.join(run.device))
    trainer, student = built.trainer, built.trainer.roles["student"]
    trainer.method.sample_from(LaggedRollouts(trainer.method.rollouts, student, ahead))
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{"step": 0} | validated(built, folder / "before", 0)]
    for step in range(steps):
        lines.append({"step": step + 1} | trainer.step(step))
    lines.append({"step": steps} | validated(built, folder / "after", steps))
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def validated(built: Built, folder: Path, step: int) -> dict[str, float]:
    """Return the metrics of the student after `step` training steps."""
    student, source = built.trainer.roles["student"], built.validation
    with student.sampling_weights(ema=source.ema):
        source.start(student, step)
    return source.finish(folder, step).metrics


def row(name: str, ahead: int, runs: list[list[dict[str, float]]]) -> list[str]:
    """Return the cells of a row: mean and standard deviation over the seeds, and means over the training steps."""
    cells = [str(ahead), name]
    for metric in ("validation/reward", "validation/accuracy"):
        for when in (0, -1):
            values = [lines[when][metric] for lines in runs]
            spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.3f}{spread}")
    for metric in SHOWN:
        values = [line[metric] for lines in runs for line in lines[1:-1] if metric in line]
        cells.append(f"{statistics.mean(values):.3g}" if values else "")
    return cells


if __name__ == "__main__":
    tyro.cli(main)
