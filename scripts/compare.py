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
import datetime
import hashlib
import itertools
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
import tyro
from comparison_table import Claim, Row, Values, around, markdown

from unified_trainer.data.prompts import training_captions, validation_captions
from unified_trainer.data.tiny_world import PHRASINGS

SAMPLES, BATCH = 512, 48  # of each seed, at least; of a batch
PROMPTS = 48  # each subject of the tiny world in one phrasing
PROBED = 5  # training steps whose FLOPs say how many a budget pays for; dmd2 trains its student in every fifth
OF_TRAINING = "train/"  # first word of the measures that are metrics of the training steps
REPO = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Arm:
    """One row of the table: how its student is trained, and sampled."""

    flags: str = ""  # of the run; empty for a model that is not trained
    model: str = ""  # that model, as `evaluate` names it
    run_of: str = ""  # arm whose runs are sampled, in place of flags
    start: str = ""  # arm whose run of the same seed gives the first weights
    steps: int = 0  # training steps; 0: as many as the compute pays for
    compute: float = 0.0  # FLOPs after the start, in place of those of the comparison
    sampled: str = ":ema"  # after the run's name for `evaluate`: weights, and settings of the sampler
    tune: dict[str, list[str]] = field(default_factory=dict)  # values that are tried of each flag
    shown: bool = True  # whether it is a row, or only a start of others


