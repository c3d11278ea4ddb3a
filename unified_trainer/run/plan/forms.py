"""The forms of a role's network, checked before any weight is read: causal, a flow map, or with sparse attention."""

import importlib.util
from collections.abc import Mapping
from typing import cast

from unified_trainer.basics.input_files import Schema, read_as
from unified_trainer.basics.versions import install
from unified_trainer.methods import METHODS
from unified_trainer.methods.base import Method
from unified_trainer.models.base import SparseVideoModel
from unified_trainer.parallel.device import PRODUCTS_FROM, device_name, has_flex_attention, has_products
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.roles.causal import Causal
from unified_trainer.run.plan.roles import RolePlan, opened
from unified_trainer.run.registry import family_of, method_named
from unified_trainer.run.settings.config import ConfigError, RunConfig


class SampledAs(Schema):
    """The chunks of the sampler in an exported folder."""

    chunk_frames: int
    independent_first_frame: bool


def check_causal_teacher(run: RunConfig, roles: Mapping[str, RolePlan]) -> str:
    """Return a warning for a causal teacher whose folder does not say that it was trained in chunks.

    Raise ConfigError for one whose folder says that it was trained in other chunks than the run's, or in none.
    """
    if "teacher" not in roles or not issubclass(roles["teacher"].kind, Causal):
        return ""
    path = roles["teacher"].path
    file = family_of("teacher", path)[1] / "scheduler" / "sampler.json"
    if not file.is_file():
        return (
            f"warning: nothing in teacher.path {path} says that it is a causal model, which this teacher must be. To "
            "make one: finetune with --algorithm.forcing teacher, export it, and give the folder as --teacher.path"
        )
    theirs, chunks = read_as(SampledAs, file), run.sampler.chunks
    own = SampledAs(chunk_frames=chunks.chunk_frames, independent_first_frame=chunks.independent_first_frame)
    if theirs != own:
        raise ConfigError(
            f"teacher.path {path} must be a causal model of the student's chunks: {file} has {theirs}, sampler.chunks "
            f"has {own}"
        )
    return ""


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


def check_quantized(method: type[Method], roles: Mapping[str, RolePlan], mesh: Mesh) -> None:
    """Raise UserError, naming the key, for quantisation that a role, its folder or the device cannot have."""
    from unified_trainer.models.folder import is_quantised  # imports transformers

    for name, role in roles.items():
        (kind, form), key, folder = role.config.quantized, f"{name}.quantize", family_of(name, role.path)[1]
        bare = form or role.trainable is not None or mesh.weights is not None
        if bare and any(is_quantised(folder / part) for part in role.layout.components.values()):
            raise ConfigError(
                f"{name}.path {role.path}: its weights are quantised, and such weights are neither trained, rounded "
                "again, nor shared by several ranks: give the weights that they were made of"
            )
        if not form or method.roles[name].copy_of:
            continue
        if importlib.util.find_spec("torchao") is None:
            raise ConfigError(f"{key} needs torchao: {install('quantize')}")
        least = ".".join(map(str, PRODUCTS_FROM.get(kind, ())))
        device = f"{device_name(mesh.device)} has no products of {kind} (compute capability {least} or newer)"
        half, frozen, aware = role.config.precision == "bf16", form == "weights", form == "aware"
        faults = {
            "export --quantize writes no flow map and no sparse attention, leave it out": aware
            and (role.config.is_flow_map or bool(role.config.sparse.share)),
            "a frozen role has int8 or fp8": frozen and kind not in ("int8", "fp8"),
            "every rank holds such weights whole, leave out parallel.offload_weights": frozen
            and mesh.config.offload_weights,
            f"{device}: leave it out": not aware and not has_products(kind, mesh.device),
            f"it rounds bf16, set {name}.precision bf16": not aware and kind == "fp8" and not half,
            f"uncompiled blocks are slower than in bf16, leave {name}.compile out": form == "products"
            and role.config.compile is False,
            "it has a scale for all tokens of a sample, set parallel.sequence 1": kind == "nvfp4"
            and mesh.config.sequence > 1,
        }
        if fault := next((text for text, holds in faults.items() if holds), ""):
            raise ConfigError(f"{key} {kind}: {fault}")
        from unified_trainer.models.quantize import check_sizes

        for expert in role.layout.components.keys() - {*role.layout.left_out}:
            check_sizes(opened(name, role, expert), kind, key)


def check_sparse(run: RunConfig, method: type[Method], roles: Mapping[str, RolePlan], mesh: Mesh) -> str:
    """Return a line that says what computes sparse attention, empty without any.

    Raise UserError, naming the key, for sparse attention that a role or the method cannot have.
    """
    lines = []
    for name, role in roles.items():
        sparse, key = role.config.sparse, f"{name}.sparse_attention"
        if not sparse.share:
            continue
        causal = issubclass(role.kind, Causal)
        if causal:
            run.sampler.chunks.check_whole()
        copies = [other for other in roles if method.roles[other].copy_of == name]
        if sparse.warmup_updates and (copies or method.sampled_by or run.rollouts.evaluation_workers):
            raise ConfigError(
                f"{key}.warmup_updates: {run.method} runs this role's weights elsewhere too (rollouts, copies or "
                "evaluation workers), where the share cannot rise with its updates: leave it out. A student that was "
                "distilled with a rising share starts with the whole one"
            )
        model = cast(SparseVideoModel, opened(name, role, next(iter(role.layout.components))))
        lacks = model.lacks_kernel(mesh.device.type)
        if not lacks and role.config.precision != "bf16":
            lacks = f"{name}.precision is {role.config.precision}, and they take bf16"
        flex = has_flex_attention(mesh.device)
        torch = "FlexAttention on the kept tiles" if flex else "plain torch, which computes all pairs of tokens"
        torch = f"{torch}. The kernels of fastvideo-kernel do not run: {lacks}"
        kernels = "the kernels of fastvideo-kernel"
        kernels += ", and FlexAttention on the kept tiles in passes that read a KV cache" if causal else ""
        lines.append(f"{key}: " + (torch if lacks else kernels))
    return "\n".join(lines)
