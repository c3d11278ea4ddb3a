"""The plan of a run: everything that can be known, and refused, before any weight is read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from unified_trainer.checkpoint.manager import Keep
from unified_trainer.config import ConfigError, RunConfig, load_recipe, recipes
from unified_trainer.data.batch_plan import BatchPlan
from unified_trainer.data.clips import check_tiny_clips
from unified_trainer.data.prompts import PromptFile, prompts_of, training_captions, validation_captions
from unified_trainer.engine.config import check_installed
from unified_trainer.methods.base import Method, MethodSetup
from unified_trainer.models.base import Family
from unified_trainer.models.folder import read_json
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.registry import family_of, method_named, open_model
from unified_trainer.renamed import METRICS
from unified_trainer.rewards.hacking_monitor import HackingMonitorConfig
from unified_trainer.rewards.scorers import check_reward
from unified_trainer.roles.causal import Causal, causal_form
from unified_trainer.roles.experts import ExpertLayout, layout_of
from unified_trainer.roles.role import Frozen, Role, RoleConfig, Trainable, TrainableConfig
from unified_trainer.roles.weight_copy import WeightCopy
from unified_trainer.tracking.external import check_tracking
from unified_trainer.validation import check_validation


@dataclass(frozen=True)
class RolePlan:
    """One role: its class, settings, folder and networks."""

    kind: type[Role]
    config: RoleConfig
    path: str
    layout: ExpertLayout

    @property
    def trainable(self) -> TrainableConfig | None:
        """The settings of a trained role or of a copy of one; None for a frozen role with settings of its own."""
        return self.config if isinstance(self.config, TrainableConfig) else None


@dataclass(frozen=True)
class RunPlan:
    """A run that passed every check."""

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


def check(run: RunConfig, mesh: Mesh) -> RunPlan:
    """Return the plan of a run; UserError, naming the key and the way out, if the run cannot work.

    This is the only place where settings are checked against each other, and it reads no weights.
    """
    method = method_named(run.method)
    _check_complete(run, method)
    keep = Keep(run.keep_last, run.keep_best, run.best_metric, run.best_is)
    keep.check()
    if run.best_metric in METRICS:
        raise ConfigError(f"best_metric {run.best_metric}: renamed to {METRICS[run.best_metric]}")
    if keep.best and not run.validate_every:
        raise ConfigError(f"keep_best {keep.best} needs validations to compare: set validate_every")
    if keep.best and keep.metric.startswith("reward") and not run.reward.named():
        raise ConfigError(f"best_metric {keep.metric} is not measured without a scorer: give --reward.path")
    _check_monitor(run, method)
    _check_workers(run, method)
    run.sampler.check()
    check_reward(run.reward, run.video.frames)
    check_validation(run.validation, mesh)
    check_tracking(run.tracking, mesh)
    run.video.check()
    batch = run.algorithm.plan()
    roles = plan_roles(run, method)
    for name, role in roles.items():
        if role.trainable is not None:
            role.trainable.check(name)
    setup = MethodSetup(
        run.sampler, {n: role.config for n, role in roles.items()}, {n: role.layout for n, role in roles.items()}
    )
    run.algorithm.check(setup)
    counts = batch.table(mesh.data_size)
    notes = [_misfit(run, method)]
    prompts = validation_prompts = PromptFile(())
    if not run.algorithm.needs_clips:
        prompts = prompts_of(run.prompts, training_captions(), "--prompts", run.prompts_column)
    if run.validation.prompts:
        captions = validation_captions(run.validation.num_samples)
        column = run.validation.prompts_column
        validation_prompts = prompts_of(run.validation.prompts, captions, "--validation.prompts", column)
    notes += [prompts.note, validation_prompts.note]
    family, folder = family_of("student", roles["student"].path)
    latent_shape = family.latent_shape(folder, run.video.frames, run.video.height, run.video.width)
    if run.algorithm.needs_clips and run.data.path == "tiny":
        check_tiny_clips(run.data, run.video)
    if run.sampler.chunks.causal:
        run.sampler.chunks.ranges(latent_shape[1])
    _check_networks(roles, mesh)
    run.encoders.check()
    for name, role in roles.items():
        if role.trainable is not None:
            _check_adapter(name, role)
    said = tuple(note for note in notes if note)
    known = (prompts.prompts, validation_prompts.prompts)
    return RunPlan(method, roles, batch, counts, *known, said, keep, family, folder, latent_shape)


def _check_complete(run: RunConfig, method: type[Method]) -> None:
    """Raise ConfigError that names everything the run needs and was not given."""
    paths = {name: role_path(run, method, name) for name in method.roles}
    if not run.recipe:
        name, path = next((name, path) for name, path in paths.items() if path not in ("", "tiny"))
        fitting = [recipe for recipe in recipes() if fits(recipe, name, path)]
        choice = f"have {', '.join(fitting)}" if fitting else f"none was made for it; have {', '.join(recipes())}"
        raise ConfigError(f"--{name}.path {path} needs a --recipe that was made for this model: {choice}")
    wanted = [("--student.path", "a diffusers pipeline folder", paths["student"])]
    if method.uses_reward:
        wanted.append(("--reward.path", "a folder that import-hpsv3 wrote", run.reward.named()))
    if run.algorithm.needs_clips:
        wanted.append(("--data.path", "a folder of FastVideo t2v parquet files", run.data.path))
    else:
        wanted.append(("--prompts", "a file with one prompt per line", run.prompts))
    if missing := [f"{flag} ({what})" for flag, what, given in wanted if not given]:
        raise ConfigError(f"--method {run.method} with recipe {run.recipe} needs {', '.join(missing)}")


def fits(recipe: str, role: str, path: str) -> bool:
    """Return whether a recipe was made for the model in a role's folder, by the configs of its networks."""
    family, folder = family_of(role, path)
    components, _ = family.networks(folder)
    found = {"networks": len(components)} | read_json(folder / components[0] / "config.json")
    return load_recipe(recipe)["fits"].items() <= found.items()


