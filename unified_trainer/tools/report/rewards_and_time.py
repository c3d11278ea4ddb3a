"""Tables of a report: the parts of the reward with held-out scorers, and where the time of a step goes."""

import statistics
from dataclasses import dataclass

from unified_trainer.tools.report.healthy import held_out_metrics
from unified_trainer.tools.report.run_folder import VALIDATION, RunRecord

PHASE = "seconds/"
RATES = ("samples_per_second", "tokens_per_second", "model_flops_per_second", "mfu", "peak_memory_gib_max")
PREFIX = f"{VALIDATION}reward/"


@dataclass(frozen=True)
class RewardPart:
    """A scorer, or another measure of the samples, in the first and the last validation."""

    name: str
    held_out: bool  # no reward contains it
    first: float
    last: float
    std: float | None  # over samples, in the first validation


@dataclass(frozen=True)
class PhaseTimes:
    """Mean seconds of each phase of a training step, the longest first, and mean rates; memory is its maximum."""

    seconds: dict[str, float]
    rates: dict[str, float]

    @property
    def total(self) -> float:
        """The seconds of all phases."""
        return sum(self.seconds.values())


def reward_parts(run: RunRecord) -> list[RewardPart]:
    """Return the scorers of the validations, then accuracy and Frechet distance, which no reward contains."""
    held_out = held_out_metrics(run)
    names = [name for name in run.curves if name.startswith(PREFIX) and not name.endswith("_std")]
    others = [name for name in (f"{VALIDATION}{own}" for own in ("accuracy", "frechet", "fvd")) if name in run.curves]
    parts = []
    for name in (*names, *others):
        values, spread = run.curves[name].values, run.curves.get(f"{name}_std")
        out = name in held_out or name in others
        short = name.removeprefix(PREFIX).removeprefix(VALIDATION)
        parts.append(RewardPart(short, out, values[0], values[-1], spread.values[0] if spread else None))
    return parts


def phase_times(run: RunRecord) -> PhaseTimes:
    """Return mean times and rates over all training steps but the first, which also warms up."""

    def typical(name: str) -> float:
        values = run.curves[name].values
        return max(values) if name.endswith("_max") else statistics.fmean(values[1:] or values)

    seconds = {name.removeprefix(PHASE): typical(name) for name in run.curves if name.startswith(PHASE)}
    ordered = dict(sorted(seconds.items(), key=lambda row: -row[1]))
    return PhaseTimes(ordered, {name: typical(name) for name in RATES if name in run.curves})
