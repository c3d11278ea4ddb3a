"""The length of a run in training steps and updates, from passes over its data and from shares of the run."""

from collections.abc import Mapping
from dataclasses import replace

from unified_trainer.basics.types import of_kind
from unified_trainer.data.batch_plan import BatchPlan
from unified_trainer.roles.role import Trainable, TrainableConfig
from unified_trainer.run.plan.data import Clips, PromptFiles
from unified_trainer.run.plan.roles import RolePlan
from unified_trainer.run.settings.config import ConfigError, RunConfig


def row_count(run: RunConfig, prompts: PromptFiles, clips: Clips) -> int:
    """Return the number of prompts, clips or trajectories that a run trains on."""
    if run.trains_on == "prompts":
        return len(prompts["--prompts"].requests)
    return run.data.num_clips if run.data.path == "tiny" else len(clips)


def with_steps(run: RunConfig, batch: BatchPlan, rows: int) -> RunConfig:
    """Return the run with its number of training steps: with `epochs` the fewest that take each row so often."""
    if not run.epochs:
        return run
    if batch.by_failures or run.algorithm.continues_samples:
        why = "draws prompts by failures" if batch.by_failures else "takes new prompts where its streams begin alone"
        raise ConfigError(f"--epochs {run.epochs}: {run.method} with these settings {why}: give --steps")
    return replace(run, steps=batch.steps_for(run.epochs * rows))


def in_words(run: RunConfig, batch: BatchPlan, rows: int) -> dict[str, str]:
    """Return the rows of the table at the start that say how long a run is, and how its batch rises."""
    epochs = f", {batch.prompts_before(run.steps) / rows:.4g} epochs of {rows} {run.trains_on}"
    counts = {"training steps": f"{run.steps}{'' if batch.by_failures else epochs}"}
    if batch.ramp:
        first, most = (plan.prompts_per_update * plan.num_samples for plan in (batch.at(0), batch))
        counts["samples of an update"] = f"{first}, rising to {most} after {batch.ramp[-1][0]} training steps"
    return counts


def note_repeats(run: RunConfig, batch: BatchPlan, rows: int) -> str:
    """Return a warning where a training step has more prompts or clips than there are; "" elsewhere."""
    if rows >= batch.prompts:
        return ""
    return f"warning: {run.trains_on} repeat within a training step: it takes {batch.prompts}, and the data have {rows}"


def with_updates(run: RunConfig, roles: Mapping[str, RolePlan]) -> dict[str, RolePlan]:
    """Return the roles with the counts of updates that are shares of the run's.

    A run that is continued keeps the counts that it began with, whatever its length is now.
    """
    trained = {name: role for name, role in roles.items() if issubclass(role.kind, Trainable)}
    counted = {name: _counted(run, name, role) for name, role in trained.items()}
    return {name: replace(role, config=counted.get(name, role.config)) for name, role in roles.items()}


def _counted(run: RunConfig, name: str, role: RolePlan) -> TrainableConfig:
    config = of_kind(TrainableConfig, role.config)
    drawn = config.expert_balance != "mixed" and not role.layout.trains_one_of_two
    if drawn and (config.warmup_ratio or config.lr_decay_ratio):
        raise ConfigError(
            f"{name}.expert_balance {config.expert_balance}: how many updates an expert makes is drawn. Give "
            f"{name}.warmup_updates and {name}.lr_decay_updates in place of shares"
        )

    def count(share: str, key: str, of: int) -> int:
        keeps = run.resume and f"{name}.{share}" not in run.allow
        return vars(config)[key] if keeps or not vars(config)[share] else max(1, round(vars(config)[share] * of))

    updates = run.algorithm.updates(name, run.steps, run.sampler)
    warmup = count("warmup_ratio", "warmup_updates", updates)
    decay = count("lr_decay_ratio", "lr_decay_updates", updates - warmup)
    return replace(config, warmup_updates=warmup, lr_decay_updates=decay)
