"""Starting a run from the weights of another run's checkpoint, role by role."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from unified_trainer.parallel.mesh import Mesh
from unified_trainer.run.checkpoint.dcp import load, shapes
from unified_trainer.run.checkpoint.manifest import CheckpointError, Manifest, Spec, damage, find

Shapes = Mapping[str, tuple[int, ...]]  # of weights, by name
ADAPTER = ".lora_"  # part of the names of adapter weights
UNDER_WAY = "rollouts"  # state with the weights of samples that are made ahead of training: no role


def initialise(roles: Mapping[str, Mapping[str, Tensor]], spec: str | Path, mesh: Mesh) -> str:
    """Copy the weights of RUN[@step][:ema] into the roles in place and return a description of what was copied.

    `roles` maps a role's name to its weights. A role that the checkpoint lacks keeps its weights; with `:ema`, a role
    without EMA weights gets its weights. All ranks must call it. Raises CheckpointError, before any weight is
    overwritten, if the checkpoint holds none of the roles, is damaged, or has other tensors for a role.
    """
    folder, metadata = find(spec)
    kinds = _kinds(roles, folder, metadata, spec)
    if fault := damage(folder, mesh, kinds.values()):
        raise CheckpointError(f"{folder}: {fault}; choose another step with {Spec.of(spec).run}@STEP")
    check_same({name: shapes_of(weights) for name, weights in roles.items()}, spec)
    weights = {f"{kind}/{key}": tensor.detach() for name, kind in kinds.items() for key, tensor in roles[name].items()}
    load(folder, weights, mesh)
    return _description(roles, kinds, folder, metadata)


def check_same(roles: Mapping[str, Shapes], spec: str | Path) -> None:
    """Raise CheckpointError unless RUN[@step][:ema] has the same tensors, for each role that both have.

    `roles` maps a role's name to the shapes of its weights. Headers of files are read, and no weight.
    """
    folder, metadata = find(spec)
    for name, kind in _kinds(roles, folder, metadata, spec).items():
        held = {key.removeprefix(f"{kind}/"): tuple(shape) for key, shape in shapes(folder, kind).items()}
        _check_same(name, roles[name], held, folder, spec)


def shapes_of(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of weights by their names."""
    return {key: tuple(weight.shape) for key, weight in weights.items()}


def roles_in(metadata: Manifest) -> list[str]:
    """Return the names of the roles whose weights a checkpoint holds."""
    held = {name.split("/")[0] for name in metadata["files"] if name.split("/")[1] == "weights"}
    return sorted(held - {UNDER_WAY})


def _kinds(roles: Mapping[str, object], folder: Path, metadata: Manifest, spec: str | Path) -> dict[str, str]:
    """Return the kind of state that each role is filled from; roles that the checkpoint lacks are left out."""
    common = [name for name in roles if (folder / name / "weights").is_dir()]
    if not common:
        raise CheckpointError(f"{folder} holds weights of {', '.join(roles_in(metadata))}, not of {', '.join(roles)}")
    with_ema = [name for name in common if Spec.of(spec).ema and (folder / name / "ema").is_dir()]
    if Spec.of(spec).ema and not with_ema:
        raise CheckpointError(f"{spec}: {folder} holds no EMA weights of {', '.join(common)}; leave :ema out")
    return {name: f"{name}/ema" if name in with_ema else f"{name}/weights" for name in common}


def _check_same(role: str, own: Shapes, held: Shapes, folder: Path, spec: str | Path) -> None:
    """Raise CheckpointError unless a role has the same tensors in the same shapes here and in the checkpoint."""
    experts = [sorted({key.split("/")[0] for key in keys if "/" in key}) for keys in (held, own)]
    adapters = [any(ADAPTER in key for key in keys) for keys in (held, own)]
    if experts[0] != experts[1]:
        there, here = (f"the {' and '.join(each)} noise expert" if each else "one network" for each in experts)
    else:
        there, here = ("an adapter" if adapter else "all weights" for adapter in adapters)
    if there != here:
        raise CheckpointError(
            f"{folder} holds {there} of {role}, this run trains {here}: export its weights with "
            f"`python -m unified_trainer export {spec} DIR` and start from --{role}.path DIR"
        )
    for key in sorted(own.keys() | held.keys()):
        if own.get(key) != held.get(key):
            there, here = (str(keys.get(key, "absent")) for keys in (held, own))
            raise CheckpointError(
                f"{folder}: {key} of {role} is {there} in the checkpoint, {here} in this run: it is another model"
            )


def _description(roles: Mapping[str, object], kinds: Mapping[str, str], folder: Path, metadata: Manifest) -> str:
    copied = [f"{name}{' (EMA)' if kind.endswith('/ema') else ''}" for name, kind in kinds.items()]
    parts = [f"{', '.join(copied)} from {folder}"]
    parts += [f"{name} from its own path, the checkpoint has none" for name in roles if name not in kinds]
    parts += [f"{name} of the checkpoint is not used" for name in roles_in(metadata) if name not in roles]
    if sampler := metadata["sampler"]:
        settings = {key: value for key, value in sampler.items() if value and isinstance(value, int | float | str)}
        parts.append(f"trained for the sampler {', '.join(f'{key} {value}' for key, value in settings.items())}")
    else:
        parts.append("trained for no particular sampler")
    return "; ".join(parts)
