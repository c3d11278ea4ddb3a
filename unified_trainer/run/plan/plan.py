"""The plan of a run: everything that can be known, and refused, before any weight is read."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Request
from unified_trainer.data.batch_plan import BatchPlan
from unified_trainer.data.row_kinds import Shape
from unified_trainer.methods.base import Method, MethodSetup
from unified_trainer.methods.rl.rollout_config import RolloutConfig
from unified_trainer.models.base import Family
from unified_trainer.parallel.agreement import files_in_words, prompts_in_words
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.rewards.scorers import check_reward
from unified_trainer.roles.blocks import check_compiler
from unified_trainer.roles.role import RoleConfig, TrainableConfig
from unified_trainer.run.checkpoint import manifest
from unified_trainer.run.checkpoint.manager import Keep
from unified_trainer.run.plan.actions import check_actions
from unified_trainer.run.plan.data import (
    SETS,
    Clips,
    PromptFiles,
    check_texts,
    check_video,
    count_lanes,
    note_files,
    prompt_files,
    read_clips,
)
from unified_trainer.run.plan.faults import with_others
from unified_trainer.run.plan.forms import check_causal_teacher, check_flow_maps, check_quantized, check_sparse
from unified_trainer.run.plan.guards import check_guards, check_worker_packages, check_workers
from unified_trainer.run.plan.images import check_images, conditions_on_first_frame
from unified_trainer.run.plan.length import in_words, note_repeats, row_count, with_steps, with_updates
from unified_trainer.run.plan.roles import (
    RolePlan,
    check_roles,
    left_at_base,
    plan_roles,
    role_path,
    weight_shapes,
    without_adapter,
)
from unified_trainer.run.plan.shift import note_scheduler
from unified_trainer.run.registry import family_of, method_named
from unified_trainer.run.settings.batch import batch_of, check_buffer, sizes, with_fitting_batch
from unified_trainer.run.settings.command_line import replaced_by_checkpoint
from unified_trainer.run.settings.config import ConfigError, RunConfig, recipes
from unified_trainer.run.settings.fitting import check_built, fits, general_recipe, recipe_to_add
from unified_trainer.run.tracking.external import check_tracking
from unified_trainer.run.tracking.shown import check_rollouts
from unified_trainer.run.validation.distances import check_distances


@dataclass(frozen=True)
class RunPlan:
    """A run that passed every check."""

    run: RunConfig  # with what its files decide filled in, such as the rank of an adapter made elsewhere
    method: type[Method]
    roles: Mapping[str, RolePlan]
    batch: BatchPlan
    counts: dict[str, int | str]  # of one training step's batch
    prompts: PromptFiles
    clips: Clips
    first_frames: bool  # whether the first frame of a clip is its condition image
    notes: tuple[str, ...]  # warnings that do not stop the run
    keep: Keep
    family: Family  # of the student
    folder: Path  # of the student
    latent_shape: Shape  # of video.*
    validation_shape: Shape  # of the videos of validations
    trained_shapes: Mapping[str, Shape]  # by bucket, or that of video.* alone

    @property
    def requests(self) -> tuple[Request, ...]:
        """The prompts to train on; none for a method that takes the captions of its clips."""
        return self.prompts["--prompts"].requests

    @property
    def validation_requests(self) -> tuple[Request, ...]:
        """The prompts of validations; none stands for the first of training."""
        return self.prompts["--validation.prompts"].requests

    @property
    def validation_sets(self) -> dict[str, tuple[Request, ...]]:
        """The further sets of validation prompts, by name."""
        files = self.prompts.items()
        return {flag.removeprefix(SETS): file.requests for flag, file in files if flag.startswith(SETS)}

    @property
    def scores_here(self) -> bool:
        """Whether the training processes score samples, in training or in validations."""
        validates = self.run.validate_every > 0 and not self.run.rollouts.evaluation_workers
        return validates or (self.method.uses_reward and not self.run.rollouts.workers)

    def store_bytes(self) -> int:
        """Return the bytes that Ray's object store holds at a time: all training steps under way, and one validation.

        Samples are float32 states and ends. Scores, log-densities and videos are small beside them and are left out.
        """
        run, config = self.run, self.run.rollouts
        steps, total = config.ahead + config.super_batch, 0
        if config.workers and isinstance(run.algorithm, RolloutConfig):
            samples = self.batch.prompts * self.batch.num_samples
            states = max(1, run.algorithm.kept_states(run.sampler))
            total += 4 * steps * samples * states * math.prod(self.latent_shape)
        sent = [(self.method.sampled_by or "student", steps * bool(config.workers))]
        sent += [("student", int(bool(config.evaluation_workers)))]
        for name, versions in sent if config.transport == "object_store" else ():
            if versions:
                role = self.roles[name]
                size = 2 if role.config.precision == "bf16" and role.own_adapter is None else 4
                total += versions * size * sum(map(math.prod, weight_shapes(name, role).values()))
        return total

    def compared(self) -> dict[str, str]:
        """Return what must be equal on all ranks: adapters and prompts by digest, files by names and sizes."""
        inputs = {f"{name}.adapter": role.config.adapter.sha256 for name, role in self.roles.items()}
        for name, role in self.roles.items():
            _, folder = family_of(name, role.path)
            parts = [folder / part for part in role.layout.components.values()]
            files = [file for part in parts for file in sorted(part.glob("*.safetensors"))]
            inputs[f"{name}.path"] = files_in_words(files)
        for flag, file in self.prompts.items():
            inputs[flag.removeprefix("--")] = prompts_in_words([request.identity for request in file.requests])
        return inputs | self.clips.in_words()


def described(run: RunConfig, family: Family, folder: Path) -> str:
    """Return what was learned about a folder's pipeline at the run's size; "" where its family knows it."""
    return family.describe(folder, (run.video.frames, run.video.height, run.video.width))


def check(run: RunConfig, mesh: Mesh) -> RunPlan:
    """Return the plan of a run; UserError, naming the keys and the ways out, if the run cannot work.

    This is the only place where settings are checked against each other, and it reads no weights.
    """
    check_built(run)
    try:
        return _checked(run, mesh)
    except UserError as error:
        raise with_others(error, run, mesh) from error


def check_given(run: RunConfig, mesh: Mesh) -> None:
    """Raise UserError that names everything that a run with a recipe was not given, and the local files it lacks.

    Nothing is downloaded. A run that was given everything is not looked at any further.
    """
    check_built(run)
    try:
        check_complete(run)
    except UserError as error:
        raise with_others(error, run, mesh) from error


def _checked(run: RunConfig, mesh: Mesh) -> RunPlan:
    method = method_named(run.method)
    check_complete(run)
    check_settings(run, method)
    _check_packages(run, mesh)
    run, fitted = with_fitting_batch(run, mesh.data_size)
    batch, roles = batch_of(run), _roles(run, method, mesh)
    family, folder = family_of("student", roles["student"].path)
    check_buffer(run, batch, mesh.data_size)
    latent_shape, validation_shape, trained_shapes = _latent_shapes(run, family, folder)
    prompts = prompt_files(run, images=run.video.fps if family.images(folder)[1] else 0)
    clips = read_clips(run, family, folder, [*trained_shapes.values()])
    rows = row_count(run, prompts, clips)
    run = with_steps(run, batch, rows)
    roles = with_updates(run, roles)
    _check_length(run, batch, roles)
    check_images(run, roles, prompts, clips, scores=method.uses_reward or run.validate_every > 0)
    check_actions(run, roles, prompts, clips)
    cut = check_texts(run, method, prompts, clips)
    shown_prompts = prompts["--validation.prompts"].requests or prompts["--prompts"].requests
    check_distances(run.validation, run.validated().video, shown_prompts)
    sparse_note = check_sparse(run, method, roles, mesh)
    check_flow_maps(run, method, roles)
    check_quantized(method, roles, mesh)
    check_roles(run, roles, mesh)
    run.encoders.check(mesh.device.type)
    # With what the files of the roles decide.
    filled: dict[str, Any] = {name: role.config for name, role in roles.items() if not method.roles[name].copy_of}
    notes = (
        fitted,
        _misfit(run, method),
        without_adapter(roles),
        replaced_by_checkpoint(run),
        left_at_base(run, roles),
        check_causal_teacher(run, roles),
        sparse_note,
        note_repeats(run, batch, rows),
        note_scheduler(
            folder,
            family.tokens(folder, latent_shape),
            run.sampler,
            chosen=fits(run.recipe, "student", roles["student"].path),
        ),
        *cut,
        *note_files(run, batch, prompts, clips, mesh.data_size),
    )
    return RunPlan(
        run=replace(run, **filled),
        method=method,
        roles=roles,
        batch=batch,
        counts={**batch.table(mesh.data_size), **count_lanes(run, batch, clips), **in_words(run, batch, rows)},
        prompts=prompts,
        clips=clips,
        first_frames=run.trains_on == "clips" and conditions_on_first_frame(run, family, folder),
        notes=tuple(filter(None, notes)),
        keep=keep_of(run),
        family=family,
        folder=folder,
        latent_shape=latent_shape,
        validation_shape=validation_shape,
        trained_shapes=trained_shapes,
    )


def _latent_shapes(run: RunConfig, family: Family, folder: Path) -> tuple[Shape, Shape, dict[str, Shape]]:
    """Return the latent shapes of video.*, of validations and of each bucket; UserError if the student has no such."""
    check_video(run, family)
    size_of, shapes = partial(family.latent_shape, folder), bucket_shapes(run, family, folder)
    if run.sampler.chunks.causal and run.algorithm.masks_chunks:
        for shape in shapes.values():
            run.sampler.chunks.check_masked(shape[1])
    return checked_shape(run, size_of), checked_shape(run.validated(), size_of), shapes


def bucket_shapes(run: RunConfig, family: Family, folder: Path) -> dict[str, Shape]:
    """Return the latent shape of each bucket, or of video.* alone; UserError for two that are equal."""
    size_of = partial(family.latent_shape, folder)
    shapes = {name: checked_shape(own, size_of, name) for name, own in run.by_bucket().items()}
    if len({*shapes.values()}) < len(run.data.buckets):
        raise ConfigError(f"data.buckets {' '.join(run.data.buckets)}: two have equal latents: leave one of them out")
    return shapes


def _check_packages(run: RunConfig, mesh: Mesh) -> None:
    """Raise UserError for packages, scorers and trackers that this machine lacks or that cannot read the videos."""
    check_worker_packages(run, mesh.device.type)
    for frames in dict.fromkeys((run.video.frames, run.validated().video.frames)):
        check_reward(run.reward, frames)
    check_tracking(run.tracking, mesh)


def check_settings(run: RunConfig, method: type[Method]) -> None:
    """Raise UserError for settings that fit no machine: no file is read, and no package or device is looked for."""
    if run.keep_best and not run.validate_every:
        raise ConfigError(f"keep_best {run.keep_best} needs validations to compare: set validate_every")
    if run.validate_only and not run.validate_every:
        raise ConfigError("--validate-only: validate_every 0 leaves validations out; set --validate-every")
    for name in ("checkpoint_minutes", "checkpoint_mirror", "keep_best") if run.checkpoint_every < 0 else ():
        if vars(run)[name]:
            raise ConfigError(f"{name} needs checkpoints, and checkpoint_every -1 saves none: set one of them to 0")
    _check_unread(run, method)
    check_guards(run, method)
    check_workers(run, method)
    check_rollouts(run, method)
    run.sampler.check()
    for name, role in run.roles.items():
        if isinstance(role, TrainableConfig):
            role.check(name)


def _check_unread(run: RunConfig, method: type[Method]) -> None:
    """Raise ConfigError for prompts or data that the method would not read; tiny is the recipe's, for other methods."""
    sampled = run.trains_on != "clips" or method.sampled_by
    if run.data.buckets and (sampled or run.data.path == "tiny"):
        why = f"{run.method} with these settings makes samples" if sampled else "the tiny world has clips"
        raise ConfigError(f"data.buckets: {why} of one size: leave it out")
    if run.trains_on != "prompts" and run.prompts not in ("", "tiny"):
        raise ConfigError(
            f"--prompts {run.prompts}: {run.method} trains on {run.trains_on} and takes their captions; leave "
            "it out, or set --validation.prompts"
        )
    if run.trains_on == "prompts" and run.data.path not in ("", "tiny") and not run.resume:
        raise ConfigError(
            f"--data.path {run.data.path}: {run.method} with these settings trains on prompts and would not read "
            f"it; to train on the captions of its clips, give --prompts {run.data.path} instead"
        )


