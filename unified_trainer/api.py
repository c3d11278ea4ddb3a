"""Training, sampling and scoring from Python: the runs of the command line, one training step at a time."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Request, with_image_files
from unified_trainer.basics.types import PerSample, Video
from unified_trainer.models.base import Codec
from unified_trainer.parallel.device import Device
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.rewards.reward import Reward
from unified_trainer.roles.experts import expert_at
from unified_trainer.roles.role import Role, Trainable
from unified_trainer.run.registry import family_of
from unified_trainer.run.settings.command_line import parse, with_settings
from unified_trainer.run.settings.config import RunConfig, flat
from unified_trainer.run.settings.settings import check_ranges
from unified_trainer.run.train import started
from unified_trainer.run.train import train as run_training
from unified_trainer.tools.load_run import load_role
from unified_trainer.tools.report.after_training import report_after
from unified_trainer.tools.sample.latents import draw_latents
from unified_trainer.tools.sample.sample import check_images


def configure(recipe: str, method: str, settings: Mapping[str, Any] | None = None) -> RunConfig:
    """Return the settings of a run: those of a recipe for a method, changed by `settings`.

    `recipe` is a name in unified_trainer/recipes or a path/to/file.yaml, and `method` what --method takes. `settings`
    are keys such as "student.learning_rate", or nested mappings of them; "output" is the run directory. Raise UserError
    that names a wrong key or value.
    """
    settings = settings or {}
    kind = flat(settings).get("reward.kind")
    words = [f"--recipe={recipe}", f"--method={method}"]
    words += [f"--init-from={settings['init_from']}"] if settings.get("init_from") else []
    words += [f"--reward.kind={kind}"] if kind else []  # a scorer of another kind has not the recipe's path
    return with_settings(parse(words), settings, "settings")


def train(run: RunConfig) -> int:
    """Run a training from beginning to end, as the command line does, and return its exit code.

    0 is a run that ended or was stopped by Ctrl-C, 3 one that the hacking monitor stopped, and 4 one that the guard of
    distillation stopped.
    """
    return run_training(run, sys.argv, after=report_after(run))


@dataclass(frozen=True)
class Student:
    """A role that generates videos with the sampler and the video size of its run."""

    run: RunConfig
    role: Trainable
    codec: Codec
    name: str = "student"  # of its weights, for messages

    @classmethod
    def load(cls, spec: str, *, base: Path | None = None, device: Device = "auto") -> "Student":
        """Load the student of RUN[@step][:ema], a run directory, without its other roles, whole in this process.

        `base` is the pipeline folder that the student started from, if it is no longer where the run found it. Raise
        UserError for a folder that is no run or holds no such checkpoint.
        """
        loaded = load_role(spec, "student", base, Mesh.alone(device), causal=True)
        codec = loaded.codec()
        return cls(loaded.run, loaded.role, codec, loaded.name)

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[str], *, images: Sequence[str | Path] = (), seed: int = 0, batch: int = 8
    ) -> Video:
        """Return a video of each prompt, in [0, 1], `[n, 3, frames, height, width]`, made `batch` at a time.

        Video i depends on its prompt and on seed + i: the command `sample` writes the same ones. `images` are files
        with a condition image for each prompt, for a student that takes some.
        """
        if not prompts or batch < 1:
            raise UserError(f"sample needs at least one prompt and a batch of at least 1, not {len(prompts)}, {batch}")
        requests, folder = Request.of(with_image_files(prompts, images)), self.codec.folder
        takes = family_of(self.role.name, str(folder))[0].images(folder)
        check_images(self.name, takes, requests, "give images, one for each prompt" if takes[0] else "leave images out")
        parts = []
        for start in range(0, len(requests), batch):
            some = requests[start : start + batch]
            seeds = range(seed + start, seed + start + len(some))
            parts.append(self.codec.decode(draw_latents(self, self.codec, some, seeds)))
        return torch.cat(parts)


class Run:
    """A training run that is driven step by step; a context manager that releases its directory and workers.

    It is the run of the command line, on one rank or on those of torchrun: the caller makes the steps, and each one is
    logged, saved and validated as the settings say. `validate`, `sample` and `score` measure besides, and `save` writes
    a checkpoint that `Run.resume` or --resume continues.
    """

    def __init__(self, settings: RunConfig) -> None:
        """Check the settings, load the models, and write config.yaml into the run directory.

        Raise UserError, before a file is written, for settings that cannot be.
        """
        check_ranges(settings)
        if settings.launcher != "process" or settings.validate_only:
            raise UserError("launcher ray and validate_only are for `train`: a Run is driven in this process")
        self._mesh = Mesh.join(settings.device, settings.parallel)
        with ExitStack() as stack:
            self._built, self._course = stack.enter_context(started(settings, self._mesh, sys.argv))
            self.settings, self.folder = self._built.run, self._course.output
            self._course.begin()  # with the validation before the first step
            self._stack = stack.pop_all()

    @classmethod
    def resume(cls, folder: str | Path, settings: Mapping[str, Any] | None = None) -> "Run":
        """Continue a run from its newest checkpoint whose checksums match.

        Raise UserError if `settings` change what a step computes and are not named in "allow", as for --resume.
        """
        return cls(with_settings(parse([f"--resume={folder}"]), settings or {}, "settings"))

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._course.end()
        self._stack.__exit__(kind, error, trace)  # the process groups stay: torchrun's ranks cannot meet a second time
        if kind is None and self.is_main and (after := report_after(self.settings)) is not None:
            after(self.folder)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only one that should print or write."""
        return self._mesh.is_main

    @property
    def steps_done(self) -> int:
        """The training steps done; a roll-back lowers it."""
        return self._course.step

    @property
    def stopped_by(self) -> str | None:
        """The guard that stopped the run, "guard" or "hacking_monitor", or None: `step` makes no more steps then."""
        return self._course.stopped_by

    @property
    def roles(self) -> Mapping[str, Role]:
        """The roles by name, with their weights."""
        return self._built.roles

    def step(self) -> dict[str, float]:
        """Run the next training step and return its metrics, which docs/metrics.md explains as train/NAME.

        Raise UserError after the last of the settings' `steps`, and in a run that a guard stopped.
        """
        if self.stopped_by:
            raise UserError(f"{self.stopped_by} stopped this run: to go on, set {self.stopped_by}.action to warn")
        if self.steps_done >= self.settings.steps:
            raise UserError(f"the run has all its {self.settings.steps} steps: set steps higher")
        return self._course.next()

    def validate(self) -> dict[str, float]:
        """Generate, measure and log the fixed samples of validation, unless that is done after this step.

        They are in validation/step_N of the run directory. Raise UserError for a run without any, validate_every 0.
        """
        if self._built.validation is None:
            raise UserError("validate_every 0: this run was built without validations; set it to 1 or more")
        return self._course.validate()

    def sample(
        self,
        prompts: Sequence[str],
        *,
        images: Sequence[str | Path] = (),
        seed: int = 0,
        batch: int = 8,
        ema: bool = True,
    ) -> Video:
        """Return videos of the student, as `Student.sample` does; with `ema` by its EMA weights, if it keeps any.

        Raise UserError in a run that left out the student's other expert, which no step of it runs.
        """
        student = self._student()
        levels = self.settings.sampler.sigmas()[:-1].tolist()
        if missing := {expert_at(sigma, student.boundary) for sigma in levels} - {*student.experts}:
            left = ", ".join(sorted(missing))
            raise UserError(f"the {left} expert of the student was not loaded: set validate_every to 1 or more")
        with student.sampling_weights(ema=ema):
            one = Student(self.settings, student, self._built.codec, f"student after training step {self.steps_done}")
            return one.sample(prompts, images=images, seed=seed, batch=batch)

    @torch.no_grad()
    def score(
        self, videos: Video, prompts: Sequence[str], *, images: Sequence[str | Path] = ()
    ) -> dict[str, PerSample]:
        """Return scale x score of every scorer, held-out ones too, for videos in [0, 1]; "reward" is the weighted sum.

        `images` are files with the condition image of each video, for scorers that read them. Raise UserError for a run
        without scorers.
        """
        reward = self._built.reward
        if not isinstance(reward, Reward) or not reward.scorers:
            raise UserError(
                "this run loaded no scorer: set reward.path, reward.kind or reward.scorers.NAME.kind; if one is set, "
                "workers score or nothing is validated: set validate_every, and rollouts.evaluation_workers 0"
            )
        names = (*reward.weights, *reward.held_out)
        parts = reward.parts(videos.to(self._mesh.device), tuple(with_image_files(prompts, images)), names)
        total = {"reward": reward.total(parts[:, : len(reward.weights)])} if reward.weights else {}
        return total | dict(zip(names, parts.unbind(1), strict=True))

    def save(self) -> Path:
        """Write a checkpoint of the steps done and return its folder; older ones go, as keep_last and keep_best say.

        Raise DiskFull, a UserError, if there is no space: earlier checkpoints then stay.
        """
        if self.settings.checkpoint_every < 0:
            raise UserError("checkpoint_every -1: this run saves no checkpoint; set it to 0 or more")
        self._course.save()
        return self.folder / "checkpoints" / f"step_{self.steps_done}"

    def _student(self) -> Trainable:
        return self._built.trainer.roles["student"]
