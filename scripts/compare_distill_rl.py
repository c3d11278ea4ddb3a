"""This script compares distillation and reward in one run with one after the other, in the tiny world.

    python scripts/compare_distill_rl.py --seeds 0 1 2
    python scripts/compare_distill_rl.py --kinds hackable --picture docs/images/distill_rl.png

It prints markdown tables of what is there after it ran what is missing. A finished run is not repeated, and a stopped
one is resumed. Runs of one seed share their distilled student.
"""

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

CLIP_TOKENS = 80  # latent tokens of a clip of the tiny world: 5 latent frames of 4 x 4
ROLLOUT = 64  # samples of a training step that learns from rewards
DANCE_STEPS = 20  # of plain dance_grpo; they set the calls that every plain row has after its start
Line = dict[str, float]


@dataclass(frozen=True)
class Kind:
    """One kind of run, of which there is one for each seed."""

    flags: str
    steps: int
    start: str = ""  # the kind whose student and critic it starts from
    validate_every: int = 0  # 0: at the end only
    further: int = 0  # added to the seed of the run, and not to that of its start


# Network calls of a training step, each of a whole clip; a backward pass is not counted. dance_grpo makes four calls
# for a sample and trains three transitions; distill_rl adds a call of the student, one of the critic and two of the
# teacher, and one to teach the critic. dmd2 makes 3.5 for the critic, and in every fifth step 5.5 for the student.
DANCE, JOINT, TILTED, GRADIENT = 7 * ROLLOUT, 12 * ROLLOUT, 9 * ROLLOUT, 4 * ROLLOUT
DMD2_STEPS, DMD2 = 400, 4.6 * 32
CHAIN = f"--method dance_grpo --recipe {Path(__file__).with_name('two_steps.yaml')}"
VIVID = "--reward.scorers.saturation.weight 200 --student.learning-rate 3e-4"
RATE, MATCHING = "--student.learning-rate", "--algorithm.matching.weight"
TILT = "--method distill_rl --algorithm.surrogate.weight 0 --algorithm.matching.weight 1 --algorithm.tilt.beta 0.25"
BY_GRADIENT = f"--method reward_gradient --algorithm.batch-size {ROLLOUT}"
CAUSAL = (
    "--sampler.num-steps 4 --sampler.shift 5 --sampler.solver sde --sampler.guidance-scale 1 "
    "--sampler.chunks.chunk-frames 1"
)
CHOSEN = {"dance": "1.5e-4", "joint": "3e-4", "tilt": "3e-4", "gradient": "1e-4"}  # learning rates, by `tune`


def steps(calls: float, share: float = 1.0) -> int:
    """Return the training steps of this many calls that make a share of those of plain dance_grpo."""
    return round(share * DANCE_STEPS * DANCE / calls)


STARTS = {
    "dmd2": Kind("--method dmd2", DMD2_STEPS),
    "causal": Kind(f"--method finetune --algorithm.forcing teacher --algorithm.shift 5 {CAUSAL}", 100),
    "self_forcing": Kind("--method self_forcing", 200, "causal"),
}
PLAIN = {
    "dmd2, then dance_grpo": Kind(f"{CHAIN} {RATE} {CHOSEN['dance']}", DANCE_STEPS, "dmd2"),
    "joint from dmd2": Kind(f"--method distill_rl {RATE} {CHOSEN['joint']}", steps(JOINT), "dmd2"),
    "critic tilt": Kind(f"{TILT} {RATE} {CHOSEN['tilt']}", steps(TILTED), "dmd2"),
    "dmd2, then reward_gradient": Kind(f"{BY_GRADIENT} {RATE} {CHOSEN['gradient']}", steps(GRADIENT), "dmd2"),
    "self_forcing, then dance_grpo": Kind(f"{CHAIN} {RATE} {CHOSEN['dance']}", 12, "self_forcing"),
    "joint from self_forcing": Kind(f"--method distill_rl {RATE} {CHOSEN['joint']}", 8, "self_forcing"),
    "joint from the base": Kind(
        f"--method distill_rl {RATE} {CHOSEN['joint']}", steps(JOINT) + round(DMD2_STEPS * DMD2 / JOINT)
    ),
}
HACKABLE = {"chain": Kind(f"{CHAIN} {VIVID}", 16, "dmd2", validate_every=4)} | {
    f"joint {weight}": Kind(f"--method distill_rl {VIVID} {MATCHING} {weight}", 16, "dmd2", validate_every=4)
    for weight in ("0.05", "0.01", "0.02", "0.005")
}
RATES = {  # flags without a learning rate, calls of a step, and the rates that are tried
    "dance": (CHAIN, DANCE, ("1.5e-4", "3e-4")),
    "joint": ("--method distill_rl", JOINT, ("1.5e-4", "3e-4")),
    "tilt": (TILT, TILTED, ("1.5e-4", "3e-4")),
    "gradient": (BY_GRADIENT, GRADIENT, ("3e-5", "1e-4")),
}
TUNE = {  # half as many calls, from the same distilled student, with other prompts and noise than any reported run
    f"tune {name} {rate}": Kind(f"{flags} {RATE} {rate}", steps(calls, 0.5), "dmd2", further=100)
    for name, (flags, calls, rates) in RATES.items()
    for rate in rates
}
TABLES = {"hackable": HACKABLE, "plain": PLAIN, "tune": TUNE}
EQUAL = 8  # training steps of the chain, of two updates each, whose reward the joint runs are compared at
COLUMNS = ("reward", "reward/hpsv3", "accuracy", "frechet", "pixels/diversity", "reward_hacking")


