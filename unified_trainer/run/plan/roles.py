"""The roles of a run: class, settings, folder, networks and adapters of each, known before any weight is read."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from unified_trainer.basics.types import of_kind
from unified_trainer.methods.base import Method
from unified_trainer.models.adapter_file import AdapterFile
from unified_trainer.models.base import Family, VideoModel
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.roles.adapter import AdapterConfig
from unified_trainer.roles.backbone import adapter_weights
from unified_trainer.roles.causal import Causal, causal_form
from unified_trainer.roles.experts import Expert, ExpertLayout, layout_of
from unified_trainer.roles.headed import Headed
from unified_trainer.roles.recompute import Recompute
from unified_trainer.roles.role import Frozen, Role, RoleConfig, Trainable, TrainableConfig
from unified_trainer.roles.weight_copy import WeightCopy
from unified_trainer.run.checkpoint import manifest
from unified_trainer.run.checkpoint.init_from import check_same, roles_in, shapes_of
from unified_trainer.run.plan.adapters import adapters_of
from unified_trainer.run.registry import family_of, method_named, open_model
from unified_trainer.run.settings.config import ConfigError, RunConfig


@dataclass(frozen=True)
class RolePlan:
    """One role: its class, settings, folder and networks."""

    kind: type[Role]
    config: RoleConfig
    path: str
    layout: ExpertLayout
    merged: Mapping[Expert, AdapterFile] = field(default_factory=dict)  # adapters that are added to the weights
    starts: Mapping[Expert, AdapterFile] = field(default_factory=dict)  # adapters that are trained on

    @property
    def trainable(self) -> TrainableConfig | None:
        """The settings of a trained role or of a copy of one; None for a frozen role with settings of its own."""
        return self.config if isinstance(self.config, TrainableConfig) else None

    @property
    def own_adapter(self) -> AdapterConfig | None:
        """The settings of the adapter that is trained in place of the weights, if there is one."""
        return self.trainable.adapter if self.trainable is not None and self.trainable.adapter.rank else None

    def recomputed(self, blocks: int) -> Recompute:
        """Return what a network of this role, of so many blocks, recomputes in a backward pass, if it has one."""
        if self.trainable is None or not issubclass(self.kind, Trainable):
            return Recompute()
        return Recompute.of_setting(self.trainable.activation_memory, blocks)


def plan_roles(run: RunConfig, method: type[Method], *, starting: bool = True) -> dict[str, RolePlan]:
    """Return the roles that the method declares and its settings need, in order of declaration.

    Without `starting`, the trained weights come from a checkpoint: an adapter that is trained on is not read again.
    """
    plans: dict[str, RolePlan] = {}
    for name, spec in method.roles.items():
        if not (spec.when(run.algorithm) and run.needs_role(name)):
            continue
        config, path, kind = run.roles[spec.copy_of or name], role_path(run, method, name), spec.kind
        if spec.copy_of and kind is Frozen and (run.init_from or config.boundary or config.trains_on_adapter):
            kind = WeightCopy  # the trained role starts with other weights, or networks, than those of its folder
        if run.sampler.chunks.causal and ("student" in (name, spec.copy_of) or spec.in_chunks(run.algorithm)):
            kind = causal_form(kind)
        layout = layout_for(name, kind, config, path)
        origin = plans[spec.copy_of].layout if spec.copy_of else layout
        layout = _without_idle(run, name, layout, origin, of_student="student" in (name, spec.copy_of))
        adapters = adapters_of(spec.copy_of or name, kind, config, path, layout, starting=starting)
        plans[name] = RolePlan(kind, adapters.config, path, layout, adapters.merged, adapters.starts)
    return plans


def _without_idle(
    run: RunConfig, name: str, layout: ExpertLayout, trained: ExpertLayout, *, of_student: bool
) -> ExpertLayout:
    """Leave out the expert that is not trained where nothing runs it; `trained` is the layout of the role's origin."""
    if not trained.trains_one_of_two:
        return layout
    runs = {
        "any": True,
        "before": of_student and not trained.trains(float(run.sampler.sigmas()[0])),
        "below": of_student and "high" in trained.trained,
    }
    shown = run.validated().sampler.sigmas()[:-1].tolist() if name == "student" and run.validate_every else []
    if any(runs[where] for where in run.algorithm.runs_untrained) or not all(map(trained.trains, shown)):
        return layout
    return replace(layout, left_out=tuple(expert for expert in layout.components if expert not in trained.trained))


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
    experts = of_kind(TrainableConfig, config).experts if issubclass(kind, (Trainable, WeightCopy)) else None
    return layout_of(name, path, config.boundary, experts, *family.networks(folder))


def check_roles(run: RunConfig, roles: Mapping[str, RolePlan], mesh: Mesh) -> None:
    """Raise UserError, naming the key, for roles whose networks, adapters and origins do not fit each other."""
    _check_init_from(run, roles)
    _check_networks(run, roles, mesh)
    for name, role in roles.items():
        if role.trainable is not None:
            _check_adapter(name, role, role.trainable.adapter)


def _check_init_from(run: RunConfig, roles: Mapping[str, RolePlan]) -> None:
    """Refuse a checkpoint of --init-from with other weights, or one that would replace an adapter made elsewhere."""
    if not run.init_from or run.resume:  # a resumed run may have outlived the run that it started from
        return
    given = [
        name
        for name, role in roles.items()
        if role.starts or (role.merged and role.trainable is not None and role.own_adapter is None)
    ]
    held = roles_in(manifest.find(run.init_from)[1])
    if both := [name for name in given if name in held]:
        raise ConfigError(f"adapters and --init-from both give the weights of {both[0]}: leave one of them out")
    trained = {name: role for name, role in roles.items() if issubclass(role.kind, Trainable)}
    check_same({name: weight_shapes(name, role) for name, role in trained.items()}, run.init_from)


