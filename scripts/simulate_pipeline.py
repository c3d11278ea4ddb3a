"""This script says how to divide GPUs between training, rollout workers and reward workers, by a simulation of a run.

    python scripts/simulate_pipeline.py                            # Wan2.1 on 8, 64 and 512 GPUs, computed costs
    python scripts/simulate_pipeline.py --run RUN                  # costs that a run without workers measured
    python scripts/simulate_pipeline.py --run RUN --against A B    # step times of other runs, predicted and measured

Computed costs come from FLOPs and the recipe's settings for dance_grpo (`wan_costs.py`), measured ones from a run's
metrics.jsonl. The simulated engine is `pipeline.py`.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import tyro
from pipeline import Load, Placement, Timeline, simulate
from wan_costs import BF16, FP32, Gpu, Workload

from unified_trainer.config import load_recipe, merged
from unified_trainer.errors import UserError
from unified_trainer.input_files import read_yaml

STEPS = 20  # simulated training steps, and three more for each step ahead
PROMPTS_WITHIN = 0.25  # a split may change the number of prompts by this share of it, so that ranks divide the samples
SIZES = ("num_prompts", "num_samples", "prompts_per_update", "rollout_batch", "update_batch")  # may differ between runs
STEP = "seconds"  # metric of a whole step; those of its phases are seconds/NAME
PLACEMENTS = {"colocated": None, "separate, ahead 0": 0, "separate, ahead 1": 1}  # with the steps ahead


@dataclass(frozen=True)
class Seconds:
    """Seconds that replace computed or measured ones."""

    rollout: float | None = None
    """Network calls for a sample, on one GPU."""
    reward: float | None = None
    """Decoding and scoring a sample, on one GPU."""
    train: float | None = None
    """Training on a sample, on one GPU."""
    fixed: float | None = None
    """Part of a step that depends neither on samples nor on GPUs."""
    publish: float | None = None
    """Gathering the weights and putting them where workers find them; 0 where nothing was measured."""
    fetch: float | None = None
    """Copying them, by each worker; 0 where nothing was measured."""

    def over(self, load: Load) -> Load:
        """Return the load with these seconds."""
        return replace(load, **{key: value for key, value in vars(self).items() if value is not None})


@dataclass(frozen=True)
class Study:
    """A model and its training step, for any number of ranks and prompts."""

    name: str
    prompts: int
    num_samples: int
    load: Callable[[int, int], Load]  # ranks, prompts
    memory: Callable[[Placement, int], tuple[float, float]]  # bytes of a training rank and of a rollout worker
    limit: float  # bytes of one GPU


@dataclass(frozen=True)
class Split:
    """A placement with the number of prompts that it divides, and its load."""

    placement: Placement
    prompts: int
    load: Load

    @property
    def rate_at_most(self) -> float:
        """Samples per second that no schedule of these pools exceeds."""
        load, placed = self.load, self.placement
        trainer = load.fixed + load.train * load.samples / placed.ranks
        rollout = load.rollout + (0.0 if placed.reward_workers else load.reward)
        if not placed.workers:
            return load.samples / (trainer + rollout * load.samples / placed.ranks)
        made = load.samples * rollout / placed.workers
        scored = load.samples * load.reward / placed.reward_workers if placed.reward_workers else 0.0
        trainer += load.publish
        return load.samples / (max(trainer, made, scored) if placed.ahead else trainer + max(made, scored))

    def run(self, jitter: float = 0.0, seed: int = 0) -> Timeline:
        return simulate(self.load, self.placement, STEPS + 3 * self.placement.ahead, jitter, seed)


def main(
    recipes: tuple[str, ...] = ("wan2.1-1.3b", "wan2.1-14b"),
    gpus: tuple[int, ...] = (8, 64, 512),
    video: tuple[int, int, int] | None = None,
    gpu: Gpu = Gpu(),  # noqa: B008  (frozen)
    seconds: Seconds = Seconds(),
    jitter: float = 0.0,
    seed: int = 0,
    run: Path | None = None,
    against: tuple[Path, ...] = (),
) -> None:
    """Print tables of placements, or of predicted and measured step times.

    Args:
        recipes: recipes of the models whose costs are computed
        gpus: numbers of GPUs
        video: frames, height and width; by default those that the recipe has for all methods
        gpu: assumptions about a GPU
        seconds: seconds of phases, in place of computed or measured ones
        jitter: spread of the time of a work item, from 1 - jitter to 1 + jitter; the split is chosen without
        seed: seed of the jitter
        run: run directory of a run without rollout workers, whose measured costs replace the computed ones
        against: run directories whose step time is predicted from those costs
    """
    try:
        if run is None:
            if against:
                raise UserError("--against needs --run, which gives the costs")
            studies = [Computed.of(recipe, video, gpu, seconds) for recipe in recipes]
            show(costs_table(studies), memory_table(studies))
            show(*(placements_table(one.study, gpus, jitter, seed) for one in studies))
            return
        costs = Costs.of(run, seconds)
        show(costs.table())
        show(comparison(costs, against, jitter, seed) if against else placements_table(costs.study, gpus, jitter, seed))
    except UserError as error:
        sys.exit(f"error: {error}")


def show(*tables: Sequence[Sequence[str]]) -> None:
    """Write tables in markdown; the first row is the head."""
    for head, *rows in tables:
        for cells in (head, ["---"] * len(head), *rows):
            sys.stdout.write(f"| {' | '.join(cells)} |\n")
        sys.stdout.write("\n")


# The best split.


def best(study: Study, gpus: int, ahead: int | None) -> Split | None:
    """Return the split of the GPUs with the most samples per second, or None if none fits; ahead None is colocated."""
    found, rate = None, 0.0
    fitting = [split for split in splits(study, gpus, ahead) if most_memory(study, split) <= study.limit]
    for split in sorted(fitting, key=lambda split: -split.rate_at_most):
        if split.rate_at_most <= rate:
            break
        own = split.load.samples / split.run().step_seconds
        if own > rate:
            found, rate = split, own
    return found


def splits(study: Study, gpus: int, ahead: int | None) -> Iterator[Split]:
    """Yield every split of the GPUs; reward workers about as many as their share of the work asks for."""
    for ranks in [gpus] if ahead is None else range(1, gpus):
        prompts = prompts_for(study, ranks)
        if prompts is None:
            continue
        load, rest = study.load(ranks, prompts), gpus - ranks
        if ahead is None:
            yield Split(Placement(ranks), prompts, load)
            continue
        share = math.floor(rest * load.reward / (load.rollout + load.reward))
        for reward_workers in sorted({0, *(n for n in (share, share + 1) if 0 < n < rest)}):
            yield Split(Placement(ranks, rest - reward_workers, reward_workers, ahead), prompts, load)


def prompts_for(study: Study, ranks: int) -> int | None:
    """Return the number of prompts nearest to the study's whose samples divide over the ranks, or None if far off."""
    unit = ranks // math.gcd(ranks, study.num_samples)
    prompts = unit * max(1, round(study.prompts / unit))
    return prompts if abs(prompts - study.prompts) <= PROMPTS_WITHIN * study.prompts else None