def keep_of(run: RunConfig) -> Keep:
    """Return which checkpoints are kept; ConfigError for a metric that no scorer measures."""
    keep = Keep(last=run.keep_last, best=run.keep_best, metric=run.best_metric, order=run.best_is)
    if keep.best and keep.metric.startswith("reward") and not run.reward.named():
        raise ConfigError(f"best_metric {keep.metric} is not measured without a scorer: give --reward.path")
    return keep


def _roles(run: RunConfig, method: type[Method], mesh: Mesh) -> dict[str, RolePlan]:
    """Return the plans of the roles, after the method has checked its settings with theirs."""
    starting = not (run.resume and manifest.folders(run.resume / "checkpoints"))
    roles = plan_roles(run, method, starting=starting)
    for name, role in roles.items():
        if role.config.compile in (True, "max_autotune"):
            check_compiler(name, mesh.device.type)
    check_method(run, {name: role.config for name, role in roles.items()}, roles)
    return roles


def check_method(run: RunConfig, configs: Mapping[str, RoleConfig], roles: Mapping[str, RolePlan]) -> None:
    """Raise UserError if the method's settings do not fit those of its roles and their networks."""
    layouts = {name: role.layout for name, role in roles.items()}
    run.algorithm.check(MethodSetup(sampler=run.sampler, roles=configs, layouts=layouts, steps=run.steps))


