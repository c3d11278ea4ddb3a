"""From settings to a trainer: what a run is made of, cheap checks before expensive ones."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, get_args

import torch

from unified_trainer.checkpoint.manager import Keep
from unified_trainer.config import ConfigError, RunConfig, plain
from unified_trainer.data.clips import render_clips
from unified_trainer.data.loader import Loader, Source
from unified_trainer.data.parquet import ParquetClips
from unified_trainer.data.prompts import Prompts, read_prompts, training_prompts
from unified_trainer.parallel.device import require_memory
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.registry import METHODS, check_reward, family_of, load_scorers, open_model
from unified_trainer.rewards.hacking_monitor import HackingMonitor, HackingMonitorConfig
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.causal import Causal, causal_form
from unified_trainer.roles.experts import ExpertLayout, Experts, Side, layout_of
from unified_trainer.roles.reward import Reward, RewardConfig
from unified_trainer.roles.role import Role, RoleConfig, Trainable
from unified_trainer.roles.weight_copy import WeightCopy
from unified_trainer.trainer import Trainer
from unified_trainer.validation import Validation

# Whose weights a role starts from when its path is empty, or it has none.
STARTS_AS = {"student": "tiny", "teacher": "student", "critic": "teacher", "reference": "student", "old": "student"}


@dataclass(frozen=True)
class Built:
    trainer: Trainer
    validation: Validation
    counts: dict[str, int | str]  # of one training step's batch
    notes: tuple[str, ...]  # on what and in which precision it runs
    keep: Keep


def build(run: RunConfig, mesh: Mesh) -> Built:
    """Everything that `run` names, with the roles that its method's constructor asks for."""
    keep = Keep(run.keep_last, run.keep_best, run.best_metric, run.best_is)
    keep.check()
    if keep.best and not run.validate_every:
        raise ConfigError(f"keep_best {keep.best} needs validations to compare: set validate_every")
    run.sampler.check()
    check_reward(run.reward, run.video.frames)
    run.algorithm.check(run.sampler)
    plan = run.algorithm.plan()
    counts = plan.table(mesh.data_size)
    method_type, _ = METHODS[run.method]
    hacking_monitor = _hacking_monitor(run, method_type)
    prompts = training_prompts() if run.prompts is None else read_prompts(run.prompts)
    configs, paths = role_settings(run, method_type)
    types = role_types(method_type, run.algorithm)
    if "reference" in types and (run.init_from or run.student.boundary):
        types["reference"] = WeightCopy  # of weights, or experts, that are not those of its path
    if run.sampler.chunks.causal:
        types |= {name: causal_form(types[name]) for name in ("student", "reference") if name in types}
    layouts = {name: role_layout(name, kind, configs[name], paths[name]) for name, kind in types.items()}
    run.algorithm.check_experts(run.sampler, layouts)
    family, folder = family_of("student", paths["student"])
    codec = family.codec(folder, mesh.device)
    latent_shape = codec.latent_shape(run.video.frames, run.video.height, run.video.width)
    _check_same_latents(paths)
    _check_sequence(paths, mesh)
    if run.sampler.chunks.causal:
        run.sampler.chunks.ranges(latent_shape[1])
    scorers, features = load_scorers(run.reward, mesh.device)
    reward = Reward(scorers, codec, run.reward)
    roles = load_roles(types, configs, paths, mesh)
    weight_copies = {name: role for name, role in roles.items() if isinstance(role, WeightCopy)}
    for weight_copy in weight_copies.values():
        weight_copy.update_from(roles["student"])
    if run.sampler.chunks.causal:
        way_out = "lower algorithm.micro_batch and validation.batch, or set sampler.chunks.window_frames"
        samples = max(plan.micro_batch, run.validation.batch)
        counts["cache of the student"] = cache_memory(run, roles["student"], latent_shape, samples, way_out)

    if not run.algorithm.needs_clips:
        source: Source = Prompts(prompts)
    elif run.data.path:
        source = ParquetClips(run.data.path, codec, latent_shape)
    else:
        source = render_clips(run.data, codec, run.video, run.seed)
    loader = Loader(source, codec, plan, latent_shape, run.sampler.negative_prompt, run.seed, mesh)
    parts = {"config": run.algorithm, "sampler": run.sampler, "reward": reward, "loader": loader, **roles}
    method = method_type(**{name: parts[name] for name in inspect.signature(method_type).parameters if name in parts})
    validation = Validation(run.validation, codec, reward, features, run.sampler, latent_shape, mesh)
    trained = {name: role for name, role in roles.items() if isinstance(role, Trainable)}
    contract = plain(run)["sampler"] if method_type.trained_for_sampler else None
    trainer = Trainer(
        method,
        trained,
        loader,
        mesh,
        weight_copies=weight_copies,
        seed=run.seed,
        trained_sampler=contract,
        hacking_monitor=hacking_monitor,
    )
    return Built(trainer, validation, counts, _notes(roles, run.reward, mesh), keep)


