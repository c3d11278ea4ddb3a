"""One role of a run as a checkpoint left it; no other role, no optimizer and no data set is built."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from unified_trainer import config as settings
from unified_trainer.build import load_roles, role_layout, role_settings, role_types
from unified_trainer.checkpoint import dcp as checkpoint
from unified_trainer.checkpoint.dcp import CheckpointError, Spec
from unified_trainer.checkpoint.init_from import initialise, roles_in
from unified_trainer.checkpoint.manifest import Manifest
from unified_trainer.config import RunConfig
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.registry import ALGORITHMS, METHODS, Family, family_of
from unified_trainer.roles.causal import CausalStudent
from unified_trainer.roles.critic import Critic
from unified_trainer.roles.experts import ExpertLayout, Side
from unified_trainer.roles.role import Trainable


@dataclass(frozen=True)
class LoadedRole:
    """A role with its trained weights."""

    run: RunConfig
    metadata: Manifest
    role: Trainable
    family: Family
    base: Path  # the pipeline folder that it started from
    said: str  # where its weights come from, in words
    layout: ExpertLayout  # what the role is made of there

    @property
    def components(self) -> dict[Side, str]:
        """What each of its networks is in a pipeline folder of its own."""
        return dict(zip(self.role.sides, self.family.experts, strict=False))


def load_role(spec: str, role: str, base: Path | None, mesh: Mesh, *, causal: bool) -> LoadedRole:
    """The role of RUN[@step][:ema]; `causal` makes it what its sampler asks for, else it is bidirectional."""
    _, metadata = checkpoint.find(spec)
    file = Spec.of(spec).run / "config.yaml"
    if not file.is_file():
        raise CheckpointError(f"{file} is missing: {spec} must be a run directory")
    if role not in roles_in(metadata):
        raise CheckpointError(f"{spec} holds no weights of --role {role}; have {', '.join(roles_in(metadata))}")
    run = settings.parse(["--config", str(file)], ALGORITHMS, checkpoint.trained_sampler)
    method_type, _ = METHODS[run.method]
    configs, paths = role_settings(run, method_type)
    path = str(base) if base else paths[role]
    kind = Critic if issubclass(role_types(method_type, run.algorithm)[role], Critic) else Trainable
    if causal and run.sampler.chunks.causal:
        kind = CausalStudent
    bare = dataclasses.replace(configs[role], ema_decay=0.0, activation_checkpointing=False, compile=False)
    one = load_roles({role: kind}, {role: bare}, {role: path}, mesh, half=False)[role]
    said = initialise({role: one.weights}, spec, mesh)
    return LoadedRole(run, metadata, one, *family_of(role, path), said, role_layout(role, kind, bare, path))