def weight_shapes(name: str, role: RolePlan) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the weights that a role trains, as in its checkpoints, without memory for them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for expert in role.layout.trained:
        model = opened(name, role, expert)
        if role.own_adapter is not None:
            from unified_trainer.roles.lora import inject

            key = Role.key(name, expert)
            inject(model, key, role.own_adapter, torch.device("meta"))
            own = shapes_of(adapter_weights(model, key))
        else:
            own = shapes_of(dict(model.network.named_parameters()))
        if issubclass(role.kind, Headed):
            own |= role.kind.head_shapes(model)
        shapes |= {f"{expert}/{key}" if expert else key: shape for key, shape in own.items()}
    return shapes


def opened(name: str, role: RolePlan, expert: Expert) -> VideoModel:
    """Return a network of a role, without its weights."""
    causal, component = issubclass(role.kind, Causal), role.layout.components[expert]
    return open_model(name, role.path, component, causal=causal, config=role.config)


def without_adapter(roles: Mapping[str, RolePlan]) -> str:
    """Return a warning for roles that start from the student's folder without its adapter."""
    student = roles["student"]
    own = [name for name, role in roles.items() if role.path == student.path and not (role.merged or role.starts)]
    bare = [name for name in own if not issubclass(roles[name].kind, WeightCopy)]
    if not bare or not (student.merged or student.starts):
        return ""
    return f"warning: {', '.join(bare)} without the student's adapter; set {bare[0]}.adapter.path if it shall have it"


def left_at_base(run: RunConfig, roles: Mapping[str, RolePlan]) -> str:
    """Return a warning for a teacher, with its critic, that keeps the base weights while --init-from moves the student.

    Only a full diffusion model can be a teacher: a student that was trained for a sampler, or a causal one, is none.
    """
    if not run.init_from or run.resume:
        return ""
    metadata, student = manifest.find(run.init_from)[1], roles["student"]
    left = [name for name, role in roles.items() if role.path == student.path and name not in roles_in(metadata)]
    left = [name for name in left if not issubclass(roles[name].kind, WeightCopy)]
    if "teacher" not in left or metadata["sampler"]:
        return ""
    fact = f"{' and '.join(left)} keep the weights of {student.path}, the student starts from {run.init_from}. "
    if run.sampler.chunks.causal:
        paths = " ".join(f"--{name}.path DIR" for name in left)
        return f"note: {fact}To distil a fine-tuned model: export a run of finetune without chunks to DIR, and {paths}"
    way_out = f"To distil the trained model: python -m unified_trainer export {run.init_from} DIR, then "
    return f"warning: {fact}{way_out}--student.path DIR without --init-from"


def _check_adapter(name: str, role: RolePlan, adapter: AdapterConfig) -> None:
    """Every name of --ROLE.adapter.layers must, once, be or end the name of a linear layer of each trained network."""
    if len({*adapter.layers}) < len(adapter.layers):
        twice = Counter(adapter.layers).most_common(1)[0][0]
        raise ConfigError(f"{name}.adapter.layers names {twice} more than once")
    if adapter.layers and not adapter.rank:
        raise ConfigError(f"{name}.adapter.layers is for an adapter: set {name}.adapter.rank, or leave it out")
    for expert in role.layout.trained if adapter.layers else ():
        model = opened(name, role, expert)
        layers = [key for key, module in model.network.named_modules() if isinstance(module, nn.Linear)]
        for wanted in adapter.layers:
            if not any(f".{key}".endswith(f".{wanted}") for key in layers):
                numberless = {re.sub(r"^.*?\.\d+\.", "", key): None for key in layers}
                raise ConfigError(
                    f"{name}.adapter.layers: {role.path} has no linear layer {wanted}; usual are "
                    f"{', '.join(model.adapter_layers)}; all are {', '.join(numberless)}"
                )


def check_heads(name: str, heads: int, sequence: int, key: str = "parallel.sequence") -> None:
    """Raise ConfigError unless the ranks that share the tokens of a sample divide a role's attention heads."""
    if heads == 1 < sequence:
        raise ConfigError(f"{key}: {name}.path is of a family whose tokens {sequence} ranks cannot share; leave it out")
    if heads % sequence:
        raise ConfigError(f"{key} ({sequence}) must divide the {heads} attention heads of {name}.path")


def check_families(families: Mapping[str, Family]) -> None:
    """Raise ConfigError unless all roles, of which the first is the student, read the conditions of one codec."""
    (student, own), *others = families.items()
    for name, family in others:
        if family.codec != own.codec:
            raise ConfigError(
                f"{name}.path is of the family of {family.pipelines[0]}, which cannot read the conditions of "
                f"{student}.path, of that of {own.pipelines[0]}: set {name}.path"
            )


def _check_networks(run: RunConfig, roles: Mapping[str, RolePlan], mesh: Mesh) -> None:
    """Families and latent channels must agree between roles, and sequence ranks must divide attention heads."""
    check_families({name: family_of(name, role.path)[0] for name, role in roles.items()})
    channels = {}
    for name, role in roles.items():
        family, folder = family_of(name, role.path)
        channels[name] = family.latent_channels(folder)
        heads = family.attention_heads(folder)
        check_heads(name, heads, mesh.config.sequence)
        if name == method_named(run.method).sampled_by:
            check_heads(name, heads, run.sequence_of_workers, "rollouts.ranks")
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
        numbers = ", ".join(f"{count} ({name})" for name, count in channels.items())
        raise ConfigError(
            f"roles must share one latent space, but their latents have {numbers} channels: set their paths"
        )