def _hacking_monitor(run: RunConfig, method_type: type) -> HackingMonitor | None:
    """For a method that trains on a reward; ConfigError for settings of one that has nothing to watch."""
    if "reward" not in inspect.signature(method_type).parameters:
        if run.hacking_monitor != HackingMonitorConfig():
            raise ConfigError(f"--hacking_monitor.*: {run.method} trains on no reward; leave these settings out")
        return None
    if run.hacking_monitor.action == "stop" and not run.validate_every:
        raise ConfigError("hacking_monitor.action stop needs validations to compare: set validate_every")
    held_out = [f"reward/{name}" for name, scorer in run.reward.named().items() if not scorer.weight]
    return HackingMonitor(run.hacking_monitor, ("judge", *held_out))


def load_roles(
    types: Mapping[str, type[Role]],
    configs: Mapping[str, RoleConfig],
    paths: Mapping[str, str],
    mesh: Mesh,
    *,
    half: bool = True,
) -> dict[str, Role]:
    """The roles, those whose base weights stay as they are over one network in memory for each that a path holds.

    With `half`, such weights are held in the precision of their roles; else in float32, to be changed after all, and
    shared by none.
    """
    layouts = {name: role_layout(name, kind, configs[name], paths[name]) for name, kind in types.items()}
    users: dict[tuple[str, str, str], list[tuple[str, Side]]] = {}  # by path, component, and whose own all weights are
    for name, split in layouts.items():
        for side, component in layout.components.items():
            alone = not half or (side in layout.trained and not configs[name].adapter.rank)
            users.setdefault((paths[name], component, f"{name} {side}" if alone else ""), []).append((name, side))
    backbones: dict[tuple[str, Side], Backbone] = {}
    for (path, component, _), seats in users.items():
        names = [name for name, _ in seats]
        moving = [(name, side) for name, side in seats if side in layouts[name].trained]
        adapters = {Role.key(*seat): configs[seat[0]].adapter for seat in moving if configs[seat[0]].adapter.rank}
        owned = bool(moving) and not adapters
        causal = any(issubclass(types[name], Causal) for name in names)
        waiting = [f"{n}.{s}.offload" for n, s in seats if s in layouts[n].offloaded] if half else []
        if waiting and mesh.size == 1:
            raise ConfigError(f"{waiting[0]} needs more than one rank: a single process keeps its weights in place")
        backbone = Backbone(
            open_model(names[0], path, component, causal=causal),
            mesh,
            trained=owned and issubclass(types[names[0]], Trainable),
            adapters=adapters,
            activation_checkpointing=any(configs[name].activation_checkpointing for name in names),
            selective_checkpointing=any(configs[name].selective_checkpointing for name in names),
            half=half and not owned and all(configs[name].precision == "bf16" for name in names),
            compile=any(configs[name].compile for name in names),
            offload=bool(waiting),
        )
        backbones |= dict.fromkeys(seats, backbone)
    roles: dict[str, Role] = {}
    for name, split in layouts.items():
        own = [backbones[name, side] for side in layout.components]
        networks = own[0] if layout.boundary is None else Experts(*own, layout.boundary)
        roles[name] = types[name](name, networks, configs[name])
    return roles


