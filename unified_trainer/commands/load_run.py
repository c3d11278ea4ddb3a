"""Loading one role of a run from a checkpoint, without building other roles, optimizers or data."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from unified_trainer.build import load_roles
from unified_trainer.checkpoint.init_from import initialise, roles_in
from unified_trainer.checkpoint.manifest import CheckpointError, Manifest, Spec, find
from unified_trainer.cli.command_line import parse
from unified_trainer.config import RunConfig
from unified_trainer.downloads import fetch_pipeline
from unified_trainer.models import hub
from unified_trainer.models.base import Family
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.registry import family_of, method_named
from unified_trainer.role_adapters import adapters_of
from unified_trainer.role_plan import RolePlan, layout_for, role_path
from unified_trainer.roles.causal import CausalStudent
from unified_trainer.roles.experts import Expert, ExpertLayout
from unified_trainer.roles.headed import Headed
from unified_trainer.roles.role import Trainable


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
    def components(self) -> dict[Expert, str]:
        """Component name of each of its networks in an exported pipeline folder."""
        if self.layout.boundary is None:
            return dict(self.layout.components)
        return dict(zip(self.role.experts, self.family.experts, strict=True))


def load_role(spec: str, role: str, base: Path | None, mesh: Mesh, *, causal: bool) -> LoadedRole:
    """Load a role of RUN[@step][:ema]; with `causal` as its sampler needs it, else bidirectional."""
    _, metadata = find(spec)
    file = Spec.of(spec).run / "config.yaml"
    if not file.is_file():
        raise CheckpointError(f"{file} is missing: {spec} must be a run directory")
    if role not in roles_in(metadata):
        raise CheckpointError(f"{spec} holds no weights of --role {role}; have {', '.join(roles_in(metadata))}")
    run = parse(["--resume", str(file.parent)])
    method = method_named(run.method)
    declared = method.roles[role].kind
    kind = declared if issubclass(declared, Headed) else Trainable
    if causal and run.sampler.chunks.causal:
        kind = CausalStudent
    bare = dataclasses.replace(
        run.roles[role], ema_decay=0.0, activation_checkpointing=False, selective_checkpointing=False, compile=False
    )
    path = str(base) if base else role_path(run, method, role)
    if hub.is_hub_id(path):
        path = fetch_pipeline(path, f"{role}.path")
    layout = layout_for(role, kind, bare, path)
    found = adapters_of(role, kind, bare, path, layout, starting=False)
    one = load_roles({role: RolePlan(kind, found.config, path, layout, found.merged)}, mesh, half=False)[role]
    said = initialise({role: one.weights}, spec, mesh)
    return LoadedRole(run, metadata, one, *family_of(role, path), said, layout)
