"""The measures of the checkpoints of an evaluation: means, spread over seeds, intervals, differences; their table."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from jaxtyping import Float
from rich.table import Table
from rich.text import Text
from torch import Tensor

from unified_trainer.basics.ranges import Count, Decay, Seed
from unified_trainer.basics.terminal import printable, show
from unified_trainer.data.tiny_world_measures import DRAWN, world_distances
from unified_trainer.numerics.bootstrap import Statistic, bootstrap_interval
from unified_trainer.numerics.frechet import frechet_distance
from unified_trainer.run.validation.distances import FRECHET, FVD
from unified_trainer.tools.evaluate.plan import Plan
from unified_trainer.tools.evaluate.samples import Measured

Interval = tuple[float, float] | None  # None where there is none: of one prompt, or of the Frechet distance
DIVERSITY, SPEED, CALLS = "pixels/diversity", "samples_per_second", "network_calls"
SHARE = "accuracy"  # first word of the measures that are shares of samples
# sign of an improvement, by first word
BETTER = {"reward": 1, SHARE: 1, FRECHET: -1, FVD: -1, SPEED: 1, CALLS: -1, "world": -1}
NO_BETTER = ("world/diversity",)  # more is not better: real clips have 1
WIDTH = 200  # columns where the output is no terminal
STYLES = {1: "green", 0: "bold", -1: "red"}


@dataclass(frozen=True)
class BootstrapConfig:
    resamples: Count = 10_000  # resamples of the prompts
    seed: Seed = 0  # seed of the resampling
    confidence: Decay = 0.95  # share of repeated evaluations, with other prompts, whose interval holds the true value


@dataclass(frozen=True)
class Measure:
    """One measure of one checkpoint."""

    mean: float
    interval: Interval  # over prompts
    by_seed: list[float]
    std_over_seeds: float | None  # Bessel's; None with one seed


@dataclass(frozen=True)
class Difference:
    """One measure of a checkpoint minus that of another, on the same prompts and noise."""

    measure: str
    left: int  # position of the checkpoint that is subtracted
    right: int
    difference: float
    interval: Interval


@dataclass(frozen=True)
class Summary:
    """All measures by name, a value for each checkpoint, and the differences of every two checkpoints."""

    measures: dict[str, list[Measure]]
    differences: list[Difference]


@dataclass(frozen=True)
class _Values:
    """A mean over prompts and seeds, and what is reported of it."""

    table: Float[Tensor, "prompts seeds"]
    root: bool = False  # the measure is the square root of the mean

    def of(self, means: Tensor) -> Tensor:
        return means.clamp(min=0).sqrt() if self.root else means


def summarise(
    rows: Sequence[Measured], plan: Plan, config: BootstrapConfig, others: Sequence[Mapping[str, Tensor]]
) -> Summary:
    """Summarise the samples of all checkpoints.

    `others` are what the samples of each checkpoint are compared with: features by the name of the Frechet distance,
    [seeds x samples, k, d].
    """
    tables = [_tables(row, plan) for row in rows]
    measures: dict[str, list[Measure]] = {}
    differences: list[Difference] = []
    for name in (name for name in tables[0] if not _repeats(name, tables)):
        values = [table[name] for table in tables]
        measures[name] = [_measure(name, one, config) for one in values]
        differences += _differences(name, measures[name], values, config)
    for name, by_seed in (_frechet(rows, plan, others) | _world(rows, plan) | _speed(rows)).items():
        measures[name] = [Measure(sum(own) / len(own), None, own, _std(own)) for own in by_seed]
        differences += _differences(name, measures[name], None, config)
    return Summary(measures, differences)


def sign_of(measure: str) -> int:
    """Return 1 if more is better, -1 if less is, 0 if neither."""
    return 0 if measure in NO_BETTER else BETTER.get(measure.partition("/")[0], 0)


def beside_zero(interval: Interval) -> bool:
    """Whether there is an interval and it does not hold zero."""
    return interval is not None and (interval[0] > 0 or interval[1] < 0)


def verdict(measure: str, difference: float) -> int:
    """Return 1 for a change to the better, -1 to the worse, 0 where the measure has no better and worse."""
    return sign_of(measure) if difference > 0 else -sign_of(measure)


def _tables(measured: Measured, plan: Plan) -> dict[str, _Values]:
    """Return the values of every measure of samples, as means of each prompt and seed."""
    shape = (len(plan.seeds), len(plan.prompts), plan.samples)
    names = [name for name, value in measured.rows[0].items() if isinstance(value, float)]
    columns = {name: torch.tensor([row[name] for row in measured.rows], dtype=torch.float64) for name in names}
    tables = {name: _Values(column.view(shape).mean(2).T) for name, column in columns.items()}
    if plan.samples > 1:
        pixels = measured.tensors["thumbnails"].double().view(*shape, -1)
        tables[DIVERSITY] = _Values(pixels.var(2).mean(2).T, root=True)
    return tables


def _repeats(name: str, tables: Sequence[Mapping[str, _Values]]) -> bool:
    """Whether a scorer's values are those of the reward, which has no other part, or of its own pixel statistic."""
    others = {"reward", name.replace("reward/", "pixels/")} & tables[0].keys() if name.startswith("reward/") else ()
    return any(all(torch.equal(table[name].table, table[other].table) for table in tables) for other in others)