def _check_length(run: RunConfig, batch: BatchPlan, roles: Mapping[str, RolePlan]) -> None:
    """Raise UserError if the method's settings do not fit the length that follows from the data, or a smaller batch."""
    configs = {name: role.config for name, role in roles.items()}
    if run.epochs:
        check_method(run, configs, roles)
    if batch.ramp:
        smaller = {name: count for name, count in sizes(batch.at(0)).items() if name in vars(run.algorithm)}
        try:
            check_method(replace(run, algorithm=replace(run.algorithm, **smaller)), configs, roles)
        except UserError as error:
            raise ConfigError(f"ramp_up.start {run.ramp_up.start}: {error}") from error
    if batch.by_failures and not run.data.shuffle:
        raise ConfigError("data.no-shuffle: prompts are drawn by failures, leave algorithm.failure_below out")


def checked_shape(run: RunConfig, latent_shape: Callable[[int, int, int], Shape], bucket: str = "") -> Shape:
    """Return the latent shape of a run's videos, or of those of a `bucket`, which messages then name.

    Raise UserError for a size that the student cannot make, with chunks that do not fit, or for unfit attention.
    """
    try:
        shape = latent_shape(run.video.frames, run.video.height, run.video.width)
        if run.sampler.chunks.causal:
            run.sampler.chunks.ranges(shape[1])
    except UserError as error:
        if not bucket:
            raise
        raise ConfigError(f"data.buckets {bucket}: {error}") from error
    if run.parallel.attention == "sage" and isinstance(run.algorithm, RolloutConfig):
        raise ConfigError(
            "parallel.attention sage rounds to 8 bits in the rollout and not in the update: the samples would come "
            "from another policy than the one that is trained. Set flash_3 or auto"
        )
    return shape