def main(
    output: Path = Path("runs/compare_distill_rl"),
    seeds: tuple[int, ...] = (0, 1, 2),
    tables: tuple[str, ...] = ("hackable", "plain"),
    kinds: tuple[str, ...] = (),
    run: bool = True,
    picture: Path | None = None,
    extra: Annotated[str, tyro.conf.arg(metavar="FLAGS")] = "",
) -> None:
    """Run what is missing, seed by seed, and print the tables.

    Args:
        output: folder of the runs
        seeds: seeds of the runs
        tables: tables to print: hackable, plain, tune (learning rates; one seed is enough)
        kinds: rows to run and to print; all by default
        run: --no-run only prints the rows of which at least one seed has finished
        picture: picture to write of reward against Frechet distance, of the first seed
        extra: more flags for every run, in one string: --extra="--device cpu"
    """
    chosen = {name: {k: v for k, v in TABLES[name].items() if not kinds or k in kinds} for name in tables}
    if run:
        for seed in seeds:
            for table in chosen.values():
                for name, kind in table.items():
                    finish(output, name, kind, seed, extra)
    for name, table in chosen.items():
        sys.stdout.write(f"\n{name}\n\n")
        for cells in TABLE_OF[name](output, table, seeds):
            sys.stdout.write(f"| {' | '.join(cells)} |\n")
    if picture is not None:
        draw(picture, output, chosen["hackable"], seeds[0])


def folder_of(output: Path, name: str, seed: int) -> Path:
    return output / f"{name.replace(', then ', '-').replace(' ', '_')}-{seed}"


def finish(output: Path, name: str, kind: Kind, seed: int, extra: str = "") -> None:
    """Finish a run, and those that it starts from, if they are not finished."""
    if kind.start:
        finish(output, kind.start, STARTS[kind.start], seed, extra)
    folder = folder_of(output, name, seed)
    if finished(folder, kind):
        return
    words = ["--resume", str(folder)]
    if not (folder / "config.yaml").is_file():
        start = ["--init-from", str(folder_of(output, kind.start, seed))] if kind.start else []
        words = [
            *kind.flags.split(),
            *start,
            *extra.split(),
            "--seed",
            str(seed + kind.further),
            "--output",
            str(folder),
        ]
        words += ["--validation.num-samples", "192", "--checkpoint-every", "0"]
        words += ["--validate-every", str(kind.validate_every or kind.steps)]
    command = [sys.executable, "-m", "unified_trainer", *words, "--steps", str(kind.steps)]
    subprocess.run(command, check=True)


def finished(folder: Path, kind: Kind) -> bool:
    return any(line["step"] == kind.steps for line in validations(folder))


def reached(folder: Path, step: int) -> bool:
    return any(line["step"] >= step for line in validations(folder))


def lines_of(folder: Path) -> list[Line]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def validations(folder: Path) -> list[Line]:
    return [line for line in lines_of(folder) if "validation/reward" in line]


def calls_until(output: Path, name: str, kind: Kind, seed: int, step: int) -> float:
    """Return the network calls of a run up to a step and of those it starts from, by the tokens that were counted.

    A call is one pass of a whole clip through a network of any role.
    """
    before = 0.0
    if kind.start:
        start = STARTS[kind.start]
        before = calls_until(output, kind.start, start, seed, start.steps)
    lines = [line for line in lines_of(folder_of(output, name, seed)) if "train/seconds" in line]
    tokens = sum(line["train/tokens_per_second"] * line["train/seconds"] for line in lines if line["step"] <= step)
    return before + tokens / CLIP_TOKENS


