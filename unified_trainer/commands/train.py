"""Training: a run is checked, built, started or continued, and written into its directory."""

import hashlib
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import transformers
from rich.console import Console

from unified_trainer import config as settings
from unified_trainer.build import build
from unified_trainer.checkpoint.manager import Saver
from unified_trainer.checkpoint.manifest import finished
from unified_trainer.checkpoint.run_lock import claimed
from unified_trainer.config import ConfigError, RunConfig
from unified_trainer.engine import cluster
from unified_trainer.engine.config import check_installed
from unified_trainer.exit_codes import HACKED, exit_code
from unified_trainer.memory import memory_advice
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.tracking.environment import note_environment
from unified_trainer.tracking.tracker import Tracker


def train(run: RunConfig, argv: Sequence[str]) -> int:
    """Run a training in this process, or in the processes that Ray starts, and return the exit code.

    `argv` is the command line, for environment.jsonl.
    """
    if run.launcher == "process":
        return train_here(run, argv)
    check_installed("launcher ray")
    run.ray.check()
    cluster.connect(run.ray, run.ray.cpus * run.ray.ranks + run.rollouts.cores)
    from unified_trainer.engine.launch import launch

    folder = run.resume or run.output or _free_folder(run.method)
    return launch(train_in_actor, run if run.resume else replace(run, output=folder), folder, argv)


def train_in_actor(run: RunConfig, argv: Sequence[str]) -> int:
    """Run one training process that Ray started."""
    transformers.utils.logging.disable_progress_bar()
    return exit_code(lambda: train_here(run, argv))


def train_here(run: RunConfig, argv: Sequence[str]) -> int:
    """Build the run, start or continue it, write everything into its directory and return the exit code."""
    mesh = Mesh.join(run.device, run.parallel)
    digest = hashlib.sha256(json.dumps(settings.plain(run), sort_keys=True).encode()).hexdigest()
    mesh.assert_same(f"{run.method} with settings {digest[:16]}")
    output = run.resume or run.output or _free_folder(run.method)
    with claimed(output, mesh), memory_advice(run):
        changed: list[str] = []
        if run.resume:
            changed = settings.check_resumable(run, output / "config.yaml")
            if finished(run.resume, run.steps, mesh):
                said = f"{run.resume} is at step {run.steps} of {run.steps}: nothing to do; raise --steps to go on"
                Console(quiet=not mesh.is_main).print(said, highlight=False, soft_wrap=True, markup=False)
                mesh.leave()
                return 0
        elif (output / "config.yaml").exists():
            raise ConfigError(
                f"--output {output} already holds a run: continue it with --resume {output}, or name another folder"
            )
        built = build(run, mesh, output)
        trainer = built.trainer
        start, skipped = trainer.resume(output) if run.resume else (0, [])
        if start > run.steps:
            raise ConfigError(f"--resume {output} is at step {start} already: --steps {run.steps} is too few")
        initialised = trainer.init_from(run.init_from) if run.init_from and not start else None
        if mesh.is_main:
            settings.save(run, output / "config.yaml")
            note_environment(output, argv, run.seed, start, mesh)
        with (
            closing(built),
            Tracker(output, run.tracking, settings.plain(run), run.steps, start, mesh.is_main) as tracker,
            Saver(output / "checkpoints", mesh, built.keep, tracker.say, asynchronous=run.async_save) as saver,
        ):
            tracker.table(f"{run.method} with recipe {run.recipe}", built.summary)
            tracker.table(f"{run.method}: one training step", built.counts)
            for note in built.notes:
                tracker.say(note)
            tracker.say(f"writing to {output}" + (f"; weights of {initialised}" if initialised else ""))
            if run.resume:
                tracker.say(f"continuing after step {start}" if start else "no checkpoint yet: from the beginning")
            for line in (*(f"skipped {why}" for why in skipped), *(f"changed {what}" for what in changed)):
                tracker.say(line)
            hacked = trainer.run(
                output,
                tracker,
                built.validation,
                saver,
                start=start,
                steps=run.steps,
                checkpoint_every=run.checkpoint_every,
                validate_every=run.validate_every,
            )
    mesh.leave()
    return HACKED if hacked else 0


def _free_folder(method: str) -> Path:
    """The first unused runs/METHOD-N; a method from outside the package gives the name of its class."""
    name, number = method.rpartition(":")[2], 1
    while (folder := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return folder
