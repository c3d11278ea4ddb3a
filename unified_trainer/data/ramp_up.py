"""A global batch that rises at the start of a run, as Megatron's rampup-batch-size."""

from dataclasses import dataclass, replace

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import CountOrZero, PeriodOrZero
from unified_trainer.data.batch_plan import BatchPlan


@dataclass(frozen=True)
class RampUpConfig:
    """Smaller updates at the start: all three settings, or none."""

    start: CountOrZero = 0
    """Samples of an update in the first training step; 0 begins with the whole batch."""
    increment: CountOrZero = 0
    """Samples by which an update grows at a time, until it has as many as the method's settings say."""
    samples: PeriodOrZero = 0
    """Samples that the run trains on while the batch grows, an equal share at each size."""


def ramped(plan: BatchPlan, config: RampUpConfig) -> BatchPlan:
    """Return the plan whose updates grow from `start` by `increment`; UserError if they do not come to its size.

    With n increments, an update has start + k increment samples from the first training step on before which the run
    had k samples / n samples. A size is thus a function of the training step alone.
    """
    if config == RampUpConfig():
        return plan
    missing = [f"ramp_up.{name}" for name, value in vars(config).items() if not value]
    if missing:
        raise UserError(f"{missing[0]} must be above 0 where the batch rises: set it, or leave all of ramp_up out")
    group, whole = plan.num_samples, plan.prompts_per_update * plan.num_samples
    for name in ("start", "increment"):
        if vars(config)[name] % group:
            raise UserError(f"ramp_up.{name} must be a multiple of {plan.keys[1]} ({group}), not {vars(config)[name]}")
    increments, rest = divmod(whole - config.start, config.increment)
    if rest or increments < 1:
        raise UserError(
            f"ramp_up.start ({config.start}) plus a multiple of ramp_up.increment ({config.increment}) must be the "
            f"{whole} samples of an update ({plan.keys[2]})"
        )
    stages, step, seen, updates = list[tuple[int, int]](), 0, 0, plan.prompts // plan.prompts_per_update
    for k in range(increments):
        size = config.start + k * config.increment
        steps = max(0, -(-((k + 1) * config.samples - seen * increments) // (increments * updates * size)))
        step, seen = step + steps, seen + steps * updates * size
        if steps:
            stages.append((step, size // group))
    return replace(plan, ramp=tuple(stages))
