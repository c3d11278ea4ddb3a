"""python -m unified_trainer: parse, build, run."""

import hashlib
import json
import sys
from pathlib import Path

import transformers
import tyro
from safetensors import SafetensorError

from unified_trainer import checkpoint
from unified_trainer import config as settings
from unified_trainer.build import build
from unified_trainer.commands.import_hpsv3 import import_hpsv3
from unified_trainer.config import ConfigError, RunConfig
from unified_trainer.parallel.mesh import Mesh, where
from unified_trainer.registry import METHODS
from unified_trainer.tracking import Tracker

COMMANDS = {"import-hpsv3": import_hpsv3}
# What a user can mend: one line and exit code 2. Anything else is ours, and shows its traceback.
MENDABLE = (ValueError, FileNotFoundError, FileExistsError, FloatingPointError, SafetensorError, RuntimeError)


def main(argv: list[str]) -> int:
    """Run a command or a training; the exit code."""
    transformers.utils.logging.disable_progress_bar()
    try:
        if argv and argv[0] in COMMANDS:
            tyro.cli(COMMANDS[argv[0]], args=argv[1:], prog=f"python -m unified_trainer {argv[0]}")
        else:
            train(settings.parse(argv, {name: config for name, (_, config) in METHODS.items()}, checkpoint.contract))
    except MENDABLE as error:
        sys.stderr.write(f"error{where()}: {error}\n")
        return 2
    return 0


def train(run: RunConfig) -> None:
    """Build the run, continue or start it, and write everything into its directory."""
    mesh = Mesh.join(run.device, run.parallel)
    digest = hashlib.sha256(json.dumps(settings.plain(run), sort_keys=True).encode()).hexdigest()
    mesh.agree(f"{run.method} with settings {digest[:16]}")
    output = run.resume or run.output or _free_folder(run.method)
    if run.resume:
        settings.check_resumable(run, output / "config.yaml")
    elif (output / "config.yaml").exists():
        raise ConfigError(f"--output {output} already holds a run: continue it with --resume {output}, or name another")
    built = build(run, mesh)
    trainer = built.trainer
    start = trainer.resume(output) if run.resume else 0
    if start > run.steps:
        raise ConfigError(f"--resume {output} is at step {start} already: --steps {run.steps} is too few")
    carried = trainer.init_from(run.init_from) if run.init_from and not run.resume else None
    if mesh.is_main:
        output.mkdir(parents=True, exist_ok=True)
        settings.save(run, output / "config.yaml")
    with Tracker(output, run.tracking, settings.plain(run), run.steps, start, mesh.is_main) as tracker:
        tracker.table(f"{run.method}: one training step", built.counts)
        for note in built.notes:
            tracker.say(note)
        tracker.say(f"writing to {output}" + (f"; weights of {carried}" if carried else ""))
        trainer.run(
            output,
            tracker,
            built.validation,
            start=start,
            steps=run.steps,
            checkpoint_every=run.checkpoint_every,
            keep_last=run.keep_last,
            validate_every=run.validate_every,
        )


def _free_folder(method: str) -> Path:
    number = 1
    while (folder := Path("runs") / f"{method}-{number}").exists():
        number += 1
    return folder


def run_cli() -> None:
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run_cli()