@dataclass(frozen=True)
class Tuning:
    """Which seeds choose among the values of `tune`, by the highest or the lowest mean of a measure."""

    seeds: list[int]
    highest: str = ""
    lowest: str = ""

    @property
    def measure(self) -> str:
        """The measure, which `highest` or `lowest` names."""
        return self.highest or self.lowest


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
        for name in self._named():
            if name and name not in self.arms:
                raise ValueError(f"{file}: {name} is no arm; have {', '.join(self.arms)}")
        for name, arm in self.arms.items():
            if sum(map(bool, (arm.flags, arm.model, arm.run_of))) != 1:
                raise ValueError(f"{file}: arms.{name} needs one of flags, model and run_of")
            if arm.flags and not (arm.steps or arm.compute or self.compute):
                raise ValueError(f"{file}: arms.{name} needs steps, or the comparison compute")
            if any(not self.arms[other].flags for other in (arm.start, arm.run_of) if other):
                raise ValueError(f"{file}: arms.{name} begins with, or samples, an arm that is not trained")
            if arm.tune and self.tuning is None:
                raise ValueError(f"{file}: arms.{name}.tune needs the seeds of [tuning]")
        for claim in self.claims:
            if not (self.arms[claim.higher].shown and self.arms[claim.lower].shown):
                raise ValueError(f"{file}: a claim names {claim.higher} and {claim.lower}: both must be shown")
            if claim.measure not in self.measures:
                raise ValueError(f"{file}: a claim names {claim.measure}; have {', '.join(self.measures)}")
        if self.tuning is not None:
            if both := {*self.seeds} & {*self.tuning.seeds}:
                raise ValueError(f"{file}: the seeds {sorted(both)} tune and report")
            if bool(self.tuning.highest) == bool(self.tuning.lowest) or self.tuning.measure not in self.measures:
                raise ValueError(f"{file}: [tuning] needs highest or lowest, one of {', '.join(self.measures)}")

    def _named(self) -> Iterator[str]:
        """Yield every name of an arm that the file uses; "" for none."""
        for arm in self.arms.values():
            yield from (arm.start, arm.run_of)
        for claim in self.claims:
            yield from (claim.higher, claim.lower)


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
        files = [(REPO / word).read_text(encoding="utf-8") for word in self.words if (REPO / word).is_file()]
        start = self.start.folder.name if self.start is not None else ""
        method = Path(self.words[self.words.index("--method") + 1]).name.replace(":", "_")
        return self.root / f"{method}-{digest(self.words, self.steps, start, files)}-{self.seed}"

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
        """Return the FLOPs of its networks, forward and backward, after the start."""
        return sum(line["train/model_flops_per_second"] * line["train/seconds"] for line in self.lines())

    def all_flops(self) -> float:
        """Return its FLOPs with those of its start."""
        return self.flops() + (self.start.all_flops() if self.start is not None else 0.0)

    def lines(self) -> list[dict[str, float]]:
        lines = map(json.loads, (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        return [line for line in lines if "train/seconds" in line]

    def means(self, measures: Iterable[str]) -> Values:
        """Return the means over its training steps of those of the measures that are metrics of training."""
        logged = {name: [line[name] for line in self.lines()] for name in measures if name.startswith(OF_TRAINING)}
        return {name: torch.tensor([sum(values) / len(values)]).double() for name, values in logged.items()}

    def commits(self) -> set[str]:
        """Return the commits that it ran at, a + after those with changes, and those of its start."""
        starts = map(json.loads, (self.folder / "environment.jsonl").read_text(encoding="utf-8").splitlines())
        own = {start["git"]["commit"][:8] + "+" * start["git"]["dirty"] for start in starts}
        return own | (self.start.commits() if self.start is not None else set())


class Bench:
    """Runs and evaluates the arms of a comparison below one folder."""

    def __init__(self, comparison: Comparison, root: Path, *, run: bool) -> None:
        self.comparison, self.root, self.run = comparison, root, run
        self.tuned: dict[str, str] = {}  # flags that tuning chose, by arm

    def training(self, name: str, seed: int, tried: str | None = None) -> Training:
        """Return the run of an arm and a seed; `tried` are flags in place of those that tuning chooses."""
        name = self.comparison.arms[name].run_of or name
        arm = self.comparison.arms[name]
        return self._training(name, seed, arm.steps or self._paid(name), self.chosen(name) if tried is None else tried)

    def chosen(self, name: str) -> str:
        """Return the flags of an arm that have the best mean over the tuning seeds; "" if nothing is tuned."""
        arm, tuning = self.comparison.arms[name], self.comparison.tuning
        if not arm.tune or tuning is None:
            return ""
        if name not in self.tuned:
            ways = itertools.product(*arm.tune.values())
            tried = [" ".join(f"{flag} {value}" for flag, value in zip(arm.tune, way, strict=True)) for way in ways]
            totals = [self._total(name, way, tuning) for way in tried]
            self.tuned[name] = tried[totals.index(max(totals) if tuning.highest else min(totals))]
        return self.tuned[name]

    def _total(self, name: str, tried: str, tuning: Tuning) -> float:
        return sum(float(self.values(name, seed, tried)[tuning.measure].mean()) for seed in tuning.seeds)

    def values(self, name: str, seed: int, tried: str | None = None) -> Values:
        """Return the measures of an arm's samples for one seed; Missing if they are not there and nothing may run."""
        arm, of_training = self.comparison.arms[name], Values()
        checkpoint = arm.model
        if not arm.model:
            training = self.training(name, seed, tried)
            if self.run:
                training.finish()
            if not training.finished:
                raise Missing
            checkpoint, of_training = f"{training.folder}{arm.sampled}", training.means(self.comparison.measures)
        prompts = validation_captions(PROMPTS) if tried is None else training_captions()[:: len(PHRASINGS) - 1]
        return self._evaluated(checkpoint, prompts, seed) | of_training

    def _training(self, name: str, seed: int, steps: int, more: str = "") -> Training:
        arm = self.comparison.arms[name]
        start = self.training(arm.start, seed) if arm.start else None
        return Training(tuple(f"{arm.flags} {self.comparison.extra} {more}".split()), seed, steps, start, self.root)

    def _paid(self, name: str) -> int:
        """Return the training steps that the compute pays for: measured on a few, whose weights are not used."""
        probe = self._training(name, self.comparison.seeds[0], PROBED)
        if self.run:
            probe.finish()
        if not probe.finished:
            raise Missing
        budget = self.comparison.arms[name].compute or self.comparison.compute
        return max(1, round(budget * PROBED / probe.flops()))

    def _evaluated(self, checkpoint: str, prompts: tuple[str, ...], seed: int) -> Values:
        """Return the measures of a checkpoint's samples, made if they or some of the measures are not there."""
        words = ["--samples", str(-(-SAMPLES // len(prompts))), "--seeds", str(seed), "--batch", str(BATCH)]
        words += ["--recipe", "tiny", *self.comparison.evaluate.split()]  # the recipe of models that are not of a run
        folder = self.root / "evaluations" / digest(checkpoint, prompts, words)
        wanted = {name for name in self.comparison.measures if not name.startswith(OF_TRAINING)}
        if self.run and not wanted <= measures_of(folder).keys():
            folder.parent.mkdir(parents=True, exist_ok=True)
            lines = folder.with_suffix(".txt")
            lines.write_text("\n".join(prompts) + "\n", encoding="utf-8")
            words += ["--prompts", str(lines), "--resamples", "10"]  # evaluate's own intervals are not read
            command("evaluate", checkpoint, *words, "--output", str(folder))
            if absent := wanted - (measured := measures_of(folder)).keys():
                raise ValueError(f"evaluate measured no {', '.join(absent)}; have {', '.join(measured)}")
        return read_values(folder)


class Missing(Exception):
    """A run or its samples are not there."""


def digest(*values: object) -> str:
    """Return a short name for values: equal ones have one name."""
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=5).hexdigest()


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


def described(bench: Bench, rows: Mapping[str, Row]) -> str:
    """Return how the rows were measured, or are to be: command, date, commits, seeds, samples, compute, tuning."""
    comparison = bench.comparison
    command = f"`python scripts/compare.py scripts/comparisons/{comparison.name}.toml`"
    if not any(row.values for row in rows.values()):
        return f"{command} makes this table."
    commits = {commit for row in rows.values() for training in row.trainings.values() for commit in training.commits()}
    at = f"commit {', '.join(sorted(commits))}" if commits else "without training"
    tuned = [f"`{name}` with `{flags}`" for name, flags in bench.tuned.items()]
    how = f"tuning chose {', '.join(tuned)}" if tuned else "nothing was tuned for a row"
    return (
        f"{command}, {datetime.date.today()}, {at}. Brackets are 95% intervals over seeds and prompts; measures of all "
        f"samples together have them over seeds alone. Seeds are among {', '.join(map(str, comparison.seeds))}; "
        f"each has its own noise for {-(-SAMPLES // PROMPTS) * PROMPTS} samples of {PROMPTS} held-out prompts. FLOPs "
        f"are those of all networks, forward and backward, with those of the start; {how}."
    )


def main(
    file: tyro.conf.Positional[Path],
    output: Path = Path("runs/compare"),
    arms: tuple[str, ...] = (),
    *,
    run: bool = True,
) -> None:
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
    rows = {name: Row() for name, arm in comparison.arms.items() if arm.shown}
    for seed, (name, row) in itertools.product(comparison.seeds, rows.items()):
        bench.run = run and (not arms or name in arms)
        with suppress(Missing):
            row.values[seed] = bench.values(name, seed)
            if not comparison.arms[name].model:
                row.trainings[seed] = bench.training(name, seed)
    lines = [*markdown(rows, comparison.claims, comparison.measures), "", described(bench, rows)]
    text = "\n".join(lines)
    page.write_text(f"\n{text}\n".join(around(page, comparison.name)), encoding="utf-8")
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    tyro.cli(main)