def _measure(name: str, values: _Values, config: BootstrapConfig) -> Measure:
    means = values.table.mean(1, keepdim=True)
    by_seed = values.of(values.table.mean(0)).tolist()
    interval = _interval(means, lambda resampled: values.of(resampled[:, 0]), config)
    if interval is not None and name.partition("/")[0] == SHARE:
        interval = (max(0.0, interval[0]), min(1.0, interval[1]))
    return Measure(float(values.of(means.mean())), interval, by_seed, _std(by_seed))


def _std(values: list[float]) -> float | None:
    return float(torch.tensor(values, dtype=torch.float64).std()) if len(values) > 1 else None


def _differences(
    name: str, measured: Sequence[Measure], values: Sequence[_Values] | None, config: BootstrapConfig
) -> list[Difference]:
    """Return the differences of every two checkpoints; prompts, with all samples and seeds, are resampled for both."""
    differences = []
    for right in range(len(measured)):
        for left in range(right):
            interval = None if values is None else _paired(values[left], values[right], config)
            differences.append(Difference(name, left, right, measured[right].mean - measured[left].mean, interval))
    return differences


def _paired(left: _Values, right: _Values, config: BootstrapConfig) -> Interval:
    columns = torch.stack([left.table.mean(1), right.table.mean(1)], 1)
    return _interval(columns, lambda means: right.of(means[:, 1]) - left.of(means[:, 0]), config)


def _interval(columns: Tensor, statistic: Statistic, config: BootstrapConfig) -> Interval:
    return None if len(columns) < 2 else bootstrap_interval(columns, statistic, **asdict(config))


def _frechet(
    rows: Sequence[Measured], plan: Plan, others: Sequence[Mapping[str, Tensor]]
) -> dict[str, list[list[float]]]:
    """Return the Frechet distances of every checkpoint by seed; none where no features were measured."""
    features = [row.features for row in rows]
    return {
        name: [
            [
                frechet_distance(left.flatten(0, 1), right.flatten(0, 1))
                for left, right in zip(own[name].split(plan.size), other[name].split(plan.size), strict=True)
            ]
            for own, other in zip(features, others, strict=True)
        ]
        for name in features[0]
        if all(name in columns for columns in (*features, *others))
        and plan.size * features[0][name].shape[1] > 1  # one row has no covariance
    }


def _world(rows: Sequence[Measured], plan: Plan) -> dict[str, list[list[float]]]:
    """Return the distances of every checkpoint's samples from the law of the tiny world, by seed; none elsewhere."""
    drawn = [name for name in rows[0].rows[0] if name.startswith(DRAWN)]
    if not drawn:
        return {}
    columns = [{name: torch.tensor([row[name] for row in one.rows]).split(plan.size) for name in drawn} for one in rows]
    captions = plan.prompts_of([*range(plan.size)])
    by_seed = [
        [world_distances({name: parts[i] for name, parts in own.items()}, captions) for i in range(len(plan.seeds))]
        for own in columns
    ]
    return {name: [[seed[name] for seed in own] for own in by_seed] for name in by_seed[0][0]}


def _speed(rows: Sequence[Measured]) -> dict[str, list[list[float]]]:
    """Return samples per second of generation, without decoding, and network calls of a sample.

    The speed is the median over batches without the first one, which loads kernels; with one batch there is none.
    """
    calls = {CALLS: [[float(row.calls)] for row in rows]}
    batches = [torch.tensor(row.seconds[1:], dtype=torch.float64) for row in rows]
    return {SPEED: [[1 / float(seconds.median())] for seconds in batches], **calls} if all(map(len, batches)) else calls


def print_summary(summary: Summary, names: Sequence[str]) -> None:
    """Print every measure of every checkpoint, and the differences to the first one with their intervals."""
    table = Table("measure", *names)
    for name, values in summary.measures.items():
        against = {
            measure.right: measure for measure in summary.differences if measure.measure == name and measure.left == 0
        }
        table.add_row(name, *(_cell(measure, against.get(i)) for i, measure in enumerate(values)))
    show(table, width=WIDTH)


def _cell(measure: Measure, difference: Difference | None) -> Text:
    """Return the mean with its spread over seeds, and below it the difference; in color if the interval is beside 0."""
    spread = "" if measure.std_over_seeds is None else f" ± {measure.std_over_seeds:.2g}"
    text = Text(printable(f"{measure.mean:.4g}{spread}"))
    if difference is None:
        return text
    style = STYLES[verdict(difference.measure, difference.difference)] if beside_zero(difference.interval) else "dim"
    ends = "" if difference.interval is None else " [{:+.3g}, {:+.3g}]".format(*difference.interval)
    text.append(f"\n{difference.difference:+.3g}{ends}", style)
    return text
