"""python -m unified_trainer: parse, build, run."""

import inspect
import sys
from pathlib import Path

import tyro
from safetensors import SafetensorError

from unified_trainer import config as settings
from unified_trainer.config import ConfigError, RunConfig
from unified_trainer.data.clips import render_clips
from unified_trainer.data.feed import Feed
from unified_trainer.data.prompts import Prompts, read_prompts, training_prompts
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.registry import METHODS, family_of, load_scorer
from unified_trainer.roles.reward import Reward
from unified_trainer.roles.role import Trainable
from unified_trainer.tracking import Tracker
from unified_trainer.trainer import Trainer
from unified_trainer.validation import Validation


def main(argv: list[str]) -> int:
    """Run a command or a training; every foreseeable mistake ends in one line and exit code 2."""
    try:
        if argv[:1] == ["import-hpsv3"]:
            from unified_trainer.commands.import_hpsv3 import import_hpsv3

            tyro.cli(import_hpsv3, args=argv[1:], prog="python -m unified_trainer import-hpsv3")
        else:
            train(settings.parse(argv, {name: config for name, (_, config) in METHODS.items()}))
    except (ValueError, FileNotFoundError, FloatingPointError, SafetensorError, RuntimeError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def train(run: RunConfig) -> None:
    """Build the roles that the method's constructor names, and let the trainer run them."""
    mesh = Mesh.join(run.device)
    output = run.resume or run.output or _free_folder(run.method)
    if run.resume:
        settings.check_resumable(run, output / "config.yaml")
    elif (output / "config.yaml").exists():
        raise ConfigError(f"--output {output} already holds a run: continue it with --resume {output}, or name another")
    prompts = training_prompts() if run.prompts is None else read_prompts(run.prompts)

    family, folder = family_of(run.student.path)
    codec = family.codec(folder, mesh.device)
    video = run.video
    latent_shape = codec.latent_shape(video.frames, video.height, video.width)
    reward = Reward(load_scorer(run.reward.path, run.reward.precision, mesh.device), codec, run.reward)
    student = Trainable("student", family.model(folder, mesh.device), run.student, mesh)
    method_type, _ = METHODS[run.method]
    parts = {"config": run.algorithm, "sampler": run.sampler, "student": student, "reward": reward}
    method = method_type(**{name: parts[name] for name in inspect.signature(method_type).parameters})
    plan = method.plan()
    counts = plan.table(mesh.size)
    if method.learns_from_data:
        source = render_clips(run.data, codec, video.frames, (video.height, video.width), run.seed)
    else:
        source = Prompts(prompts)
    feed = Feed(source, codec, plan, latent_shape, run.sampler.negative_prompt, run.seed, mesh)
    validation = Validation(run.validation, codec, reward, run.sampler, latent_shape, mesh)
    trainer = Trainer(method, {"student": student}, feed, mesh, seed=run.seed)

    start = trainer.resume(run.resume) if run.resume else 0
    carried = trainer.init_from(run.init_from) if run.init_from and not run.resume else None
    if mesh.is_main:
        output.mkdir(parents=True, exist_ok=True)
        settings.save(run, output / "config.yaml")
    with Tracker(output, run.tracking, settings.plain(run), run.steps, start, mesh.is_main) as tracker:
        tracker.table(f"{run.method}, batch of one training step", counts)
        tracker.say(f"writing to {output}" + (f"; weights of {carried}" if carried else ""))
        trainer.run(
            output,
            tracker,
            validation,
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
