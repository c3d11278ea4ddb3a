"""This script compares RL methods in the tiny world at the same number of network calls, over several seeds.

It prints a markdown table. A finished run is not repeated, and a stopped one is resumed.
"""

import json
import random
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from unified_trainer.data.prompts import training_captions

DANCE = f"--method dance_grpo --recipe {Path(__file__).with_name('two_steps.yaml')}"
SAMPLER = "--sampler.num-steps 4 --sampler.shift 5 --sampler.guidance-scale 1"
SAMPLER_20 = "--sampler.num-steps 20 --sampler.shift 5 --sampler.guidance-scale 1"
SWEEP = "--algorithm.window.size 4 --algorithm.window.every 2"  # all 16 places in 32 training steps
OUTSIDE = "--algorithm.window.size 4 --algorithm.window.every 3 --algorithm.window.outside-steps 8"  # in 48
TRAINED = "--algorithm.timestep-fraction 1"
CHUNKS = f"{SAMPLER} --sampler.chunks.chunk-frames 1"
GUIDED = f"--method crd {SAMPLER} {TRAINED} --algorithm.kl-coefficient 0.1 --algorithm.kl-guidance-scale 3"
DPO = f"--method flow_dpo {SAMPLER}"
BATCH, GROUP, SAMPLER_STEPS = 64, 8, 4  # samples of a training step and of a prompt, and network calls of a sample


@dataclass(frozen=True)
class Kind:
    """One row of the table."""

    flags: str  # flags of its runs
    rollout: float  # network calls to generate a sample; one chunk's is a part of one
    # Calls to train on it, with those of an old policy, a reference or a value function; no backward pass is counted.
    trained: int
    starts_from: str = ""  # run of STARTS whose student it starts with
    prompts: int = 0  # from whose samples, eight of each and before training, pairs are made

    @property
    def calls(self) -> float:
        """Network calls per sample."""
        return self.rollout + self.trained

    @property
    def before(self) -> int:
        """Network calls before training, per sample of a training step of 64."""
        return self.prompts * GROUP * SAMPLER_STEPS // BATCH


KINDS = {
    "dance": Kind(f"{DANCE} {SAMPLER} {TRAINED} --algorithm.kernel dance", 4, 3),
    "flow": Kind(f"{DANCE} {SAMPLER} {TRAINED} --algorithm.kernel flow --algorithm.eta 0.7", 4, 3),
    "cps": Kind(f"{DANCE} {SAMPLER} {TRAINED} --algorithm.kernel cps --algorithm.eta 0.8", 4, 3),
    "window of 2": Kind(f"{DANCE} {SAMPLER} {TRAINED} --algorithm.window.size 2", 4, 2),
    # The sampler and the trained share of the recipes of real models. Calls that a group shares are counted once.
    "20 steps": Kind(f"{DANCE} {SAMPLER_20} --algorithm.timestep-fraction 0.6", 19, 11),
    "window of 4 of 20 steps": Kind(f"{DANCE} {SAMPLER_20} {SWEEP}", 13, 4),
    "window of 4, 8 calls outside": Kind(f"{DANCE} {SAMPLER_20} {OUTSIDE}", 8, 4),
    "dance_ppo": Kind(f"--method dance_ppo {SAMPLER} {TRAINED}", 4, 9),
    "diffusion_nft": Kind(f"--method diffusion_nft {SAMPLER} {TRAINED}", 4, 8),
    "awm": Kind(f"--method awm {SAMPLER} {TRAINED}", 4, 8),
    "crd": Kind(f"--method crd {SAMPLER} {TRAINED}", 4, 12),
    "crd, KL": Kind(f"{GUIDED}", 4, 20),
    "online_dpo": Kind(f"--method online_dpo {SAMPLER} {TRAINED} --algorithm.num-samples 4", 4, 4),
    "flow_dpo": Kind(f"{DPO}", 0, 2),
    "flow_dpo of own pairs": Kind(f"{DPO}", 0, 2, prompts=96),
    "flow_dpo of own pairs, 1.5e-4": Kind(f"{DPO} --student.learning-rate 1.5e-4", 0, 2, prompts=96),
    "dance on dmd2": Kind(f"{DANCE} {TRAINED}", 4, 3, starts_from="dmd2"),
    # Five chunks: four calls of each, and of all but the last one that writes the cache.
    "dance, causal": Kind(f"{DANCE} {CHUNKS} {TRAINED} --algorithm.kernel dance", 24 / 5, 3, starts_from="causal"),
    "diffusion_nft, causal": Kind(f"--method diffusion_nft {CHUNKS} {TRAINED}", 24 / 5, 8, starts_from="causal"),
    "awm, causal": Kind(f"--method awm {CHUNKS} {TRAINED}", 24 / 5, 8, starts_from="causal"),
}
# Runs that rows start from, one for all seeds: their steps, and their flags. The sampler of dmd2's is that of its rows.
STARTS = {
    "dmd2": (400, "--method dmd2"),
    "causal": (100, f"--method finetune --algorithm.forcing teacher --algorithm.shift 5 {CHUNKS}"),
}