def plain_table(output: Path, table: dict[str, Kind], seeds: tuple[int, ...]) -> list[list[str]]:
    """Return a row for each kind, after the distilled students: the last validation, mean and spread over the seeds."""
    rows = [["", "seeds", "steps", "calls / 1000", *COLUMNS]]
    rows.append(["---"] * len(rows[0]))
    for name, kind in ({name: STARTS[name] for name in ("dmd2", "self_forcing")} | table).items():
        there = [seed for seed in seeds if finished(folder_of(output, name, seed), kind)]
        if there:
            ends = [validations(folder_of(output, name, seed))[-1] for seed in there]
            calls = [calls_until(output, name, kind, seed, kind.steps) / 1000 for seed in there]
            rows.append([name, " ".join(map(str, there)), str(kind.steps), spread(calls, 1), *cells(ends)])
    return rows


def hackable_table(output: Path, table: dict[str, Kind], seeds: tuple[int, ...]) -> list[list[str]]:
    """Return rows for the chain after 16 and 32 updates, and for each joint run nearest to the first one's reward.

    `excess` is the Frechet distance above that of the distilled student, over the chain's at that reward.
    """
    rows = [["", "seeds", "updates", "calls after the start / 1000", *COLUMNS, "excess"]]
    rows.append(["---"] * len(rows[0]))
    chain = HACKABLE["chain"]
    done = [seed for seed in seeds if finished(folder_of(output, "chain", seed), chain)]
    for name, kind in table.items():
        for at in (0, EQUAL, kind.steps) if name == "chain" else (EQUAL, kind.steps):
            there = [seed for seed in done if reached(folder_of(output, name, seed), at)]
            if not there:
                continue
            found, calls, excess = [], [], []
            for seed in there:
                lines = validations(folder_of(output, name, seed))
                target = at_step(validations(folder_of(output, "chain", seed)), EQUAL)
                line = at_step(lines, at) if name == "chain" or at == kind.steps else nearest(lines, target)
                step = int(line["step"])
                start = calls_until(output, kind.start, STARTS[kind.start], seed, STARTS[kind.start].steps)
                calls.append((calls_until(output, name, kind, seed, step) - start) / 1000)
                base = lines[0]["validation/frechet"]
                excess.append((line["validation/frechet"] - base) / (target["validation/frechet"] - base))
                found.append(line)
            updates = " ".join(str(2 * int(line["step"])) for line in found)
            of_chain = {0: "start", EQUAL: "16 updates", kind.steps: "32 updates"}[at]
            label = f"{name}, {of_chain if name == 'chain' else 'nearest reward' if at == EQUAL else 'end'}"
            seeds_there = " ".join(map(str, there))
            rows.append([label, seeds_there, updates, spread(calls, 1), *cells(found), spread(excess, 2)])
    return rows


TABLE_OF = {"hackable": hackable_table, "plain": plain_table, "tune": plain_table}


def at_step(lines: list[Line], step: int) -> Line:
    return next(line for line in lines if line["step"] == step)


def nearest(lines: list[Line], target: Line) -> Line:
    """Return the validation whose reward is nearest to the target's."""
    return min(lines, key=lambda line: abs(line["validation/reward"] - target["validation/reward"]))


def cells(lines: list[Line]) -> list[str]:
    """Return mean and spread of each column over the runs; empty where it was not measured."""
    found = []
    for name in COLUMNS:
        values = [line[f"validation/{name}"] for line in lines if f"validation/{name}" in line]
        found.append(spread(values, 2) if values else "")
    return found


def spread(values: list[float], digits: int) -> str:
    """Return the mean, and Bessel's standard deviation of several values."""
    apart = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{apart}"


def draw(picture: Path, output: Path, table: dict[str, Kind], seed: int) -> None:
    """Plot reward against Frechet distance during the runs of one seed, a curve for each matching weight."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, place = plt.subplots(figsize=(6, 4), layout="constrained")
    for name in table:
        lines = validations(folder_of(output, name, seed))
        if lines:
            x, y = ([line[f"validation/{key}"] for line in lines] for key in ("frechet", "reward"))
            label = "no matching (dance_grpo)" if name == "chain" else f"matching weight {name.split()[1]}"
            place.plot(x, y, marker="o", label=label)
    place.set(xlabel="Fréchet distance to real clips", ylabel="reward, HPSv3 + 200 saturation", xscale="log")
    ticks = (3, 5, 10, 20, 40, 80)
    place.set_xticks(ticks, map(str, ticks))
    place.minorticks_off()
    place.legend(fontsize=8)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    tyro.cli(main)
