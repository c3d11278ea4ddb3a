"""The plan of a run: everything that can be known, and refused, before any weight is read."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from unified_trainer.basics.input_files import read_json
from unified_trainer.data.batch_plan import BatchPlan
from unified_trainer.data.captioned import CaptionedVideo
from unified_trainer.data.clips import check_tiny_clips
from unified_trainer.data.parquet_files import StoredFiles, read_stored_files
from unified_trainer.data.prompts import PromptFile, prompts_of, training_captions, validation_captions
from unified_trainer.data.raw_clips import checked_videos, holds_videos
from unified_trainer.data.row_kinds import ClipRows, RowKind, Shape, TrajectoryRows
from unified_trainer.methods.base import Method, MethodSetup
from unified_trainer.methods.rl.rollout_config import RolloutConfig
from unified_trainer.models.base import Family
from unified_trainer.parallel.agreement import files_in_words, prompts_in_words
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.rewards.scorers import check_prompts, check_reward
from unified_trainer.roles.blocks import check_compiler
from unified_trainer.run.checkpoint import manifest
from unified_trainer.run.checkpoint.manager import Keep
from unified_trainer.run.guards.base import GuardConfig
from unified_trainer.run.guards.distillation import DistillationGuardConfig
from unified_trainer.run.guards.hacking_monitor import HackingMonitorConfig
from unified_trainer.run.plan.roles import RolePlan, check_roles, plan_roles, role_path, without_adapter
from unified_trainer.run.registry import family_of, method_named
from unified_trainer.run.settings.config import ConfigError, RunConfig, load_recipe, recipes
from unified_trainer.run.settings.workers import check_installed, check_transport
from unified_trainer.run.tracking.external import check_tracking
from unified_trainer.run.validation.report import check_validation


@dataclass(frozen=True)
class RunPlan:
    """A run that passed every check."""

    run: RunConfig  # with what its files decide filled in, such as the rank of an adapter made elsewhere
    method: type[Method]
    roles: Mapping[str, RolePlan]
    batch: BatchPlan
    counts: dict[str, int | str]  # of one training step's batch
    prompts: tuple[str, ...]  # to train on; none for a method that takes the captions of its clips
    validation_prompts: tuple[str, ...]  # none: the first training prompts
    notes: tuple[str, ...]  # warnings that do not stop the run
    keep: Keep
    family: Family  # of the student
    folder: Path  # of the student
    latent_shape: tuple[int, int, int, int]  # channels, latent frames, height, width
    stored: StoredFiles | None  # parquet files to train on, if any
    videos: tuple[CaptionedVideo, ...] = ()  # to train on

    def compared(self) -> dict[str, str]:
        """Return what must be equal on all ranks: adapters and prompts by digest, files by names and sizes."""
        found = {f"{name}.adapter": role.config.adapter.sha256 for name, role in self.roles.items()}
        for name, role in self.roles.items():
            _, folder = family_of(name, role.path)
            parts = [folder / part for part in role.layout.components.values()]
            files = [file for part in parts for file in sorted(part.glob("*.safetensors"))]
            found[f"{name}.path"] = files_in_words(files)
        found["prompts"] = prompts_in_words(self.prompts)
        found["validation.prompts"] = prompts_in_words(self.validation_prompts)
        if self.stored is not None:
            found["data.path"] = files_in_words([one.file for one in self.stored.files], self.stored.captions)
        if self.videos:
            found["data.path"] = files_in_words([one.file for one in self.videos], [one.caption for one in self.videos])
        return found


def check(run: RunConfig, mesh: Mesh) -> RunPlan:
    """Return the plan of a run; UserError, naming the key and the way out, if the run cannot work.

    This is the only place where settings are checked against each other, and it reads no weights.
    """
    method = method_named(run.method)
    check_complete(run)
    keep = Keep(run.keep_last, run.keep_best, run.best_metric, run.best_is)
    if keep.best and not run.validate_every:
        raise ConfigError(f"keep_best {keep.best} needs validations to compare: set validate_every")
    if keep.best and keep.metric.startswith("reward") and not run.reward.named():
        raise ConfigError(f"best_metric {keep.metric} is not measured without a scorer: give --reward.path")
    _check_guards(run, method)
    _check_workers(run, method, mesh.device.type)
    run.sampler.check()
    check_reward(run.reward, run.video.frames)
    check_validation(run.validation, mesh)
    check_tracking(run.tracking, mesh)
    batch = run.algorithm.plan()
    roles = plan_roles(run, method, starting=not manifest.folders(run.resume / "checkpoints") if run.resume else True)
    for name, role in roles.items():
        if role.trainable is not None:
            role.trainable.check(name)
        if role.config.compile:
            check_compiler(name, mesh.device.type)
    setup = MethodSetup(
        run.sampler,
        {n: role.config for n, role in roles.items()},
        {n: role.layout for n, role in roles.items()},
        run.steps,
    )
    run.algorithm.check(setup)
    counts = batch.table(mesh.data_size)
    notes = [_misfit(run, method), without_adapter(roles)]
    prompts = validation_prompts = PromptFile(())
    if run.trains_on == "prompts":
        prompts = prompts_of(run.prompts, training_captions(), "--prompts", run.prompts_column)
    if run.validation.prompts:
        captions = validation_captions(run.validation.num_samples)
        column = run.validation.prompts_column
        validation_prompts = prompts_of(run.validation.prompts, captions, "--validation.prompts", column)
    notes += [prompts.note, validation_prompts.note]
    check_prompts(run.reward, prompts.placed, validation_prompts.placed)
    family, folder = family_of("student", roles["student"].path)
    latent_shape = family.latent_shape(folder, run.video.frames, run.video.height, run.video.width)
    stored, videos = None, tuple[CaptionedVideo, ...]()
    if run.trains_on == "clips" and run.data.path == "tiny":
        check_tiny_clips(run.video)
    elif run.trains_on == "clips" and holds_videos(Path(run.data.path)):
        videos = checked_videos(Path(run.data.path))
    elif run.trains_on != "prompts":
        stored = read_stored_files(Path(run.data.path), _row_kind(run, latent_shape))
        counts["row groups read from"] = lanes = stored.lanes(batch.prompts, run.data.window_gib)
        if lanes < mesh.data_size:
            notes.append(
                f"warning: {mesh.data_size} ranks read from {lanes} row groups at a time, several from the same one: "
                "raise data.window_gib, or write smaller row groups"
            )
    captions = stored.captions if stored is not None else tuple(video.caption for video in videos)
    if not method.uses_reward:  # then validation alone scores, by default the first captions
        captions = captions[: 0 if validation_prompts.prompts or not run.validate_every else run.validation.num_samples]
    place = stored.place if stored is not None else lambda number: f"the caption of {videos[number].file}"
    check_prompts(run.reward, (captions, lambda number: f"data.path: {place(number)}"))
    if run.sampler.chunks.causal:
        run.sampler.chunks.ranges(latent_shape[1])
    if run.parallel.attention == "sage" and isinstance(run.algorithm, RolloutConfig):
        raise ConfigError(
            "parallel.attention sage rounds to 8 bits in the rollout and not in the update, which would train on other "
            "samples than the policy's: take flash_3, or leave it at auto"
        )
    check_roles(run, roles, mesh)
    run.encoders.check(mesh.device.type)
    said = tuple(note for note in notes if note)
    known = (prompts.prompts, validation_prompts.prompts)
    run = replace(run, **{name: role.config for name, role in roles.items() if not method.roles[name].copy_of})
    return RunPlan(run, method, roles, batch, counts, *known, said, keep, family, folder, latent_shape, stored, videos)


def _row_kind(run: RunConfig, latent_shape: Shape) -> RowKind:
    if run.trains_on == "clips":
        return ClipRows(latent_shape)
    return TrajectoryRows(latent_shape, run.algorithm.teacher_ode(run.sampler).levels, run.sampler.shift)


def check_complete(run: RunConfig) -> None:
    """Raise ConfigError that names everything the run needs and was not given; a run with a recipe reads no file."""
    method = method_named(run.method)
    paths = {name: role_path(run, method, name) for name in method.roles}
    if not run.recipe:
        name, path = next((name, path) for name, path in paths.items() if path not in ("", "tiny"))
        fitting = [recipe for recipe in recipes() if fits(recipe, name, path)]
        if fitting:
            raise ConfigError(
                f"--{name}.path {path} needs a --recipe that was made for this model: have {', '.join(fitting)}"
            )
        raise ConfigError(
            f"--{name}.path {path} needs a --recipe, and none was made for this model: write your own, --recipe "
            "my_recipe.yaml (CONTRIBUTING.md), or look at the settings of one for another model, which is taken with a "
            f"warning: have {', '.join(recipes())}"
        )
    wanted = [("--student.path", "a diffusers pipeline folder", paths["student"])]
    if method.uses_reward:
        wanted.append(("--reward.path", "a folder that import-hpsv3 wrote", run.reward.named()))
    if run.trains_on != "prompts":
        wanted.append(
            ("--data.path", "a folder of videos, or a parquet file or folder of encoded clips", run.data.path)
        )
        if run.prompts not in ("", "tiny"):  # tiny is the recipe's, for other methods
            raise ConfigError(
                f"--prompts {run.prompts}: {run.method} trains on {run.trains_on} and takes their captions; leave "
                "it out, or set --validation.prompts"
            )
    else:
        wanted.append(("--prompts", "a file with one prompt per line", run.prompts))
    if missing := [f"{flag} ({what})" for flag, what, given in wanted if not given]:
        raise ConfigError(f"--method {run.method} with recipe {run.recipe} needs {', '.join(missing)}")


def fits(recipe: str, role: str, path: str) -> bool:
    """Return whether a recipe was made for the model in a role's folder, by the configs of its networks."""
    family, folder = family_of(role, path)
    components, _ = family.networks(folder)
    found = {"networks": len(components)} | read_json(folder / components[0] / "config.json")
    return load_recipe(recipe).get("fits", {}).items() <= found.items()