def main(
    output: Path = Path("runs/compare_rl"),
    steps: int = 80,
    seeds: tuple[int, ...] = (0, 1, 2),
    kinds: tuple[str, ...] = tuple(KINDS),
    extra: Annotated[str, tyro.conf.arg(metavar="FLAGS")] = "",
) -> None:
    """Run what is missing, and print the table.

    Args:
        output: folder of the runs
        steps: training steps of dance; other methods get the steps that make the same number of network calls
        seeds: seeds of the runs
        kinds: rows of the table
        extra: more flags for every run, in one string: --extra="--device cpu"
    """
    rows = []
    for name in kinds:
        kind, ends = KINDS[name], []
        own = max(1, round((steps * KINDS["dance"].calls - kind.before) / kind.calls))
        flags = [*kind.flags.split(), *extra.split()]
        if kind.starts_from:
            begun, how = STARTS[kind.starts_from]
            run(output / kind.starts_from, begun, [*how.split(), *extra.split()])
            flags += ["--init-from", str(output / kind.starts_from)]
        for seed in seeds:
            pairs = own_pairs(output, kind.prompts, seed, extra.split()) if kind.prompts else []
            lines = run(output / f"{name.replace(' ', '_')}-{seed}", own, [*flags, *pairs, "--seed", str(seed)])
            ends.append(lines)
        rows.append(row(name, own, round(kind.before + own * kind.calls), ends))
    head = ["", "steps", "calls per sample", "reward before", "reward", "accuracy before", "accuracy"]
    for cells in (head, ["---"] * len(head), *rows):
        sys.stdout.write(f"| {' | '.join(cells)} |\n")


def run(folder: Path, steps: int, flags: list[str]) -> list[dict[str, float]]:
    """Finish a run if it is not, and return its first and its last validation."""
    if not finished(folder, steps):
        new = not (folder / "config.yaml").is_file()
        start = [*flags, "--output", str(folder), "--validate-every", str(steps)] if new else ["--resume", str(folder)]
        command(*start, "--steps", str(steps))
    measured = validations(folder)
    return [measured[0], measured[-1]]


def own_pairs(output: Path, prompts: int, seed: int, extra: list[str]) -> list[str]:
    """Make pairs of the start's own samples, scored by the reward, if there are none; return their flags."""
    start, rollouts, pairs = output / "start", output / f"rollouts-{seed}", output / f"pairs-{seed}"
    run(start, 1, [*DPO.split(), "--student.learning-rate", "0", *extra])
    if not pairs.is_dir():
        drawn = random.Random(seed).sample(training_captions(), prompts)
        asked = ["--prompts", *drawn, "--num-samples", str(GROUP), "--seed", str(seed * 10**6), "--batch", str(BATCH)]
        command("rollout", str(start), *asked, "--output", str(rollouts))
        command("preprocess", str(rollouts), str(pairs), "--pairs", "run")
    return ["--data.path", str(pairs / "preferred"), "--data.rejected", str(pairs / "rejected")]


def command(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "unified_trainer", *words], check=True)


def finished(folder: Path, steps: int) -> bool:
    return any(line["step"] == steps for line in validations(folder))


def validations(folder: Path) -> list[dict[str, float]]:
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return [line for line in lines if "validation/reward" in line]


def row(name: str, steps: int, calls: int, ends: list[list[dict[str, float]]]) -> list[str]:
    """Return the cells of a row: mean and standard deviation over the seeds, before and after training."""
    cells = [name, str(steps), str(calls)]
    for metric in ("reward", "accuracy"):
        for when in (0, 1):
            values = [pair[when][f"validation/{metric}"] for pair in ends]
            spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.3f}{spread}")
    return cells


if __name__ == "__main__":
    tyro.cli(main)
