"""Loading one role of a run from a checkpoint, without building other roles, optimizers or data."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unified_trainer.basics.types import of_kind
from unified_trainer.models import hub
from unified_trainer.models.base import ActionForm, Codec, Family
from unified_trainer.models.folder import check_unrounded
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.roles.causal import CausalStudent
from unified_trainer.roles.experts import Expert, ExpertLayout
from unified_trainer.roles.headed import Headed
from unified_trainer.roles.role import Trainable, TrainableConfig
from unified_trainer.run.checkpoint.init_from import initialise, roles_in
from unified_trainer.run.checkpoint.manifest import CheckpointError, Manifest, Spec, find
from unified_trainer.run.load_roles import load_roles
from unified_trainer.run.plan.adapters import adapters_of
from unified_trainer.run.plan.downloads import fetch_pipeline
from unified_trainer.run.plan.roles import RolePlan, layout_for, role_path
from unified_trainer.run.registry import family_of, method_named
from unified_trainer.run.settings.command_line import parse
from unified_trainer.run.settings.config import RunConfig
from unified_trainer.run.settings.run_paths import naming_origin

WAY_OUT = "Call from the folder that has it; export, sample, rollout and serve also take --base DIR"


@dataclass(frozen=True)
class LoadedRole:
    """A role with its trained weights."""

    run: RunConfig
    metadata: Manifest
    role: Trainable
    family: Family
    base: Path  # pipeline folder that the role started from
    said: str  # where its weights come from, in words
    layout: ExpertLayout  # its networks in that folder

    @property
    def name(self) -> str:
        """The checkpoint or the folder that its weights are of, for messages."""
        return self.said.partition(";")[0]

    @property
    def actions(self) -> ActionForm | None:
        """The actions that it takes; None for none."""
        return self.family.actions(self.base, self.role.config.new_actions)

    def codec(self) -> Codec:
        """Return the text encoder and VAE of its pipeline folder, with the settings of the run."""
        return self.family.codec(self.base, self.role.device, self.run.encoders)

    @property
    def components(self) -> dict[Expert, str]:
        """Component name of each of its networks in an exported pipeline folder."""
        if self.layout.boundary is None:
            return dict(self.layout.components)
        return dict(zip(self.role.experts, self.family.experts, strict=True))


def load_role(
    spec: str,
    role: str,
    base: Path | None,
    mesh: Mesh,
    *,
    causal: bool,
    flags: Sequence[str] = (),
    families: Sequence[str] = (),
) -> LoadedRole:
    """Load a role of RUN[@step][:ema]; with `causal` as its sampler needs it, else bidirectional and not rounded.

    `flags` change settings of the run, such as its sampler; `families` replace its model families.
    """
    _, metadata = find(spec)
    file = Spec.of(spec).run / "config.yaml"
    if not file.is_file():
        raise CheckpointError(f"{file} is missing: {spec} must be a run directory")
    if role not in roles_in(metadata):
        raise CheckpointError(f"{spec} holds no weights of --role {role}; have {', '.join(roles_in(metadata))}")
    run = parse(["--resume", str(file.parent), *(["--families", *families] if families else []), *flags])
    method = method_named(run.method)
    declared = method.roles[role].kind
    kind = declared if issubclass(declared, Headed) else Trainable
    if causal and run.sampler.chunks.causal:
        kind = CausalStudent
    path = str(base) if base else role_path(run, method, role)
    with naming_origin(file.parent, WAY_OUT):
        if hub.is_hub_id(path):
            path = fetch_pipeline(path, f"{role}.path")
        config = of_kind(TrainableConfig, run.roles[role])
        family, folder = family_of(role, path)
        check_unrounded(*(folder / component for component in family.networks(folder)[0]))
        bits = config.quantize if causal and config.quantize_aware else "none"
        config = dataclasses.replace(config, quantize=bits, quantize_aware=bits != "none")
        loaded = _read(run, metadata, role, kind, config, path, mesh)
    return dataclasses.replace(loaded, said=initialise({role: loaded.role.weights}, spec, mesh))


def load_folder(path: str, run: RunConfig, mesh: Mesh) -> LoadedRole:
    """Load the networks of a pipeline folder as they are, with sampler and video size of a run's settings."""
    kind = CausalStudent if run.sampler.chunks.causal else Trainable
    config = TrainableConfig(path=path, precision=run.roles["student"].precision)
    return dataclasses.replace(_read(run, {}, "student", kind, config, path, mesh), said=path)


def _read(
    run: RunConfig, metadata: Manifest, role: str, kind: type[Trainable], config: TrainableConfig, path: str, mesh: Mesh
) -> LoadedRole:
    """Load a role with the weights of its pipeline folder."""
    # A finished student leaves out its whole share.
    whole = dataclasses.replace(config.sparse_attention, warmup_updates=0)
    bare = dataclasses.replace(config, ema_decay=0.0, activation_memory="none", compile=False, sparse_attention=whole)
    layout = layout_for(role, kind, bare, path)
    adapters = adapters_of(role, kind, bare, path, layout, starting=False)
    loaded = load_roles({role: RolePlan(kind, adapters.config, path, layout, adapters.merged)}, mesh, half=False)[role]
    return LoadedRole(run, metadata, of_kind(Trainable, loaded), *family_of(role, path), "", layout)