def most_memory(study: Study, split: Split) -> float:
    """Return the bytes of the GPU that holds most."""
    return max(study.memory(split.placement, split.prompts))


def placements_table(study: Study, gpus: Sequence[int], jitter: float, seed: int) -> list[list[str]]:
    """Return the best split of each number of GPUs for each kind of placement."""
    head = [study.name, "placement", "training + rollout + reward", "prompts", "step, s"]
    head += ["busy: training", "rollout", "reward", "samples/s per GPU", "GB: rank, worker"]
    rows = [head]
    for count in gpus:
        for name, ahead in PLACEMENTS.items():
            split = best(study, count, ahead)
            cells = none_fits(study, count, ahead) if split is None else described(study, split, jitter, seed)
            rows.append([f"{count} GPUs", name, *cells] + [""] * (len(head) - 2 - len(cells)))
    return rows


def none_fits(study: Study, gpus: int, ahead: int | None) -> list[str]:
    least = min((most_memory(study, split) for split in splits(study, gpus, ahead)), default=None)
    return ["none divides the samples" if least is None else f"none fits: needs {least / 1e9:.0f} GB"]


def described(study: Study, split: Split, jitter: float, seed: int) -> list[str]:
    placed, timeline = split.placement, split.run(jitter, seed)
    busy = [f"{timeline.utilisation[pool]:.0%}" if size else "" for pool, size in placed.pools.items()]
    rate = split.load.samples / timeline.step_seconds / sum(placed.pools.values())
    held = [f"{size / 1e9:.0f}" for size in study.memory(placed, split.prompts) if size]
    sizes = " + ".join(map(str, placed.pools.values()))
    return [sizes, str(split.prompts), f"{rounded(timeline.step_seconds)}", *busy, f"{rate:.3g}", ", ".join(held)]


def rounded(seconds: float) -> str:
    """Return seconds in words, to three digits or to a whole second."""
    return f"{seconds:.0f}" if seconds >= 100 else f"{seconds:.3g}"