def check_complete(run: RunConfig) -> None:
    """Raise ConfigError that names everything the run needs and was not given; a run with a recipe reads no file."""
    method = method_named(run.method)
    paths = {name: role_path(run, method, name) for name in method.roles}
    if not run.recipe:
        name, path = next((name, path) for name, path in paths.items() if path not in ("", "tiny"))
        if fitting := recipe_to_add(name, path):
            raise ConfigError(f"--{name}.path {path} needs a recipe: {fitting}")
        raise ConfigError(
            f"--{name}.path {path} needs a --recipe, and none was made for this model. Write your own and give "
            "--recipe my_recipe.yaml (CONTRIBUTING.md); a recipe for another model also runs, with a warning: have "
            f"{', '.join(recipes())}"
        )
    wanted: list[tuple[str, str, object]] = [("--student.path", "a diffusers pipeline folder", paths["student"])]
    if method.uses_reward:
        wanted.append(("--reward.path", "a folder that import-hpsv3 wrote", run.reward.named()))
    if run.trains_on != "prompts":
        wanted.append(
            ("--data.path", "a folder of videos, or a parquet file or folder of encoded clips", run.data.path)
        )
    else:
        wanted.append(("--prompts", "a file with one prompt per line", run.prompts))
    if missing := [f"{flag} ({what})" for flag, what, given in wanted if not given]:
        raise ConfigError(f"--method {run.method} with recipe {run.recipe} needs {', '.join(missing)}")


def _misfit(run: RunConfig, method: type[Method]) -> str:
    """Return a warning for a recipe that was made for another model than the student's."""
    path = role_path(run, method, "student")
    if run.resume or fits(run.recipe, "student", path):
        return ""
    if run.recipe == general_recipe("student", path)[0]:
        return f"recipe {run.recipe}: no recipe was made for {path}; look at its settings"
    return f"warning: recipe {run.recipe} was made for another model than {path}; look at its settings"
