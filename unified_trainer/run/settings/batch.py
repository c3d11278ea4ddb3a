"""How a run's batch fits its ranks: a batch of the recipe's gives way, one of the user's is refused."""

from collections.abc import Iterable
from dataclasses import replace

from unified_trainer.basics.errors import UserError
from unified_trainer.data.batch_plan import BatchPlan, Position
from unified_trainer.data.ramp_up import ramped
from unified_trainer.methods.rl.policy import PolicyConfig
from unified_trainer.methods.rl.rollout_config import RolloutConfig
from unified_trainer.rewards.scorers import group_scorer
from unified_trainer.run.checkpoint import manifest
from unified_trainer.run.settings.config import ConfigError, RunConfig, load_recipe


def batch_of(run: RunConfig) -> BatchPlan:
    """Return the batch, with whole groups on each rank if a scorer compares the samples of a prompt.

    ConfigError unless the parts in which a rollout is scored hold whole groups too, and for a batch that cannot rise.
    """
    algorithm, key = run.algorithm, group_scorer(run.reward)
    batch = _going_on(run, ramped(algorithm.plan(), run.ramp_up))
    if batch.ramp and algorithm.continues_samples:
        raise ConfigError(f"--ramp-up.*: {run.method} continues samples from step to step, as many as in the first one")
    if not key or not isinstance(algorithm, RolloutConfig):
        return batch
    if algorithm.rollout_batch % algorithm.num_samples:
        raise ConfigError(
            f"algorithm.rollout_batch ({algorithm.rollout_batch}) must be a multiple of algorithm.num_samples "
            f"({algorithm.num_samples}), because {key} compares the samples of a prompt"
        )
    return replace(batch, whole_groups=True)


def _going_on(run: RunConfig, batch: BatchPlan) -> BatchPlan:
    """Return the batch from the newest checkpoint on; ConfigError if that one cannot tell how many rows were taken."""
    if run.resume is None or not manifest.folders(run.resume / "checkpoints"):
        return batch
    folder, metadata = manifest.find(run.resume)
    if held := metadata.get(manifest.POSITION):
        return replace(batch, begun=Position(**held))
    for key in (key.replace("-", "_") for key in run.allow):
        if key in batch.keys or key.startswith("ramp_up.") or key == "data.window_gib":
            raise ConfigError(
                f"--allow {key}: {folder} is of an earlier version, which did not store the rows that were taken: make "
                f"one more step without it, --resume {run.resume} --steps {metadata['step'] + 1}, and change it then"
            )
    return batch


def check_buffer(run: RunConfig, batch: BatchPlan, ranks: int) -> None:
    """Raise ConfigError for an experience buffer that does not fit the batch, its ranks or what a rollout keeps."""
    config, algorithm, prompts = run.rollouts.buffer, run.algorithm, batch.prompts
    if not config.share:
        if config != type(config)():
            raise ConfigError("rollouts.buffer.capacity and rollouts.buffer.order need rollouts.buffer.share above 0")
        return
    if batch.ramp:
        raise ConfigError(
            "rollouts.buffer.share must be 0 where ramp_up lets the batch grow: a stored group belongs to a place in it"
        )
    if isinstance(algorithm, PolicyConfig) and len(algorithm.windows(run.sampler)) > 1:
        raise ConfigError(
            "rollouts.buffer.share must be 0 with a window that moves, because stored samples have the transitions of "
            "their own window: set algorithm.window.size 0, or algorithm.noise_range to one place of the window"
        )
    if run.reward.statistics_every != 1:
        raise ConfigError(
            "rollouts.buffer.share needs reward.statistics_every 1: stored samples are measured when made"
        )

    def fits(count: int) -> bool:
        shared, updates = replace(config, share=count / prompts), prompts // batch.prompts_per_update
        stored = (shared.slots(step, prompts, updates) for step in range(1, prompts + 1))
        return 0 < count < prompts and all(batch.is_even(slots, ranks) for slots in stored)

    count = round(config.share * prompts)
    if abs(config.share * prompts - count) > 1e-6 or not fits(count):
        fitting = ", ".join(f"{n / prompts:.6g}" for n in range(1, prompts) if fits(n)) or "none is, raise it"
        raise ConfigError(
            f"rollouts.buffer.share {config.share:g} of {batch.keys[0]} ({prompts}) must be whole groups, of which "
            f"each of {ranks} ranks has equally many in all training steps: {fitting}"
        )


def with_fitting_batch(run: RunConfig, ranks: int) -> tuple[RunConfig, str]:
    """Return the run with the nearest batch that the ranks divide, and a note, if its recipe set the batch.

    A batch of the user's own, and that of a run to continue, stay as they are: a step would compute something else.
    """
    fitting, settings = sizes(batch_of(run).nearest(ranks)), vars(run.algorithm)
    changed = {name: count for name, count in fitting.items() if settings.get(name) != count}
    if run.resume or not changed or not _of_recipe(run, changed):
        return run, ""
    words = ", ".join(f"algorithm.{name} {count} in place of {settings[name]}" for name, count in changed.items())
    note = f"recipe {run.recipe}: {words}, which {ranks} ranks do not divide"
    return replace(run, algorithm=replace(run.algorithm, **changed)), note


def sizes(batch: BatchPlan) -> dict[str, int]:
    """Return the prompts of a training step and of an update by the names of the method's settings."""
    names = [key.removeprefix("algorithm.") for key in (batch.keys[0], batch.keys[2])]
    return dict(zip(names, (batch.prompts, batch.prompts_per_update), strict=True))


def starts_on(run: RunConfig, ranks: int) -> bool:
    """Return whether so many ranks fit the parallel degrees of a run and divide its batch."""
    try:
        degrees = run.parallel.degrees(ranks)
        batch_of(run).table(ranks // degrees.sequence)
        check_buffer(run, batch_of(run), ranks // degrees.sequence)
    except UserError:
        return False
    return True


def _of_recipe(run: RunConfig, names: Iterable[str]) -> bool:
    """Return whether settings of the method have the values of the run's recipe, or the defaults that it leaves."""
    sections = load_recipe(run.recipe) if run.recipe else {}
    given = dict(vars(type(run.algorithm)()))
    for name in ("common", run.method):
        given |= sections.get(name, {}).get("algorithm", {})
    return all(name in given and vars(run.algorithm)[name] == given[name] for name in names)
