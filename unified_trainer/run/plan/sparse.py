"""Sparse attention of a run's roles, checked before any weight is read."""

from collections.abc import Mapping
from typing import cast

from unified_trainer.methods.base import Method
from unified_trainer.models.base import SparseVideoModel
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.roles.causal import Causal
from unified_trainer.run.plan.roles import RolePlan
from unified_trainer.run.registry import open_model
from unified_trainer.run.settings.config import ConfigError, RunConfig


def check_sparse(run: RunConfig, method: type[Method], roles: Mapping[str, RolePlan], mesh: Mesh) -> str:
    """Return a line that says what computes sparse attention, empty without any.

    Raise UserError, naming the key, for sparse attention that a role or the method cannot have.
    """
    lines = []
    for name, role in roles.items():
        sparse, key = role.config.sparse, f"{name}.sparse_attention"
        if not sparse.share:
            continue
        if issubclass(role.kind, Causal):
            raise ConfigError(
                f"{key}: a causal student attends chunk by chunk through a KV cache, and its chunks cut the tiles: "
                f"leave out {key}.share, or train a student of all frames at once (sampler.chunks.chunk_frames 0)"
            )
        copies = [other for other in roles if method.roles[other].copy_of == name]
        if sparse.warmup_updates and (copies or method.sampled_by or run.rollouts.evaluation_workers):
            raise ConfigError(
                f"{key}.warmup_updates: {run.method} runs this role's weights elsewhere too (rollouts, copies or "
                "evaluation workers), where the share cannot rise with its updates: leave it out. A student that was "
                "distilled with a rising share starts with the whole one"
            )
        model = cast(
            SparseVideoModel,
            open_model(name, role.path, next(iter(role.layout.components.values())), causal=False, sparse=sparse),
        )
        lacks = model.lacks_kernel(mesh.device.type)
        if not lacks and role.config.precision != "bf16":
            lacks = f"{name}.precision is {role.config.precision}, and they take bf16"
        torch = f"plain torch, which computes all pairs of tokens. The kernels of fastvideo-kernel do not run: {lacks}"
        lines.append(f"{key}: " + (torch if lacks else "the kernels of fastvideo-kernel"))
    return "\n".join(lines)
