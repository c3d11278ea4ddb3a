"""The command line: python -m unified_trainer."""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import transformers
from rich.console import Console

from unified_trainer import config as settings
from unified_trainer.build import build
from unified_trainer.checkpoint.manager import Saver
from unified_trainer.checkpoint.manifest import finished
from unified_trainer.checkpoint.run_lock import claimed
from unified_trainer.cli import help_pages
from unified_trainer.cli.command_line import before_flags, parse
from unified_trainer.cli.flags import apply
from unified_trainer.commands.export import export
from unified_trainer.commands.import_hpsv3 import import_hpsv3
from unified_trainer.commands.rollout import rollout
from unified_trainer.commands.sample import sample
from unified_trainer.commands.score import score
from unified_trainer.config import ConfigError, RunConfig
from unified_trainer.errors import UserError
from unified_trainer.memory import memory_advice
from unified_trainer.parallel.mesh import Mesh, peer_lost, where
from unified_trainer.registry import METHODS, method_named
from unified_trainer.suggestions import must_know
from unified_trainer.tracking.environment import note_environment
from unified_trainer.tracking.tracker import Tracker

COMMANDS: dict[str, Callable[..., None]] = {
    "export": export,
    "import-hpsv3": import_hpsv3,
    "rollout": rollout,
    "sample": sample,
    "score": score,
}
WIDEST = 120  # columns of a help page
HELP = {"-h", "--help", "--help-all"}
HACKED = 3  # exit code of a run that the hacking monitor stopped


def main(argv: list[str]) -> int:
    """Run a command or a training and return the exit code; an exception that is not a UserError is raised."""
    transformers.utils.logging.disable_progress_bar()
    try:
        if not argv or HELP & {*argv}:
            Console().print(_page(argv, min(Console().width, WIDEST)), markup=False, highlight=False, soft_wrap=True)
            return 0 if argv else 2
        if "--version" in argv:
            Console().print(f"unified-trainer {version('unified-trainer')}, torch {version('torch')}", highlight=False)
        elif _names_command(argv):
            apply(_command(argv[0]), argv[1:])()
        else:
            return train(parse(argv), argv)
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


def _page(argv: list[str], width: int) -> str:
    """Return the help page that a command line with --help, or an empty one, asks for."""
    words = [word for word in argv if word not in HELP]
    if _names_command(words):
        return help_pages.of_command(words[0], _command(words[0]), width)
    if words or "--help-all" in argv:
        run = before_flags(words)
        return help_pages.of_method(method_named(run.method), run, width, everything="--help-all" in argv)
    return help_pages.overview(COMMANDS, width)


def _names_command(argv: list[str]) -> bool:
    return bool(argv) and argv[0][:1].isalnum()


def _command(name: str) -> Callable[..., None]:
    """Return a command; UserError names the nearest one for an unknown name."""
    if name in METHODS:
        raise UserError(f"{name} is a method, not a command; did you mean --method {name}?")
    must_know("command", name, list(COMMANDS))
    return COMMANDS[name]


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


def run_cli() -> None:
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run_cli()
