"""This script makes a measured table of the docs again, from a file that says what is compared.

    python scripts/compare.py scripts/comparisons/rewards.toml             # run what is missing, write the table
    python scripts/compare.py scripts/comparisons/rewards.toml --no-run    # write the table of what has finished

The protocol: settings are chosen on the tuning seeds, with prompts of the training set, and reported on other seeds,
with held-out prompts. Each seed has its own noise for at least 512 samples, equal for all arms. Compute is counted in
FLOPs of forward and backward passes, as runs log them; an arm without `steps` takes the steps that the budget pays for.
Intervals are over seeds and prompts (scripts/intervals.py). A claim whose interval holds zero is written as a tie.

A finished run is kept by a digest of its settings, and a stopped one is resumed. Seeds are run one after the other, so
that a table of few seeds is there early; it says how many there are.
"""

import csv
import dataclasses
import datetime
import hashlib
import itertools
import json
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import torch
import tyro
from intervals import Estimate, of_table

from unified_trainer.data.prompts import training_captions, validation_captions

SAMPLES, BATCH = 512, 48  # of each seed, at least; of a batch
PROMPTS = 48  # each subject of the tiny world in one phrasing
PROBED = 5  # training steps whose FLOPs say how many a budget pays for; dmd2 trains its student in every fifth
REPO = Path(__file__).resolve().parents[1]
Values = dict[str, torch.Tensor]  # by measure: of a seed, [prompts], or [1] where a measure is of all samples together


@dataclass(frozen=True)
class Arm:
    """One row of the table: how its student is trained, and sampled."""

    flags: str = ""  # of the run; empty for a model that is not trained
    model: str = ""  # that model, as `evaluate` names it
    start: str = ""  # arm whose run of the same seed gives the first weights
    steps: int = 0  # training steps; 0: as many as the compute pays for
    compute: float = 0.0  # FLOPs after the start, in place of those of the comparison
    sampled: str = ":ema"  # after the run's name for `evaluate`: weights, and settings of the sampler
    tune: dict[str, list[str]] = field(default_factory=dict)  # values that are tried of each flag
    shown: bool = True  # whether it is a row, or only a start of others


@dataclass(frozen=True)
class Claim:
    """One arm has a higher value of a measure than another."""

    measure: str
    higher: str
    lower: str


@dataclass(frozen=True)
class Tuning:
    """Which seeds choose among the values of `tune`, by the highest or the lowest mean of a measure."""

    seeds: list[int]
    highest: str = ""
    lowest: str = ""


@dataclass(frozen=True)
class Comparison:
    """The content of a file of scripts/comparisons."""

    name: str
    page: str  # of the docs, with the marks between which the table is written
    seeds: list[int]
    measures: dict[str, int]  # columns, with their decimals
    arms: dict[str, Arm]
    claims: list[Claim]
    compute: float = 0.0
    extra: str = ""  # flags of all runs
    evaluate: str = ""  # flags of `evaluate`
    tuning: Tuning | None = None

    @staticmethod
    def read(file: Path) -> "Comparison":
        """Read a file; ValueError names what does not fit."""
        given = tomllib.loads(file.read_text(encoding="utf-8"))
        arms = {name: Arm(**arm) for name, arm in given.pop("arms").items()}
        claims = [Claim(**claim) for claim in given.pop("claims", [])]
        tuning = Tuning(**given.pop("tuning")) if "tuning" in given else None
        read = Comparison(name=file.stem, arms=arms, claims=claims, tuning=tuning, **given)
        read.check(file)
        return read

    def check(self, file: Path) -> None:
        """Raise ValueError for a name of no arm, for an arm without an end, and for a seed that tunes and reports."""
        for name in (*(arm.start for arm in self.arms.values() if arm.start), *self._claimed()):
            if name not in self.arms:
                raise ValueError(f"{file}: {name} is no arm; have {', '.join(self.arms)}")
        for name, arm in self.arms.items():
            if bool(arm.flags) == bool(arm.model):
                raise ValueError(f"{file}: arms.{name} needs flags, or the model that is not trained")
            if arm.flags and not (arm.steps or arm.compute or self.compute):
                raise ValueError(f"{file}: arms.{name} needs steps, or the comparison compute")
            if arm.tune and self.tuning is None:
                raise ValueError(f"{file}: arms.{name}.tune needs the seeds of [tuning]")
        for claim in self.claims:
            if claim.measure not in self.measures:
                raise ValueError(f"{file}: a claim names {claim.measure}; have {', '.join(self.measures)}")
        if self.tuning is not None and (both := {*self.seeds} & {*self.tuning.seeds}):
            raise ValueError(f"{file}: the seeds {sorted(both)} tune and report")

    def _claimed(self) -> list[str]:
        return [name for claim in self.claims for name in (claim.higher, claim.lower)]