# Computed costs.


@dataclass(frozen=True)
class Computed:
    """The computed costs of a recipe's settings for dance_grpo."""

    name: str
    work: Workload
    gpu: Gpu
    seconds: Seconds

    @classmethod
    def of(cls, name: str, video: tuple[int, int, int] | None, gpu: Gpu, seconds: Seconds) -> "Computed":
        """Read a recipe; without `video` the size is the recipe's for all methods, not dance_grpo's smaller one."""
        recipe = load_recipe(name)
        size = dict(zip(("frames", "height", "width"), video, strict=True)) if video else recipe["common"]["video"]
        settings = merged(merged(recipe["common"], recipe["dance_grpo"]), {"video": size})
        return cls(name, Workload.of(recipe["fits"], settings), gpu, seconds)

    @property
    def title(self) -> str:
        rank = self.work.network.rank
        return f"{self.name}, adapters of rank {rank}" if rank else f"{self.name}, all weights"

    @property
    def study(self) -> Study:
        work = self.work
        return Study(self.title, work.prompts, work.num_samples, self.load, self.memory, self.gpu.memory)

    def load(self, ranks: int, prompts: int) -> Load:
        return self.seconds.over(self.work.load(self.gpu, ranks, prompts))

    def memory(self, placed: Placement, prompts: int) -> tuple[float, float]:
        """Return the bytes of a training rank and of a rollout worker; 0 without workers."""
        rank = self.work.rank_memory(placed.ranks, prompts, colocated=not placed.workers)
        return rank, self.work.worker_memory(scores=not placed.reward_workers) if placed.workers else 0.0


def costs_table(models: Sequence[Computed]) -> list[list[str]]:
    """Return the computed costs of each model."""
    columns = []
    for model in models:
        work, load = model.work, model.load(1, model.work.prompts)
        network, video = work.network, work.video
        columns.append(
            {
                "computed, on one GPU": model.title,
                "video": f"{video.frames} x {video.height} x {video.width}, {video.tokens} tokens",
                "weights": f"{network.parameters:.4g}",
                "trained weights": f"{network.trained:.4g}",
                "forward pass, TFLOP": f"{network.forward(video.tokens) / 1e12:.0f}",
                "its backward pass, TFLOP": f"{network.backward(video.tokens) / 1e12:.0f}",
                "forward passes for a sample": str(work.calls * work.branches),
                "trained passes for a sample": str(work.transitions * work.branches),
                "rollout of a sample, s": f"{load.rollout:.4g}",
                "decoding and scoring it, s": f"{load.reward:.3g}",
                "training on it, s": f"{load.train:.4g}",
                "samples of a step": f"{load.samples}, {load.samples * work.rollout_bytes / 1e9:.3g} GB",
                "publishing the weights, s": f"{load.publish:.2g}",
                "copying them, by each worker, s": f"{load.fetch:.2g}",
            }
        )
    return [[name, *(column[name] for column in columns)] for name in columns[0]]


def memory_table(models: Sequence[Computed]) -> list[list[str]]:
    """Return the memory of a rollout worker on one GPU, with and without the scorer."""
    rows = [["computed memory of a rollout worker, GB", *(model.title for model in models)]]
    for precision, size in (("bf16", BF16), ("fp32", FP32)):
        for words, scores in (("reward workers score", False), ("it scores its own items", True)):
            held = [f"{model.work.worker_memory(scores=scores, weight_bytes=size) / 1e9:.0f}" for model in models]
            rows.append([f"weights in {precision}; {words}", *held])
    return rows


# Measured costs.


