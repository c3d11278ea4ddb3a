"""Students that are flow maps, checked before any weight is read."""

from collections.abc import Mapping

from unified_trainer.methods import METHODS
from unified_trainer.methods.base import Method
from unified_trainer.roles.causal import Causal
from unified_trainer.run.plan.roles import RolePlan
from unified_trainer.run.registry import family_of, method_named
from unified_trainer.run.settings.config import ConfigError, RunConfig


def check_flow_maps(run: RunConfig, method: type[Method], roles: Mapping[str, RolePlan]) -> None:
    """Raise UserError, naming the key, for a flow map that the method, the sampler or the model cannot have."""
    for name, role in roles.items():
        if not role.config.is_flow_map:
            continue
        key = f"{name}.flow_map"
        if not method.trains_flow_maps:
            able = ", ".join(other for other in METHODS if method_named(other).trains_flow_maps)
            raise ConfigError(
                f"{key}: {run.method} reads velocities at one noise level, and not the mean of a step: leave it out. "
                f"Flow maps are trained by {able}"
            )
        if issubclass(role.kind, Causal):
            raise ConfigError(f"{key}: a causal student is no flow map, set sampler.chunks.chunk_frames 0")
        family, folder = family_of(name, role.path)
        if family.flow_map is None:
            raise ConfigError(f"{key}: {folder} is of a family without flow maps, leave it out")
        if family.images(folder)[0]:
            raise ConfigError(f"{key}: {folder} reads an image as channels, and no such network is a flow map")