def role_layout(name: str, kind: type[Role], config: RoleConfig, path: str) -> ExpertLayout:
    """What a role is made of, by its folder and its settings; read from the configs, before any weight."""
    family, folder = family_of(name, path)
    experts = config.experts if issubclass(kind, (Trainable, WeightCopy)) else None
    return layout_of(name, path, config.boundary, experts, *family.networks(folder))


def cache_memory(
    run: RunConfig, student: Role, latent_shape: tuple[int, int, int, int], samples: int, way_out: str
) -> str:
    """What a causal student's cache takes, in words; ValueError when it does not fit."""
    dtype = torch.bfloat16 if run.student.precision == "bf16" else torch.float32
    size = samples * student.cache_bytes(latent_shape, run.sampler.chunks, dtype, run.sampler.sigmas()[:-1])
    size *= 1 if run.sampler.guidance_scale == 1 else 2
    require_memory(size, student.device, "the student's cache", way_out)
    return f"{size / 2**30:.3f} GiB for {samples} samples"


def role_types(method_type: type, algorithm: Any) -> dict[str, type[Role]]:
    """The networks that a method's constructor asks for, by name; one with a default only if its settings want it."""
    types = {}
    for name, parameter in inspect.signature(method_type).parameters.items():
        asked = parameter.annotation
        for kind in get_args(asked) if isinstance(asked, UnionType) else (asked,):
            if isinstance(kind, type) and issubclass(kind, Role):
                types[name] = kind
        if name in types and parameter.default is not parameter.empty and name not in algorithm.optional_roles:
            del types[name]
    return types


def role_settings(run: RunConfig, method_type: type) -> tuple[dict[str, Any], dict[str, str]]:
    """Settings and path of each role of the method; ConfigError for settings of a role that it does not have."""
    configs: dict[str, Any] = {"student": run.student, "teacher": run.teacher, "critic": run.critic}
    types = role_types(method_type, run.algorithm)
    for name, config in configs.items():
        if name not in types and config != type(config)():
            raise ConfigError(f"--{name}.*: {run.method} has no {name}; leave these settings out")
    paths: dict[str, str] = {}
    for name, fallback in STARTS_AS.items():
        paths[name] = (name in configs and configs[name].path) or paths.get(fallback, fallback)
    return {name: configs.get(name, run.student) for name in types}, {name: paths[name] for name in types}


def _check_same_latents(paths: Mapping[str, str]) -> None:
    """Roles must agree on the number of latent channels; read from the configs, before any weight."""
    channels = {}
    for name, path in paths.items():
        family, folder = family_of(name, path)
        channels[name] = family.latent_channels(folder)
    if len(set(channels.values())) > 1:
        raise ConfigError(f"roles must share one latent space, but their channels are {channels}: set their paths")


def _check_sequence(paths: Mapping[str, str], mesh: Mesh) -> None:
    """Whether the sequence ranks can share attention, before any weight is read."""
    ranks = mesh.config.sequence
    for name, path in paths.items():
        family, folder = family_of(name, path)
        heads = family.attention_heads(folder)
        if heads % ranks:
            raise ConfigError(
                f"parallel.sequence must divide the {heads} attention heads of {name}.path, but is {ranks}"
            )


def _notes(roles: Mapping[str, Role], reward: RewardConfig, mesh: Mesh) -> tuple[str, ...]:
    held = [f"{name} {role.precision}" for name, role in roles.items()]
    held += [f"scorer {name} {scorer.precision}" for name, scorer in reward.named().items() if scorer.path]
    rest = "gradients and their sums over ranks, optimizers, guidance, losses and log-probabilities fp32; sigmas fp64"
    return (f"ranks: {mesh}", f"precision: {'; '.join(held)}; text encoder and decoder fp32; {rest}")
