"""Training: a run is checked, built, started or continued, and written into its directory."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch.distributed import Store

from unified_trainer.basics.errors import writing
from unified_trainer.basics.terminal import say
from unified_trainer.basics.versions import version_of
from unified_trainer.parallel.agreement import assert_equal
from unified_trainer.parallel.device import out_of_memory, set_allocator
from unified_trainer.parallel.meeting import PeerFailedError, meeting
from unified_trainer.parallel.mesh import Mesh, peer_lost
from unified_trainer.roles.role import TrainableConfig
from unified_trainer.run.build import Built, build
from unified_trainer.run.checkpoint.manager import at_risk, to_remove
from unified_trainer.run.checkpoint.manifest import finished, litter
from unified_trainer.run.checkpoint.mirror import mirror_of, saver_of
from unified_trainer.run.checkpoint.run_lock import LOCK, claimed
from unified_trainer.run.course import Course
from unified_trainer.run.exit_codes import STOPPED, exit_code
from unified_trainer.run.plan.downloads import fetched
from unified_trainer.run.plan.plan import check_given, keep_of
from unified_trainer.run.registry import add_families
from unified_trainer.run.settings import config as settings
from unified_trainer.run.settings.border import remember_own
from unified_trainer.run.settings.code import code_of
from unified_trainer.run.settings.config import ConfigError, RunConfig
from unified_trainer.run.settings.run_paths import naming_origin
from unified_trainer.run.settings.settings import check_ranges, settings_of
from unified_trainer.run.settings.workers import check_installed
from unified_trainer.run.tracking.environment import note_environment
from unified_trainer.run.tracking.external import tracker_classes
from unified_trainer.run.tracking.lost_terminal import lasting_output
from unified_trainer.run.tracking.metrics_file import METRICS
from unified_trainer.run.tracking.shown import show_steps
from unified_trainer.run.tracking.tracker import Tracker
from unified_trainer.run.workers import cluster

After = Callable[[Path], None]


def train(run: RunConfig, argv: Sequence[str], store: Store | None = None, after: After | None = None) -> int:
    """Run a training in this process, or in the processes that Ray starts, and return the exit code.

    `argv` is the command line, for environment.jsonl, and `store` that of the ranks' `meeting`. `after` is called with
    the run directory on the main rank when the run has ended.
    """
    check_ranges(run)  # those that Python code replaced; a command line was checked as it was read
    if run.launcher == "process":
        return train_here(run, argv, store, after)
    check_installed("launcher ray")
    cluster.connect(run.ray, run.ray.cpus * run.ray.ranks + run.rollouts.cores)
    from unified_trainer.run.workers.launch import launch

    folder = _folder(run)
    work = partial(train_in_actor, after=after)
    return launch(work, run if run.resume else replace(run, output=folder), folder, argv)


def train_in_actor(run: RunConfig, argv: Sequence[str], after: After | None = None) -> int | None:
    """Run one training process that Ray started and return its exit code; None if it ended because another one did."""
    try:
        with meeting(run.parallel.timeout_minutes) as store:
            add_families(run.families)
            return train_here(run, argv, store, after)
    except (Exception, KeyboardInterrupt) as error:
        code = exit_code(error)
        if code is None:
            raise
        by_another = isinstance(error, PeerFailedError) or (isinstance(error, RuntimeError) and peer_lost(error))
        return None if by_another else code


def train_here(run: RunConfig, argv: Sequence[str], store: Store | None = None, after: After | None = None) -> int:
    """Build the run, start or continue it, write everything into its directory and return the exit code."""
    set_allocator(read_by_others=run.rollouts.transport == "nixl")
    mesh = Mesh.join(run.device, run.parallel, store)
    if run.resume and _is_finished(run, run.resume, mesh):
        _leave_finished(run.resume, mesh, after)
        return 0
    with started(run, mesh, argv) as (_, course):
        stopped_by = course.run()
    if after is not None and mesh.is_main:
        after(course.output)  # the lock is released: a report does not say "running"
    mesh.leave()
    return STOPPED[stopped_by] if stopped_by else 0


@contextmanager
def started(run: RunConfig, mesh: Mesh, argv: Sequence[str]) -> Iterator[tuple[Built, Course]]:
    """Check and build a run, load its weights, and open its directory; the course makes its steps in the context.

    Raise UserError before a file is written for settings that cannot be, for a new run in the directory of another one,
    and for a resumed run whose settings differ.
    """
    if run.recipe:
        check_given(run, mesh)  # before anything is downloaded
    output = _folder(run)
    assert_equal(mesh, _compared(run, output))
    way_out = "Call from the folder that has it, or give --{key} PATH --allow {key}"
    with naming_origin(run.resume, way_out):
        run = fetched(run, mesh)
    with claimed(output, mesh) as note, memory_advice(run), naming_origin(run.resume, way_out):
        changed = settings.check_resumable(run, output / "config.yaml") if run.resume else []
        if not run.resume and (output / "config.yaml").exists():
            raise ConfigError(
                f"--output {output} already holds a run: continue it with --resume {output}, or name another folder"
            )
        if (metrics := output / METRICS).exists() and not metrics.is_file():
            raise ConfigError(f"{metrics} is no file: move it away, and call again")
        with (
            mirror_of(run.checkpoint_mirror, output, mesh, new=run.resume is None) as mirror,
            closing(build(run, mesh, output, mirror)) as built,
        ):
            run, trainer = built.run, built.trainer
            start, skipped = trainer.resume(output) if run.resume else (0, [])
            if start > run.steps:
                length = f"--epochs {run.epochs}" if run.epochs else f"--steps {run.steps}"
                raise ConfigError(f"--resume {output} is at step {start} already: {length} is too few")
            initialised = trainer.init_from(run.init_from) if run.init_from and not start else ""
            if mirror is not None:
                mirror.confirm()  # loading took long: who came at the same moment has written by now
            unnoted = _note_settings(built, output, argv, start, mesh) if mesh.is_main else ""
            gone = f"warning: {metrics} is gone: its curves begin after step {start}"
            continued = f"continuing after step {start}" if start else "no checkpoint yet: from the beginning"
            lines = (
                *built.notes,
                f"writing to {output}" + (f"; weights of {initialised}" if initialised else ""),
                note,
                mirror.note if mirror is not None else "",
                continued if run.resume else "",
                *(f"skipped {why}" for why in skipped),
                *(f"changed {what}" for what in changed),
                *trainer.warnings,
                gone if start and not metrics.exists() else "",
                unnoted,
                at_risk(run.checkpoint_every, run.checkpoint_minutes) if run.checkpoint_minutes else "",
            )
            with (
                lasting_output(output),
                _tracker(built, output, start, mesh) as tracker,
                saver_of(
                    mirror,
                    output / "checkpoints",
                    mesh,
                    built.keep,
                    tracker.say,
                    asynchronous=run.async_save,
                    never=run.checkpoint_every < 0,
                ) as saver,
            ):
                tracker.table(f"{run.method} with recipe {run.recipe}", built.summary)
                tracker.table(f"{run.method}: one training step", built.counts)
                for line in filter(None, lines):
                    tracker.say(line)
                show_steps(trainer.method, built.codec, built.reward, run, output, tracker)
                yield built, Course(trainer, run, output, tracker, saver, built.validation, start=start)


@contextmanager
def memory_advice(run: RunConfig) -> Iterator[None]:
    """Add to an out-of-memory error the settings that lower memory most for this run."""
    try:
        yield
    except RuntimeError as error:
        if out_of_memory(error):
            error.add_note(f"out of memory: {'; '.join(advice(run)[:3])}")
        raise


def advice(run: RunConfig) -> list[str]:
    """Return ways to lower the memory of a run, largest effect first; those already taken are left out."""
    settings = []
    trained = {name: config for name, config in run.roles.items() if isinstance(config, TrainableConfig)}
    for name, config in trained.items():
        if config.activation_memory != "full":
            less = "selective" if config.activation_memory == "none" else "full"
            settings.append(f"set --{name}.activation-memory {less}")
    plan = run.algorithm.plan()
    if plan.micro_batch > 1:
        settings.append(f"lower --{plan.keys[3].replace('_', '-')} (now {plan.micro_batch})")
    for name, config in trained.items():
        if not config.adapter.rank:
            settings.append(f"train an adapter: --{name}.adapter.rank 16")
        if config.precision == "fp32":
            settings.append(f"set --{name}.precision bf16")
    if not (run.parallel.offload_optimizer or all(config.adapter.rank for config in trained.values())):
        settings.append("keep moments in CPU memory: --parallel.offload-optimizer")
    if not run.parallel.offload_weights:
        settings.append("use more ranks with --parallel.shard, or --parallel.offload-weights")
    smaller = "leave the largest of --data.buckets out" if run.data.buckets else ""
    settings.append(smaller or "lower --video.frames, --video.height or --video.width")
    return settings


def _tracker(built: Built, output: Path, start: int, mesh: Mesh) -> Tracker:
    """Open metrics.jsonl and the trackers of a run; UserError if that cannot be."""
    run, pending = built.run, built.trainer.pending_validation
    again = start if built.trainer.owes_validation or run.validate_only else None
    unvalidated = None if built.validation is None else pending.step if pending is not None else again
    plain, main = settings.plain(run), mesh.is_main
    with writing(output):
        return Tracker(output, run.tracking, plain, run.steps, start, main, unvalidated=unvalidated)


def _note_settings(built: Built, output: Path, argv: Sequence[str], start: int, mesh: Mesh) -> str:
    """Write config.yaml, and how the run was started; return a warning if the second cannot be written."""
    run = built.run
    if not (run.resume and run.validate_only):  # a look at a run leaves its settings as they are
        with writing(output / "config.yaml"):
            settings.save(run, output / "config.yaml")
    if not run.resume:
        remember_own(settings.flat(settings.plain(run)), {one.key: one for one in settings_of(run)}, output)
    try:
        note_environment(output, argv, run.seed, start, mesh, built.learned)
    except OSError as error:
        return f"warning: {output / 'environment.jsonl'} cannot be written ({error})"
    return ""


def _compared(run: RunConfig, output: Path) -> dict[str, str]:
    """Return what must be equal on all ranks before a file is read."""
    versions = {f"the version of {name}": version_of(name) for name in ("unified-trainer", "torch")}
    given = {key: json.dumps(value) for key, value in settings.flat(settings.plain(run)).items()}
    return {**versions, **given, "output": str(output.absolute()), **code_of(run)}


def _is_finished(run: RunConfig, folder: Path, mesh: Mesh) -> bool:
    """Say so if the run to continue has all its steps; ConfigError for settings that it cannot change."""
    settings.check_resumable(run, folder / "config.yaml")
    if run.validate_only or run.epochs or not finished(folder, run.steps, mesh, validating=run.validate_every > 0):
        return False
    killed = (folder / LOCK).exists() and bool(tracker_classes(run.tracking))  # they may lack lines
    if mesh.any(killed or to_remove(folder / "checkpoints", keep_of(run))):
        return False
    line = f"{folder} is at step {run.steps} of {run.steps}: nothing to do; raise --steps to go on"
    say(line, quiet=not mesh.is_main)
    return True


def _leave_finished(folder: Path, mesh: Mesh, after: After | None) -> None:
    """Do what a process that was killed after the last checkpoint still had to do."""
    if mesh.any(bool(litter(folder)) or (folder / LOCK).exists()):
        with claimed(folder, mesh):  # removes them
            pass
    if after is not None and mesh.is_main:
        after(folder)
    mesh.leave()


def _folder(run: RunConfig) -> Path:
    """Return the directory of the run; ConfigError for another one than that of the run that is continued."""
    if run.resume and run.output and run.output.resolve() != run.resume.resolve():
        raise ConfigError(
            f"--output {run.output}: --resume continues a run in its own directory, {run.resume}; leave --output out, "
            f"resume a copy of the directory, or begin a new run with its weights: --init-from {run.resume}"
        )
    return run.resume or run.output or _free_folder(run.method)


def _free_folder(method: str) -> Path:
    """The first unused runs/METHOD-N; a method from outside the package gives the name of its class."""
    name, number = method.rpartition(":")[2], 1
    while (folder := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return folder