def _misfit(run: RunConfig, method: type[Method]) -> str:
    """Return a warning for a recipe that was made for another model than the student's."""
    path = role_path(run, method, "student")
    if run.resume or fits(run.recipe, "student", path):
        return ""
    return f"warning: recipe {run.recipe} was made for another model than {path}; look at its settings"


def _check_guards(run: RunConfig, method: type[Method]) -> None:
    """Raise ConfigError for settings of a guard that the method has not, or whose action the run cannot take."""
    guards: dict[str, GuardConfig] = {}
    if method.uses_reward:
        guards["hacking_monitor"] = run.hacking_monitor
        if run.hacking_monitor.action in ("stop", "roll_back") and not run.validate_every:
            action = run.hacking_monitor.action
            raise ConfigError(f"hacking_monitor.action {action} needs validations to compare: set validate_every")
    elif run.hacking_monitor != HackingMonitorConfig():
        raise ConfigError(f"--hacking-monitor.*: {run.method} trains on no reward; leave these settings out")
    if run.algorithm.teacher_guidance is not None:
        run.guard.check()
        guards["guard"] = run.guard
    elif run.guard != DistillationGuardConfig():
        raise ConfigError(f"--guard.*: {run.method} has no teacher and critic to compare; leave these settings out")
    for key, guard in guards.items():
        if guard.action != "roll_back":
            continue
        if not run.checkpoint_every:
            raise ConfigError(f"{key}.action roll_back needs checkpoints to go back to: set checkpoint_every")
        if not run.roles["student"].ema_decay:
            raise ConfigError(f"{key}.action roll_back goes on from EMA weights: set student.ema_decay")
        if run.rollouts.workers or run.rollouts.evaluation_workers:
            raise ConfigError(
                f"{key}.action roll_back cannot take back what workers make beside training: set rollouts.workers 0 "
                "and rollouts.evaluation_workers 0"
            )


def _check_workers(run: RunConfig, method: type[Method], device: str) -> None:
    run.rollouts.check(bool(method.sampled_by), run.method, run.validate_every)
    if run.rollouts.send == "bf16" and run.roles["student"].precision != "bf16":
        raise ConfigError(
            "rollouts.send bf16 needs student.precision bf16: else workers compute otherwise than training"
        )
    for name, count in (("workers", run.rollouts.workers), ("evaluation_workers", run.rollouts.evaluation_workers)):
        if count:
            check_installed(f"rollouts.{name}")
    check_transport(run.rollouts.transport, device)