@dataclass(frozen=True)
class Training:
    """A run, finished or not: its folder is named by a digest of all that its result depends on."""

    words: tuple[str, ...]
    seed: int
    steps: int
    start: "Training | None"
    root: Path

    @property
    def folder(self) -> Path:
        files = [word for word in self.words if (REPO / word).is_file()]
        known = [self.words, self.seed, self.steps, self.start and self.start.folder.name]
        known += [(REPO / name).read_text(encoding="utf-8") for name in files]
        digest = hashlib.blake2b(json.dumps(known).encode(), digest_size=5).hexdigest()
        method = Path(self.words[self.words.index("--method") + 1]).name.replace(":", "_")
        return self.root / f"{method}-{digest}-{self.seed}"

    @property
    def finished(self) -> bool:
        return (self.folder / "checkpoints" / f"step_{self.steps}").is_dir()

    def finish(self) -> None:
        """Run it, and those that it starts from, if they have not finished."""
        if self.start is not None:
            self.start.finish()
        if self.finished:
            return
        words = ["--resume", str(self.folder)]
        if not (self.folder / "config.yaml").is_file():
            begin = ["--init-from", str(self.start.folder)] if self.start is not None else []
            words = [*self.words, *begin, "--seed", str(self.seed), "--output", str(self.folder)]
            words += ["--validate-every", "0", "--checkpoint-every", "0"]
        command(*words, "--steps", str(self.steps))

    def flops(self) -> float:
        """Return the FLOPs of its networks, forward and backward, with those of its start."""
        before = self.start.flops() if self.start is not None else 0.0
        return before + sum(line["train/model_flops_per_second"] * line["train/seconds"] for line in self.lines())

    def lines(self) -> list[dict[str, float]]:
        lines = map(json.loads, (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        return [line for line in lines if "train/seconds" in line]

    def commits(self) -> set[str]:
        """Return the commits that it ran at, a + after those with changes, and those of its start."""
        starts = map(json.loads, (self.folder / "environment.jsonl").read_text(encoding="utf-8").splitlines())
        own = {start["git"]["commit"][:8] + "+" * start["git"]["dirty"] for start in starts}
        return own | (self.start.commits() if self.start is not None else set())


class Bench:
    """Runs and evaluates the arms of a comparison below one folder."""

    def __init__(self, comparison: Comparison, root: Path, *, run: bool) -> None:
        self.comparison, self.root, self.run = comparison, root, run
        self.chosen: dict[str, str] = {}  # flags that tuning chose, by arm

    def training(self, name: str, seed: int, tried: str | None = None) -> Training:
        """Return the run of an arm and a seed; `tried` are flags in place of those that tuning chose."""
        arm = self.comparison.arms[name]
        flags = f"{arm.flags} {self.comparison.extra} {self.chosen.get(name, '') if tried is None else tried}"
        start = self.training(arm.start, seed) if arm.start else None
        return Training(tuple(flags.split()), seed, arm.steps or self.paid(name), start, self.root)

    def paid(self, name: str) -> int:
        """Return the training steps that the compute pays for: measured on a few, whose weights are not used."""
        arm = self.comparison.arms[name]
        first = dataclasses.replace(self.comparison.arms[name], steps=PROBED)
        seed, words = self.comparison.seeds[0], tuple(f"{first.flags} {self.comparison.extra}".split())
        start = self.training(arm.start, seed) if arm.start else None
        probe = Training(words, seed, PROBED, start, self.root)
        if self.run:
            probe.finish()
        if not probe.finished:
            raise Missing
        flops = sum(line["train/model_flops_per_second"] * line["train/seconds"] for line in probe.lines())
        return max(1, round((arm.compute or self.comparison.compute) * PROBED / flops))

    def tune(self) -> None:
        """Choose the flags of each arm whose `tune` has several, by runs of the tuning seeds."""
        tuning = self.comparison.tuning
        for name, arm in self.comparison.arms.items():
            if arm.tune and tuning is not None:
                ways = itertools.product(*arm.tune.values())
                tried = [" ".join(f"{flag} {value}" for flag, value in zip(arm.tune, way, strict=True)) for way in ways]
                measure = tuning.highest or tuning.lowest
                means = [
                    sum(float(self.values(name, seed, way)[measure].mean()) for seed in tuning.seeds) for way in tried
                ]
                best = max(means) if tuning.highest else min(means)
                self.chosen[name] = tried[means.index(best)]

    def values(self, name: str, seed: int, tried: str | None = None) -> Values:
        """Return the measures of an arm's samples for one seed; Missing if they are not there and nothing may run."""
        arm = self.comparison.arms[name]
        if arm.flags:
            training = self.training(name, seed, tried)
            if self.run:
                training.finish()
            if not training.finished:
                raise Missing
            checkpoint, label = f"{training.folder}{arm.sampled}", f"{training.folder.name}{arm.sampled}"
        else:
            checkpoint, label = arm.model, f"{arm.model}-{seed}"
        folder = self.root / "evaluations" / re.sub(r"[^\w.=-]+", "_", label) / ("tuning" if tried else "reported")
        if self.run:
            self._evaluate(checkpoint, seed, folder, training_captions()[:PROMPTS] if tried else None)
        return read_values(folder)

    def _evaluate(self, checkpoint: str, seed: int, folder: Path, prompts: tuple[str, ...] | None) -> None:
        """Make and measure samples, unless all measures are there."""
        if self.comparison.measures.keys() <= measures_of(folder).keys():
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        lines = folder.with_name(f"{folder.name}.txt")
        lines.write_text("\n".join(prompts or validation_captions(PROMPTS)) + "\n", encoding="utf-8")
        words = [checkpoint, "--prompts", str(lines), "--samples", str(-(-SAMPLES // PROMPTS)), "--seeds", str(seed)]
        words += ["--batch", str(BATCH), "--recipe", "tiny"]  # the recipe of models that are not of a run
        words += ["--resamples", "10", "--output", str(folder)]  # its intervals are not read
        command("evaluate", *words, *self.comparison.evaluate.split())
        if absent := self.comparison.measures.keys() - (measured := measures_of(folder)).keys():
            raise ValueError(f"evaluate measured no {', '.join(absent)}; have {', '.join(measured)}")


class Missing(Exception):
    """A run or its samples are not there."""


def command(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "unified_trainer", *words], check=True, cwd=REPO)


def measures_of(folder: Path) -> dict[str, float]:
    """Return the measures of an evaluation of one checkpoint by their names; empty if there is none."""
    if not (folder / "evaluation.json").is_file():
        return {}
    measures = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))["measures"]
    return {name: one["mean"] for name, by in measures.items() for one in by.values()}


def read_values(folder: Path) -> Values:
    """Return the measures of an evaluation of one checkpoint, by prompt where they are means over samples."""
    whole = measures_of(folder)
    if not whole:
        raise Missing
    values = {name: torch.tensor([mean], dtype=torch.float64) for name, mean in whole.items()}
    with (folder / "samples.csv").open(encoding="utf-8", newline="") as rows:
        samples = list(csv.DictReader(rows))
    prompts = list(dict.fromkeys(row["prompt"] for row in samples))
    for name in whole.keys() & samples[0].keys():
        sums = dict.fromkeys(prompts, 0.0)
        for row in samples:
            sums[row["prompt"]] += float(row[name])
        values[name] = torch.tensor([sums[prompt] for prompt in prompts]).double() * len(prompts) / len(samples)
    return values


def estimate(values: list[Values], measure: str) -> Estimate:
    """Return the mean of a measure over seeds, with its interval."""
    return of_table(torch.stack([of_seed[measure] for of_seed in values]))


def verdict(claim: Claim, ends: dict[str, dict[int, Values]], decimals: int) -> str:
    """Return what the seeds that both arms have say of a claim, as a sentence."""
    seeds = sorted(ends[claim.higher].keys() & ends[claim.lower].keys())
    names = f"`{claim.higher}` against `{claim.lower}`, {claim.measure}"
    if len(seeds) < 2:
        return f"{names}: not measured, fewer than two seeds have both."
    pairs = [(ends[claim.higher][seed][claim.measure], ends[claim.lower][seed][claim.measure]) for seed in seeds]
    difference = of_table(torch.stack([higher - lower for higher, lower in pairs]))
    said = shown(difference, decimals)
    if difference.holds_zero:
        return f"{names}: a tie, the interval of the difference holds zero: {said}."
    return f"{names}: {'higher' if difference.low > 0 else '**the claim fails**, it is lower'}, by {said}."


def shown(value: Estimate, decimals: int) -> str:
    """Return a mean with its interval."""
    mean, low, high = (number(each, decimals) for each in (value.mean, value.low, value.high))
    return f"{mean} [{low}, {high}]" if value.low == value.low else mean


def number(value: float, decimals: int) -> str:
    """Return a number as the docs write it: .05, -.2, 1.50."""
    text = f"{value:.{decimals}f}"
    return re.sub(r"^(-?)0\.", r"\1.", text)


def table(bench: Bench, ends: dict[str, dict[int, Values]], command_line: str, date: str) -> str:
    """Return the Markdown: rows, claims, and how they were measured."""
    comparison, commits = bench.comparison, set[str]()
    rows = [["", "seeds", "steps", "TFLOP", *comparison.measures], ["---"] * (4 + len(comparison.measures))]
    for name, arm in comparison.arms.items():
        if not arm.shown or not ends[name]:
            continue
        trainings = [bench.training(name, seed) for seed in ends[name]] if arm.flags else []
        commits |= set[str]().union(*(training.commits() for training in trainings))
        flops = sum(training.flops() for training in trainings) / max(1, len(trainings))
        cost = [str(trainings[0].steps), number(flops / 1e12, 2)] if trainings else ["", ""]
        label = f"`{name}`" + (f", `{bench.chosen[name]}`" if name in bench.chosen else "")
        values = list(ends[name].values())
        cells = [shown(estimate(values, each), decimals) for each, decimals in comparison.measures.items()]
        rows.append([label, str(len(values)), *cost, *cells])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    absent = [f"`{name}`" for name, arm in comparison.arms.items() if arm.shown and not ends[name]]
    absences = [f"Not run yet: {', '.join(absent)}."] if absent else []
    said = [verdict(claim, ends, comparison.measures[claim.measure]) for claim in comparison.claims]
    tuned = "nothing was tuned for a row"
    if comparison.tuning is not None:
        tuned = f"settings chosen on the seeds {', '.join(map(str, comparison.tuning.seeds))} and training prompts"
    at = f"commit {', '.join(sorted(commits))}" if commits else "no training"
    how = (
        f"`{command_line}`, {date}, {at}. Brackets are 95% "
        f"intervals over seeds and prompts; the seeds are {', '.join(map(str, comparison.seeds))} as far as a row has "
        f"them; {-(-SAMPLES // PROMPTS) * PROMPTS} samples of {PROMPTS} held-out prompts and noise of its own for each "
        f"seed; FLOPs of all networks, forward and backward, with those of the start; {tuned}."
    )
    return "\n".join([*lines, "", *(f"- {line}" for line in [*said, *absences]), "", how])


def around(page: Path, name: str) -> tuple[str, str]:
    """Return a page before and after the table of a comparison; ValueError if it has no marks for it."""
    begin, end = (f"<!-- {mark} scripts/comparisons/{name}.toml -->" for mark in ("table of", "end of"))
    before, *rest = page.read_text(encoding="utf-8").split(begin)
    if len(rest) != 1 or end not in rest[0]:
        raise ValueError(f"{page}: needs the lines {begin} and {end}, once, where the table shall stand")
    return before + begin, end + rest[0].partition(end)[2]


def main(file: Path, output: Path = Path("runs/compare"), arms: tuple[str, ...] = (), *, run: bool = True) -> None:
    """Run what is missing, seed by seed, and write the table.

    Args:
        file: the comparison, a file of scripts/comparisons
        output: folder of the runs, which comparisons share
        arms: rows to run now, with their starts; by default all
        run: --no-run only writes the table of what has finished
    """
    comparison = Comparison.read(file)
    page = REPO / comparison.page
    around(page, comparison.name)  # before anything is run
    bench = Bench(comparison, output.resolve(), run=run)
    bench.tune()
    ends: dict[str, dict[int, Values]] = {name: {} for name in comparison.arms}
    for seed, (name, arm) in itertools.product(comparison.seeds, comparison.arms.items()):
        if arm.shown:
            bench.run = run and (not arms or name in arms)
            try:
                ends[name][seed] = bench.values(name, seed)
            except Missing:
                continue
    bench.run = False
    text = table(bench, ends, f"python scripts/compare.py scripts/comparisons/{file.name}", f"{datetime.date.today()}")
    page.write_text(f"\n{text}\n".join(around(page, comparison.name)), encoding="utf-8")
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    tyro.cli(main)