def _misfit(run: RunConfig, method: type[Method]) -> str:
    """Return a warning for a recipe that was made for another model than the student's."""
    path = role_path(run, method, "student")
    if fits(run.recipe, "student", path):
        return ""
    return f"warning: recipe {run.recipe} was made for another model than {path}; look at its settings"


def plan_roles(run: RunConfig, method: type[Method]) -> dict[str, RolePlan]:
    """Return the roles that the method declares and its settings need, in order of declaration."""
    plans: dict[str, RolePlan] = {}
    for name, spec in method.roles.items():
        if not spec.when(run.algorithm):
            continue
        config, path, kind = run.roles[spec.copy_of or name], role_path(run, method, name), spec.kind
        if spec.copy_of and kind is Frozen and (run.init_from or config.boundary):
            kind = WeightCopy  # the trained role starts with other weights, or networks, than those of its folder
        if run.sampler.chunks.causal and (name == "student" or spec.copy_of == "student"):
            kind = causal_form(kind)
        plans[name] = RolePlan(kind, config, path, layout_for(name, kind, config, path))
    return plans


def role_path(run: RunConfig, method: type[Method], name: str) -> str:
    """Return the folder that a role starts from: its own, or that of the role it starts from; no file is read."""
    spec = method.roles[name]
    own = "" if spec.copy_of else run.roles[name].path
    origin = spec.starts_from or next(iter(method.roles))
    if own or origin == name:
        return own
    return role_path(run, method, origin)


def layout_for(name: str, kind: type[Role], config: RoleConfig, path: str) -> ExpertLayout:
    """Return the networks of a role by its folder and its settings, read from configs alone."""
    family, folder = family_of(name, path)
    experts = config.experts if issubclass(kind, (Trainable, WeightCopy)) else None
    return layout_of(name, path, config.boundary, experts, *family.networks(folder))


def _check_monitor(run: RunConfig, method: type[Method]) -> None:
    if not method.uses_reward:
        if run.hacking_monitor != HackingMonitorConfig():
            raise ConfigError(f"--hacking-monitor.*: {run.method} trains on no reward; leave these settings out")
        return
    run.hacking_monitor.check()
    if run.hacking_monitor.action == "stop" and not run.validate_every:
        raise ConfigError("hacking_monitor.action stop needs validations to compare: set validate_every")


def _check_workers(run: RunConfig, method: type[Method]) -> None:
    run.ray.check()
    run.rollouts.check(bool(method.sampled_by), run.method)
    if run.rollouts.workers:
        check_installed("rollouts.workers")


def _check_adapter(name: str, role: RolePlan) -> None:
    """Every name of --ROLE.adapter.layers must be, or end, the name of a linear layer of each trained network."""
    adapter = role.trainable.adapter
    if adapter.layers and not adapter.rank:
        raise ConfigError(f"{name}.adapter.layers is for an adapter: set {name}.adapter.rank, or leave it out")
    for expert in role.layout.trained if adapter.layers else ():
        model = open_model(name, role.path, role.layout.components[expert], causal=issubclass(role.kind, Causal))
        layers = [key for key, module in model.network.named_modules() if isinstance(module, nn.Linear)]
        for wanted in adapter.layers:
            if not any(f".{key}".endswith(f".{wanted}") for key in layers):
                numberless = {re.sub(r"^.*?\.\d+\.", "", key): None for key in layers}
                raise ConfigError(
                    f"{name}.adapter.layers: {role.path} has no linear layer {wanted}; usual are "
                    f"{', '.join(model.adapter_layers)}; all are {', '.join(numberless)}"
                )


def _check_networks(roles: Mapping[str, RolePlan], mesh: Mesh) -> None:
    """Latent channels must agree between roles, and sequence ranks must divide attention heads."""
    channels = {}
    for name, role in roles.items():
        family, folder = family_of(name, role.path)
        channels[name] = family.latent_channels(folder)
        heads = family.attention_heads(folder)
        if heads % mesh.config.sequence:
            raise ConfigError(
                f"parallel.sequence ({mesh.config.sequence}) must divide the {heads} attention heads of {name}.path"
            )
        if issubclass(role.kind, Causal) and family.causal is None:
            raise ConfigError(
                f"{name}.path {role.path}: this family has no causal form; set sampler.chunks.chunk_frames 0"
            )
        waiting = [expert for expert in role.layout.offloaded if mesh.size == 1]
        if waiting:
            raise ConfigError(
                f"{name}.{waiting[0]}.offload needs more than one rank: a single process keeps its weights in place"
            )
    if len(set(channels.values())) > 1:
        raise ConfigError(f"roles must share one latent space, but their channels are {channels}: set their paths")