@dataclass(frozen=True)
class Run:
    """A run directory: its settings, its ranks and the seconds of its training steps."""

    path: Path
    settings: Mapping[str, Any]
    ranks: int
    seconds: Mapping[str, float]  # of a step and of each of its phases: medians over the steps

    @classmethod
    def read(cls, path: Path) -> "Run":
        """Read a run directory without its first step, which warms up; UserError if it cannot be used."""
        config, metrics, environment = (path / f for f in ("config.yaml", "metrics.jsonl", "environment.jsonl"))
        for file in (config, metrics, environment):
            if not file.is_file():
                raise UserError(f"{file} is missing: {path} is no run directory")
        settings, starts = read_yaml(config), lines_of(environment)
        steps = [line for line in lines_of(metrics) if f"train/{STEP}" in line][1:]
        if not steps:
            raise UserError(f"{metrics} has fewer than two training steps")
        if not {*SIZES} <= settings["algorithm"].keys():
            raise UserError(f"{path} is a run of {settings['method']}, whose samples workers cannot make")
        names = dict.fromkeys(key for line in steps for key in line if key.startswith(f"train/{STEP}"))
        medians = {name: median(line.get(name, 0.0) for line in steps) for name in names}
        seconds = {name.removeprefix(f"train/{STEP}/").removeprefix("train/"): s for name, s in medians.items()}
        return cls(path, settings, starts[-1]["ranks"], seconds)

    @property
    def algorithm(self) -> Mapping[str, Any]:
        return self.settings["algorithm"]

    @property
    def placement(self) -> Placement:
        rollouts = self.settings.get("rollouts", {})  # absent in a run of an earlier version
        return Placement(self.ranks, *(rollouts.get(key, 0) for key in ("workers", "reward_workers", "ahead")))

    @property
    def work(self) -> dict[str, Any]:
        """The settings on which the cost of a sample depends."""
        own = {f"algorithm.{key}": value for key, value in self.algorithm.items() if key not in SIZES}
        return {key: self.settings[key] for key in ("method", "sampler", "video")} | own


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@dataclass(frozen=True)
class Costs:
    """The costs that a run without rollout workers measured."""

    source: Run
    replaced: Seconds

    @classmethod
    def of(cls, path: Path, seconds: Seconds) -> "Costs":
        source = Run.read(path)
        if source.placement.workers:
            raise UserError(f"{path} has rollout workers, for which its trainer waits: take a run without")
        return cls(source, seconds)

    def seconds(self, *phases: str) -> float:
        """Return the seconds that these phases of a step took together."""
        return sum(self.source.seconds.get(phase, 0.0) for phase in phases)

    def load(self, algorithm: Mapping[str, Any]) -> Load:
        """Return the load of a step with these settings, by the measured cost of a sample and of an update."""
        each = self.source.ranks / samples_of(self.source.algorithm)
        of_update = self.seconds("optimizer") / updates_of(self.source.algorithm)
        load = Load(
            samples=samples_of(algorithm),
            item=algorithm["rollout_batch"],
            rollout=each * self.seconds("rollout"),
            reward=each * self.seconds("decode", "score"),
            train=each * self.seconds("update"),
            fixed=self.seconds("data", "other") + of_update * updates_of(algorithm),
        )
        return self.replaced.over(load)

    @property
    def study(self) -> Study:
        """The study of this run's training step, on GPUs whose memory holds everything."""
        algorithm, name = self.source.algorithm, str(self.source.path)

        def load(ranks: int, prompts: int) -> Load:
            own = {"num_prompts": prompts, "prompts_per_update": prompts / updates_of(algorithm)}
            return self.load(algorithm | own)

        sizes = algorithm["num_prompts"], algorithm["num_samples"]
        return Study(name, *sizes, load, lambda placed, prompts: (0.0, 0.0), math.inf)

    def table(self) -> list[list[str]]:
        """Return the seconds of each phase of a step."""
        whole = self.source.seconds[STEP]
        head = [f"measured in {self.source.path}, number of ranks {self.source.ranks}", "s of a step", "share"]
        return [head, *([name, f"{s:.4g}", f"{s / whole:.0%}"] for name, s in self.source.seconds.items())]


def samples_of(algorithm: Mapping[str, Any]) -> int:
    return algorithm["num_prompts"] * algorithm["num_samples"]


def updates_of(algorithm: Mapping[str, Any]) -> float:
    return algorithm["num_prompts"] / algorithm["prompts_per_update"]


def comparison(costs: Costs, paths: Sequence[Path], jitter: float, seed: int) -> list[list[str]]:
    """Return predicted and measured step times of runs; UserError for a run whose samples cost something else."""
    rows = [["run", "ranks + workers + reward workers", "ahead", "samples", "predicted, s", "measured, s", "ratio"]]
    for path in paths:
        run = Run.read(path)
        if different := [key for key, value in run.work.items() if value != costs.source.work.get(key)]:
            raise UserError(f"{path} and {costs.source.path} differ in {', '.join(different)}, as costs of a sample do")
        placed, load = run.placement, costs.load(run.algorithm)
        predicted, measured = Split(placed, 0, load).run(jitter, seed).step_seconds, run.seconds[STEP]
        cells = [str(path), " + ".join(map(str, placed.pools.values())), str(placed.ahead), str(load.samples)]
        rows.append([*cells, f"{predicted:.4g}", f"{measured:.4g}", f"{predicted / measured:.3f}"])
    return rows


if __name__ == "__main__":
    tyro.cli(main)
