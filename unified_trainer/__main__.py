"""The command line: python -m unified_trainer."""

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import transformers
import tyro
from rich.console import Console

from unified_trainer import config as settings
from unified_trainer.build import build
from unified_trainer.checkpoint.dcp import trained_sampler
from unified_trainer.checkpoint.manager import Saver
from unified_trainer.checkpoint.manifest import finished
from unified_trainer.checkpoint.run_lock import claimed
from unified_trainer.commands.export import export
from unified_trainer.commands.import_hpsv3 import import_hpsv3
from unified_trainer.commands.rollout import rollout
from unified_trainer.commands.sample import sample
from unified_trainer.commands.score import score
from unified_trainer.config import ConfigError, RunConfig
from unified_trainer.environment import note_environment
from unified_trainer.errors import UserError
from unified_trainer.memory import memory_advice
from unified_trainer.parallel.mesh import Mesh, peer_lost, where
from unified_trainer.registry import method_named
from unified_trainer.tracking import Tracker

COMMANDS = {"export": export, "import-hpsv3": import_hpsv3, "rollout": rollout, "sample": sample, "score": score}
HACKED = 3  # exit code of a run that the hacking monitor stopped


def main(argv: list[str]) -> int:
    """Run a command or a training and return the exit code; an exception that is not a UserError is raised."""
    transformers.utils.logging.disable_progress_bar()
    try:
        if argv == ["--version"]:
            Console().print(f"unified-trainer {version('unified-trainer')}, torch {version('torch')}", highlight=False)
        elif argv and not argv[0].startswith("-"):
            settings.must_know("command", argv[0], list(COMMANDS))
            tyro.cli(COMMANDS[argv[0]], args=argv[1:], prog=f"python -m unified_trainer {argv[0]}")
        else:
            return train(settings.parse(argv, method_named, trained_sampler), argv)
    except UserError as error:
        sys.stderr.write(f"error{where()}: {error}\n")
        return 2
    except RuntimeError as error:
        if not peer_lost(error):
            raise
        sys.stderr.write(f"error{where()}: another rank has ended; its own message says why ({error})\n")
        return 2
    except KeyboardInterrupt:  # the second one, or one before the first step; a save that is under way is given up
        sys.stderr.write("stopped\n")
        sys.stderr.flush()
        os._exit(130)
    return 0


def train(run: RunConfig, argv: Sequence[str]) -> int:
    """Build the run, start or continue it, write everything into its directory and return the exit code.

    `argv` is the command line, for environment.jsonl.
    """
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
        built = build(run, mesh)
        trainer = built.trainer
        start, skipped = trainer.resume(output) if run.resume else (0, [])
        if start > run.steps:
            raise ConfigError(f"--resume {output} is at step {start} already: --steps {run.steps} is too few")
        initialised = trainer.init_from(run.init_from) if run.init_from and not start else None
        if mesh.is_main:
            settings.save(run, output / "config.yaml")
            note_environment(output, argv, run.seed, start, mesh)
        with (
            Tracker(output, run.tracking, settings.plain(run), run.steps, start, mesh.is_main) as tracker,
            Saver(output / "checkpoints", mesh, built.keep, tracker.say, asynchronous=run.async_save) as saver,
        ):
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


def run_cli() -> None:
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run_cli()
